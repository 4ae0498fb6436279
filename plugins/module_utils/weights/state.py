"""What a model's folder is now: verified or not, usable by an engine or not, and which former downloads may go.

Reads names, sizes and times, never whole files, so that a look at a prepared host takes milliseconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import pwd
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator, Mapping, Optional, Sequence

from .files import COMPARED, MANIFEST, Manifest, WeightsError, gib, scan, some
from .job import refuse_code

# What the engines' units hide from them (ProtectHome=, PrivateTmp=).
HIDDEN_FROM_UNITS = {
    "ProtectHome=": ("/home", "/root", "/run/user"),
    "PrivateTmp=": ("/tmp", "/var/tmp"),  # noqa: S108  named because they must not be used
}
_NOBODY = 65534
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Look:
    """What was seen.

    Attributes:
        why: What is not as it was verified, in a few words; empty when everything is.
        manifest: The manifest that says so.
        found: Names of the files that lie there.
    """

    why: str
    manifest: Manifest
    found: Sequence[str] = field(default_factory=tuple)

    @property
    def verified(self) -> bool:
        """Every file is there, and is the one that was verified."""
        return not self.why

    @property
    def code(self) -> dict[str, str]:
        """Python files of the repository with their SHA-256."""
        return {name: entry["sha256"] for name, entry in self.manifest.files.items() if name.endswith(".py")}

    def summary(self, folder: str) -> str:
        """One sentence or two for the person who deploys."""
        manifest = self.manifest
        if not self.verified:
            return f"{folder}: {self.why}."
        code = f" Python files, not run unless the card lists them: {some(self.code)}." if self.code else ""
        return f"{folder}: {len(manifest.files)} files, {gib(manifest.size)}, {COMPARED[manifest.compared]}.{code}"


def look(folder: Path, manifest_path: Path, *, repository: str, commit: str, exclude: list[str]) -> Look:
    """Compare a folder with its manifest by names, sizes and modification times."""
    manifest = Manifest.read(manifest_path)
    if manifest is None and manifest_path.parent != folder:
        # Used in place, and brought there by this role on another host that shares it.
        manifest = Manifest.read(folder / MANIFEST)
    found = scan(folder, exclude)
    if manifest is None:
        return Look("not verified yet" if found else "not there yet", Manifest(), sorted(found))
    names = sorted(found)
    if (manifest.id, manifest.commit) != (repository, commit):
        return Look(f"verified as {manifest.id} at {manifest.commit or 'no commit'}", manifest, names)
    if not manifest.complete:
        return Look(f"begun, {len(manifest.files)} files verified so far", manifest, names)
    if manifest.exclude != exclude:
        return Look("verified with other model_weights_exclude", manifest, names)
    status = {name: found.get(name) or _status(folder / name) for name in manifest.files}
    gone = [name for name, seen in status.items() if seen is None]
    changed = [name for name, seen in status.items() if seen is not None and not manifest.settled(name, seen)]
    added = [name for name in names if name not in manifest.files]
    why = "; ".join(
        f"{some(named)} {what}"
        for named, what in ((gone, "missing"), (changed, "changed since verified"), (added, "added since"))
        if named
    )
    return Look(why, manifest, names)


def require_model(folder: Path, names: Sequence[str], repository: str) -> None:
    """Require a configuration, safetensors files, and every file that their index names.

    Raises:
        WeightsError: It is not a model's folder, or not all of it.
    """
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        told = [name for name in names if name == "config.json" or name.endswith(".safetensors")]
        raise WeightsError(
            f"{folder} is not a model folder: it holds {some(told) or 'no model file'}, and config.json with "
            f"*.safetensors files was looked for. Set model_weights_folder to the folder that holds {repository}, or "
            "leave it empty to download it."
        )
    if _INDEX not in names:
        return
    try:
        wanted = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{folder / _INDEX} cannot be read: {error!r}. Copy it again.") from None
    missing = wanted.difference(names)
    if missing:
        raise WeightsError(
            f"{folder} is incomplete. Its index names files that are not there: {some(missing)}. Copy them, or empty "
            "the folder and deploy again."
        )


def require_usable(folder: Path, names: Sequence[str], user: str) -> None:
    """Require that the engine's user can open every file where its unit sees them.

    Raises:
        WeightsError: It cannot.
    """
    real = os.path.realpath(folder)
    for setting, hidden in HIDDEN_FROM_UNITS.items():
        for place in hidden:
            if real == place or real.startswith(f"{place}/"):
                raise WeightsError(
                    f"{folder} lies under {place}, which the engines' units cannot see ({setting}). Put the files "
                    "elsewhere, for example under /srv, and set model_weights_folder (or model_weights_root) to it."
                )
    refused = unreadable([f"{folder}/{name}" for name in names], user)
    if refused:
        path, reason = refused[0]
        raise WeightsError(
            f"The engine's user {user} cannot read {len(refused)} of {len(names)} files in {folder}: {path}: "
            f"{reason}. Give it the right to read the files and to pass through every folder above them, for example "
            f"with chmod -R o+rX {folder}."
        )


def require_reviewed(look: Look, allowed: Mapping[str, str]) -> None:
    """Require that all code of the repository is what the card lists, where the card lets code run at all.

    Raises:
        WeightsError: A file is not listed, or is another one.
    """
    if allowed:
        refused = [name for name, sha256 in look.code.items() if allowed.get(name) != sha256]
        if refused:
            refuse_code(look.manifest.id, look.manifest.commit, refused)


def unreadable(paths: Sequence[str], user: str) -> list[tuple[str, str]]:
    """Open files as a user, really; returns (path, reason) for each that cannot be.

    A user that is not there yet will have no groups but its own, and so no rights but everybody's.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            _become(user)
            refused = [(path, reason) for path in paths for reason in [_open(path)] if reason]
            with os.fdopen(writing, "w", encoding="utf-8") as stream:
                json.dump(refused, stream)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return [(path, reason) for path, reason in json.loads(text)]


