"""Where a model's files come from: a server that speaks the Hub's protocol, or a folder on this host."""

from __future__ import annotations

import glob
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable, Mapping, NamedTuple, Optional, Union

from .files import MANIFEST, Manifest, Wanted, WeightsError, excluded, fingerprint, safe_name, scan, some
from .hub import Hub

PLAIN_HTTP_LIMIT_BYTES = 50 * 1000**3  # the `hf` client fetches larger files by Xet only


@dataclass(frozen=True)
class Job:
    """What to bring, from where and how; a JSON object on disk.

    Attributes:
        kind: `hub` (transferred by the `hf` client), `folder` (copied) or `in_place` (only hashed and recorded).
        id: Repository.
        commit: Its commit; for files used in place, what the inventory says it is.
        folder: Where the model's files are to be.
        manifest: Where the manifest is kept; inside `folder` for what we bring ourselves.
        revision: What the inventory asked for.
        endpoint: For `hub`, the server.
        expected: For `hub`, the fingerprint that the listing must have; empty to take the server's word.
        path: For `folder`, where the files are.
        sums: For `folder`, a JSON file with the SHA-256 of files; empty to look for a manifest of ours beside them.
        sums_prefix: For `sums`, what the names of this model's files begin with there.
        exclude: Patterns of files to leave out.
        hf: The client.
        workers: Files at a time.
        stall_minutes: How long nothing may arrive.
        tries: How many tries in a row may bring no file.
        pause_seconds: The pause after the first of them; each further one is three times as long.
        environment: Proxies and the like for the client. May hold passwords: never printed.
        code_files: Python files that may run; None where no code of the repository is run.
    """

    kind: str
    id: str
    commit: str
    folder: str
    manifest: str
    revision: str = ""
    endpoint: str = ""
    expected: str = ""
    path: str = ""
    sums: str = ""
    sums_prefix: str = ""
    exclude: list[str] = field(default_factory=list)
    hf: str = "hf"
    workers: int = 8
    stall_minutes: float = 5.0
    tries: int = 5
    pause_seconds: float = 10.0
    environment: Mapping[str, str] = field(default_factory=dict)
    code_files: Optional[list[str]] = None


class Listing(NamedTuple):
    """What the files must be, and whose word that is (a word of COMPARED)."""

    wanted: dict[str, Wanted]
    compared: str


