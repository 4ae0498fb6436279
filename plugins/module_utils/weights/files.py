"""Files of a model: what they should be, what they are, and the manifest of what was verified and when.

A manifest makes the next look take milliseconds: a file whose size and modification time are those of its verification
is the verified file. Whatever differs is read again, never trusted.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import re
import stat
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Optional

MANIFEST = ".vllm-fleet.json"
SCHEMA = 1
COMMIT = re.compile(r"[0-9a-f]{40}")
PARTIAL = "*.incomplete"
_CLIENT_FOLDER = ".cache"  # where `hf` keeps its own notes and partial files, below the model's folder
_BUFFER_BYTES = 8 * 1024 * 1024  # larger gains nothing on NVMe; hashlib releases the interpreter for each
_GIB = 1024**3


class WeightsError(Exception):
    """The files cannot be had or used; the message is one paragraph that says what, where and what to do."""


@dataclass(frozen=True)
class Wanted:
    """What a file must be.

    Attributes:
        size: Bytes.
        sha256: Its SHA-256 in hexadecimal; None where the source states none.
        git_sha1: Its git blob id (SHA-1 over a header and the content), for files that git itself holds. With neither,
            only the size can be compared.
    """

    size: int
    sha256: Optional[str] = None
    git_sha1: Optional[str] = None

    def differs(self, found: Digest) -> Optional[str]:
        """Say how a file differs from what it must be, or None."""
        if found.size != self.size:
            return f"{found.size} bytes instead of {self.size}"
        if self.sha256 is not None and found.sha256 != self.sha256:
            return f"SHA-256 {found.sha256[:12]}... instead of {self.sha256[:12]}..."
        if self.sha256 is None and self.git_sha1 is not None and found.git_sha1 != self.git_sha1:
            return f"git blob id {str(found.git_sha1)[:12]}... instead of {str(self.git_sha1)[:12]}..."
        return None


@dataclass(frozen=True)
class Digest:
    """What a file is: size in bytes, modification time when it was read, SHA-256, and its git blob id if asked for."""

    size: int
    mtime_ns: int
    sha256: str
    git_sha1: Optional[str]


@dataclass
class Manifest:
    """What of a model was verified.

    Attributes:
        id: Repository.
        commit: Its commit; for a folder used in place, what the inventory says it is.
        revision: What the inventory asked for, such as a branch.
        source: Where the files came from.
        compared: What the hashes were compared with, a word of COMPARED.
        exclude: Patterns of files that were left out.
        complete: Every file that is wanted has been verified.
        files: For each file by its name in the repository: size, mtime_ns, sha256, verified_at (UTC).
    """

    id: str = ""
    commit: str = ""
    revision: str = ""
    source: str = ""
    compared: str = "nothing"
    exclude: list[str] = field(default_factory=list)
    complete: bool = False
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Optional[Manifest]:
        """Read a manifest; None when there is none, or none that can be trusted to be whole."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.pop("schema") != SCHEMA:
                return None
            return cls(**data)
        except (OSError, ValueError, TypeError, AttributeError, KeyError):
            return None

    def write(self, path: Path) -> None:
        """Replace the manifest on disk; a reader sees the old or the new one, never half."""
        text = json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, sort_keys=True) + "\n"
        fresh = path.with_name(f"{path.name}.new")
        with fresh.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        fresh.chmod(0o644)
        fresh.replace(path)

    def add(self, name: str, found: Digest) -> None:
        """Note a file as verified now."""
        self.files[name] = {
            "size": found.size,
            "mtime_ns": found.mtime_ns,
            "sha256": found.sha256,
            "verified_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def settled(self, name: str, status: Optional[os.stat_result]) -> bool:
        """Whether a file is still the one that was verified, as far as its size and modification time tell."""
        entry = self.files.get(name)
        return (
            entry is not None
            and status is not None
            and (entry["size"], entry["mtime_ns"]) == (status.st_size, status.st_mtime_ns)
        )

    def wanted(self) -> dict[str, Wanted]:
        """Return the verified files as what they must be again."""
        return {name: Wanted(entry["size"], entry["sha256"]) for name, entry in self.files.items()}

    @property
    def size(self) -> int:
        """Bytes of all verified files."""
        return sum(entry["size"] for entry in self.files.values())

    def fingerprint(self) -> str:
        """SHA-256 that names these files: equal exactly when repository, commit, names, sizes and hashes are."""
        return fingerprint(self.id, self.commit, self.wanted())


def manifest_path(folder: str, root: str, *, in_place: bool) -> Path:
    """Return where a folder's manifest is: in what we brought ourselves, and below `root` for what is only used."""
    if not in_place:
        return Path(folder) / MANIFEST
    return Path(root) / "records" / f"{hashlib.sha256(folder.encode()).hexdigest()[:12]}.json"


COMPARED = {
    "publisher": "compared with the repository's own checksums",
    "bundle": "compared with the bundle's checksums",
    "peer": "compared with the checksums of the host that they came from",
    "nothing": "hashed and recorded, not compared with the publisher",
}


def fingerprint(repository: str, commit: str, wanted: Mapping[str, Wanted]) -> str:
    """SHA-256 over a repository's name, commit, and the name, size and SHA-256 of every file."""
    listing = [[name, wanted[name].size, wanted[name].sha256] for name in sorted(wanted)]
    return hashlib.sha256(json.dumps([repository, commit, listing]).encode()).hexdigest()


def digest(path: Path, *, git: bool = False, on_bytes: Callable[[int], None] = lambda _: None) -> Digest:
    """Read a file once and hash it, with its git blob id where asked; `on_bytes` is told of every block.

    The git blob id is the SHA-1 of `blob SIZE`, a zero byte and the content (git's hash-object).

    Raises:
        WeightsError: It changed while it was read.
        OSError: It cannot be read.
    """
    sha256 = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        before = os.fstat(stream.fileno())
        sha1 = hashlib.sha1(b"blob %d\0" % before.st_size, usedforsecurity=False) if git else None
        block = memoryview(bytearray(min(_BUFFER_BYTES, before.st_size + 1)))
        while True:
            count = stream.readinto(block)
            if not count:
                break
            sha256.update(block[:count])
            if sha1 is not None:
                sha1.update(block[:count])
            on_bytes(count)
        after = os.fstat(stream.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise WeightsError(f"{path} changed while it was being read. Let nothing write to it, and deploy again.")
    return Digest(after.st_size, after.st_mtime_ns, sha256.hexdigest(), sha1.hexdigest() if sha1 else None)


def scan(folder: Path, exclude: Iterable[str] = ()) -> dict[str, os.stat_result]:
    """List the model's files in a folder by name, links followed; a name that leads nowhere is left out.

    Left out too are hidden folders (a client's notes, version control), our manifest, partial files, and what matches
    `exclude`.
    """
    found: dict[str, os.stat_result] = {}
    patterns = list(exclude)
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            relative = os.path.relpath(f"{parent}/{name}", folder)
            if name.startswith(MANIFEST) or fnmatch.fnmatch(name, PARTIAL) or excluded(relative, patterns):
                continue
            with contextlib.suppress(OSError):
                status = (folder / relative).stat()
                if stat.S_ISREG(status.st_mode):
                    found[relative] = status
    return found


def excluded(name: str, patterns: Iterable[str]) -> bool:
    """Whether a file's name matches one of the patterns, as the client matches them (`*` crosses slashes)."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def safe_name(name: str) -> bool:
    """Whether a repository's file name stays inside the folder that it is put into, and out of our own files."""
    parts = name.split("/")
    return not (
        name.startswith("/")
        or "\\" in name
        or any(ord(character) < ord(" ") for character in name)
        or any(part in ("", ".", "..") for part in parts)
        or parts[0] == _CLIENT_FOLDER
        or parts[-1].startswith(MANIFEST)
    )


def remove_partial(folder: Path) -> int:
    """Remove what an interrupted transfer left: the client gives each try new names and never takes them up again."""
    removed = 0
    for path in folder.rglob(PARTIAL):
        path.unlink()
        removed += 1
    return removed


def usage(folder: Path) -> int:
    """Count the bytes that were written below a folder.

    A client may reserve a file's whole length first: only its blocks tell how much of it is there.
    """
    written = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # moved to its final name meanwhile
                status = os.lstat(f"{parent}/{name}")
                written += min(status.st_size, status.st_blocks * 512)
    return written


def gib(size: float) -> str:
    """Write a number of bytes for a reader."""
    for unit, limit in (("bytes", 1024.0), ("KiB", 1024.0**2), ("MiB", 1024.0**3)):
        if size < limit:
            scaled = size / (limit / 1024)
            return f"{scaled:.0f} {unit}" if unit == "bytes" else f"{scaled:.1f} {unit}"
    return f"{size / _GIB:.1f} GiB"


def some(names: Iterable[str], limit: int = 5) -> str:
    """Write a list of names, and how many more there are."""
    listed = sorted(names)
    rest = len(listed) - limit
    return ", ".join(listed[:limit]) + (f" and {rest} more" if rest > 0 else "")