def prunable(root: Path, current: Path, keep: int, used_by: Sequence[str]) -> list[Path]:
    """Return former downloads that nothing names, but for the `keep` latest.

    `used_by` are patterns of files, such as units: a download whose path stands in one of them is in use. So is one
    that a job is filling.
    """
    texts = [
        Path(name).read_text(encoding="utf-8", errors="replace")
        for pattern in used_by
        for name in glob.glob(pattern)  # noqa: PTH207  an absolute pattern, which Path.glob does not take
        if Path(name).is_file()
    ]
    former = [
        marker
        for marker in root.glob(f"*/*/{MANIFEST}")
        if marker.parent != current and not any(str(marker.parent) in text for text in texts) and not _busy(marker)
    ]
    former.sort(key=lambda marker: marker.stat().st_mtime, reverse=True)
    return [marker.parent for marker in former[keep:]]


def remove(folder: Path) -> None:
    """Remove a download, its manifest first: an interrupted removal leaves nothing that looks verified."""
    (folder / MANIFEST).unlink()
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # other revisions of the model are beside it
        folder.parent.rmdir()


def _become(user: str) -> None:
    if os.geteuid() != 0:
        return
    try:
        entry = pwd.getpwnam(user)
        os.initgroups(user, entry.pw_gid)
        uid, gid = entry.pw_uid, entry.pw_gid
    except KeyError:
        os.setgroups([])
        uid = gid = _NOBODY
    os.setgid(gid)
    os.setuid(uid)


def _open(path: str) -> Optional[str]:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        for folder in _above(path):
            if not os.access(folder, os.X_OK):
                return f"{error.strerror}, it may not pass through {folder}"
        return error.strerror or str(error)
    return None


def _above(path: str) -> Iterator[str]:
    parts = path.split("/")[1:-1]
    return ("/" + "/".join(parts[:depth]) for depth in range(1, len(parts) + 1))


def _status(path: Path) -> Optional[os.stat_result]:
    try:
        return path.stat()
    except OSError:
        return None


def _busy(marker: Path) -> bool:
    """Whether a job holds a download's lock."""
    try:
        with marker.with_name(f"{marker.name}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