class HubSource:
    """A server that speaks the Hub's protocol; the real `hf` client does the transfer."""

    def __init__(self, job: Job, token_file: Optional[Path], home: Path) -> None:
        """Ask nothing yet. `home` is a folder for the client's own notes."""
        self.name = job.endpoint
        self._job = job
        self._token_file = token_file
        self._home = home
        self._hub = Hub(job.endpoint, token_file.read_text(encoding="utf-8").strip() if token_file else None)

    def listing(self) -> Listing:
        """Ask the server for the names, sizes and checksums at the commit."""
        wanted = self._hub.listing(self._job.id, self._job.commit, self._job.exclude)
        if not self._job.expected:
            return Listing(wanted, "publisher")
        if fingerprint(self._job.id, self._job.commit, wanted) != self._job.expected:
            raise WeightsError(
                f"{self.name} offers other files of {self._job.id} than its host verified. Nothing was downloaded. See "
                "which program listens there."
            )
        return Listing(wanted, "peer")

    def require(self, names: Iterable[str]) -> None:
        """Require that these files are given out; the first refusal says why, and no client need be started."""
        for name in names:
            self._hub.require(self._job.id, self._job.commit, name)

    def can_do_without_xet(self, sizes: Iterable[int]) -> bool:
        """Whether the client can fetch files of these sizes over plain HTTP."""
        return max(sizes, default=0) <= PLAIN_HTTP_LIMIT_BYTES

    def command(self, names: list[str], *, plain: bool) -> tuple[list[str], dict[str, str]]:
        """Return the client's command and environment. Files are named: left alone, it would hash what is there."""
        patterns = names if len(names) == 1 else [glob.escape(name) for name in names]  # several are read as patterns
        command = [self._job.hf, "download", self._job.id, *patterns, "--revision", self._job.commit]
        command += ["--local-dir", self._job.folder, "--max-workers", str(self._job.workers)]
        return command, {
            **self._job.environment,
            "HF_ENDPOINT": self._job.endpoint,
            "HF_HOME": str(self._home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_COLOR": "1",
            "HF_HUB_DISABLE_XET": "1" if plain else "0",
            "HF_XET_CHUNK_CACHE_SIZE_BYTES": "0",  # each chunk is fetched once: a cache of 10 GB would only take space
            # The token by its file's path. Without one, none that happens to lie around either.
            **(
                {"HF_TOKEN_PATH": str(self._token_file)} if self._token_file else {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
            ),
        }


class FolderSource:
    """A folder on this host: a mounted object store, NFS, or a bundle."""

    def __init__(self, job: Job) -> None:
        """Read nothing yet."""
        self.name = job.path
        self._job = job
        self._path = Path(job.path)

    def listing(self) -> Listing:
        """Take the names that lie there, and the checksums that were put beside them."""
        found = scan(self._path, self._job.exclude)
        if not found:
            raise WeightsError(
                f"{self._path} is not there on this host, or holds no files, or they cannot be read. Mount it, or "
                "correct model_weights_source."
            )
        sums, compared = self._sums()
        missing = [name for name in sums if name not in found]
        if missing:
            raise WeightsError(
                f"{self._path} is incomplete: {some(missing)} of its checksums' list are not there. Copy it again."
            )
        if not sums:
            return Listing({name: Wanted(status.st_size) for name, status in found.items()}, "nothing")
        return Listing({name: Wanted(found[name].st_size, sha256) for name, sha256 in sums.items()}, compared)

    def require(self, names: Iterable[str]) -> None:
        """Require that these files can be read."""
        for name in names:
            try:
                with (self._path / name).open("rb"):
                    pass
            except OSError as error:
                raise WeightsError(
                    f"{self._path / name} cannot be read: {error.strerror}. The job runs as a user of its own: let "
                    "everyone read it."
                ) from None

    def can_do_without_xet(self, sizes: Iterable[int]) -> bool:
        """A copy knows no Xet."""
        del sizes
        return True

    def command(self, names: list[str], *, plain: bool) -> tuple[list[str], dict[str, str]]:
        """Return the command of a process of its own: it can be ended where the mount hangs."""
        del plain
        script = Path(__file__).with_name("copy_files.py")
        return [sys.executable, "-I", str(script), self._job.path, self._job.folder, *names], {}

    def _sums(self) -> tuple[dict[str, str], str]:
        if not self._job.sums:
            manifest = Manifest.read(self._path / MANIFEST)
            if manifest is None or not manifest.complete:
                return {}, "nothing"
            sums = {name: entry["sha256"] for name, entry in manifest.files.items()}
            return self._kept(sums), manifest.compared
        try:
            listed = json.loads(Path(self._job.sums).read_text(encoding="utf-8"))
            sums = _sums_of(listed, self._job.sums_prefix)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise WeightsError(f"The bundle's checksums in {self._job.sums} cannot be read: {error!r}.") from None
        if not sums:
            raise WeightsError(
                f"{self._job.sums} names no file below {self._job.sums_prefix}: the bundle was made without "
                f"{self._job.id} at {self._job.commit}. Make it again with this model."
            )
        return self._kept(sums), "bundle"

    def _kept(self, sums: Mapping[str, str]) -> dict[str, str]:
        wrong = [name for name in sums if not safe_name(name)]
        if wrong:
            raise WeightsError(f"The checksums of {self._path} name files outside of it: {some(wrong)}.")
        return {name: sha256 for name, sha256 in sums.items() if not excluded(name, self._job.exclude)}


def _sums_of(listed: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """Take {name: SHA-256} below a prefix from a list of checksums: `files`, or the whole; hashes, or objects."""
    entries = listed.get("files", listed)
    found = {
        name[len(prefix) :]: entry["sha256"] if isinstance(entry, dict) else entry
        for name, entry in entries.items()
        if name.startswith(prefix)
    }
    return {name: sha256 for name, sha256 in found.items() if name.rsplit("/", 1)[-1] != MANIFEST}


Source = Union[HubSource, FolderSource]
