"""One job: list what is wanted, check the space, transfer, verify, and note it in the manifest.

A job may be ended at any moment and started again: what was verified is in the manifest, and what was not is read
again. Only a manifest that says `complete` makes a folder usable.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, NoReturn, Optional

from . import transfer
from .files import (
    COMPARED,
    Digest,
    Manifest,
    Wanted,
    WeightsError,
    digest,
    excluded,
    gib,
    remove_partial,
    scan,
    some,
)
from .hub import PassingError
from .sources import FolderSource, HubSource, Job, Listing, Source

TRIES_WITH_XET = 2
WRONG_TWICE = 2
_LISTING_TRIES = 3
_LONGEST_PAUSE_SECONDS = 300.0
_RATE_SECONDS = 30.0
_RATE_MEANS_SECONDS = 5.0  # before that, it says nothing about what is to come
_SAVE_SECONDS = 10.0
_THREADS = min(16, os.cpu_count() or 1)


class Report:
    """How far a job is: a small JSON file that is replaced as a whole, and a line of the journal for each step."""

    def __init__(self, path: Optional[Path] = None, out: Callable[[str], None] = print) -> None:
        """Report to a file; without one to the journal only."""
        self._path = path
        self._out = out
        self._lock = threading.Lock()
        self._written_at = 0.0
        self._history: list[tuple[float, int]] = []
        self.status: dict[str, Any] = {"state": "starting", "note": "", "done_bytes": 0, "total_bytes": 0}

    def step(self, state: str, line: str = "", **values: Any) -> None:
        """Enter a state, with a line for the journal."""
        self._history.clear()
        self.status.update({"bytes_per_second": 0, "seconds_left": None, "note": "", **values, "state": state})
        if line:
            self._out(line)
        self._write()

    def progress(self, done_bytes: int) -> None:
        """Tell how many bytes are done; the rate is that of the last half minute."""
        now = time.monotonic()
        self._history = [*((at, done) for at, done in self._history if now - at <= _RATE_SECONDS), (now, done_bytes)]
        (first_at, first_done), left = self._history[0], self.status["total_bytes"] - done_bytes
        rate = max(0.0, (done_bytes - first_done) / (now - first_at)) if now > first_at else 0.0
        self.status.update(
            done_bytes=min(done_bytes, self.status["total_bytes"]),
            bytes_per_second=int(rate),
            seconds_left=int(max(0, left) / rate) if rate > 0 and now - first_at >= _RATE_MEANS_SECONDS else None,
        )
        if now - self._written_at >= 1:
            self._write()

    def _write(self) -> None:
        self._written_at = time.monotonic()
        if self._path is not None:
            fresh = self._path.with_name(f"{self._path.name}.new")
            fresh.write_text(json.dumps(self.status), encoding="utf-8")
            fresh.replace(self._path)


class Verifier:
    """Hashes files in threads as soon as they are whole, and notes those that are as they must be."""

    def __init__(
        self, folder: Path, wanted: Mapping[str, Wanted], manifest: Manifest, save: Callable[[], None]
    ) -> None:
        """Nothing is read before `look`."""
        self._folder = folder
        self._wanted = wanted
        self._manifest = manifest
        self._save = save
        self._saved_at = time.monotonic()
        self._pool = ThreadPoolExecutor(_THREADS)
        self._running: dict[str, Future[Digest]] = {}
        self._lock = threading.Lock()
        self._settled_bytes = 0
        self.read_bytes = 0
        self.wrong: dict[str, str] = {}

    def close(self) -> None:
        """Leave what is not read yet."""
        for future in self._running.values():
            future.cancel()
        self._pool.shutdown(wait=True)

    def missing(self) -> list[str]:
        """Files that are not there, or not verified as they are, in the order of their names."""
        return sorted(name for name in self._wanted if not self._manifest.settled(name, self._status(name)))

    def look(self) -> None:
        """Start to hash every file that is there at its full size and not verified, and collect what is done."""
        for name in self.missing():
            status = self._status(name)
            if status is None or name in self._running or name in self.wrong:
                continue
            if status.st_size != self._wanted[name].size:
                self.wrong[name] = f"{status.st_size} bytes instead of {self._wanted[name].size}"
                continue
            want = self._wanted[name]
            git = want.sha256 is None and want.git_sha1 is not None
            self._running[name] = self._pool.submit(digest, self._folder / name, git=git, on_bytes=self._count)
        self._collect()

    def finish(self, on_wait: Callable[[int], None]) -> dict[str, str]:
        """Wait for every hash; returns how each wrong file differs, and forgets about it."""
        self.look()
        while self._running:
            time.sleep(0.05)
            on_wait(self.verified_bytes)
            self._collect()
        self._save()
        wrong, self.wrong = self.wrong, {}
        return wrong

    @property
    def verified_bytes(self) -> int:
        """Bytes that were verified before and those that were read since."""
        return self._settled_bytes + self.read_bytes

    def count_settled(self) -> None:
        """Begin to count from what is verified already."""
        missing = set(self.missing())
        self._settled_bytes = sum(want.size for name, want in self._wanted.items() if name not in missing)
        self.read_bytes = 0

    def _status(self, name: str) -> Optional[os.stat_result]:
        try:
            return (self._folder / name).stat()
        except OSError:
            return None

    def _count(self, count: int) -> None:
        with self._lock:
            self.read_bytes += count

    def _collect(self) -> None:
        for name in [name for name, future in self._running.items() if future.done()]:
            found = self._running.pop(name).result()
            differs = self._wanted[name].differs(found)
            if differs:
                self.wrong[name] = differs
            else:
                self._manifest.add(name, found)
        if time.monotonic() - self._saved_at >= _SAVE_SECONDS:
            self._saved_at = time.monotonic()
            self._save()


def run(job: Job, report: Report, *, token_file: Optional[Path] = None, home: Path = Path("/nonexistent")) -> Manifest:
    """Do a job and return the complete manifest.

    Raises:
        WeightsError: It cannot be done.
    """
    folder = Path(job.folder)
    with _alone(Path(job.manifest)):
        if job.kind == "in_place":
            manifest = _record(job, report)
        else:
            source: Source = FolderSource(job) if job.kind == "folder" else HubSource(job, token_file, home)
            manifest = _bring(job, source, report)
        report.step(
            "done",
            f"{job.id}: {len(manifest.files)} files, {gib(manifest.size)} in {folder}, {COMPARED[manifest.compared]}.",
        )
        return manifest


def _bring(job: Job, source: Source, report: Report) -> Manifest:
    folder, path = Path(job.folder), Path(job.manifest)
    manifest, wanted = _start(job, source, report)
    total = sum(want.size for want in wanted.values())
    report.step(
        "verifying", f"{job.id}: {len(wanted)} files, {gib(total)}, from {source.name}", total_bytes=total, done_bytes=0
    )
    verifier = Verifier(folder, wanted, manifest, lambda: manifest.write(path))
    try:
        # What lies there from before, whoever put it, is read first; what is not as it must be goes.
        verifier.count_settled()
        _remove(folder, verifier.finish(report.progress), report)
        _transfer(job, source, report, verifier, wanted)
    finally:
        verifier.close()
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the client's notes: it would believe them, not the files
    _refuse_strangers(job, folder, wanted)
    for name in wanted:
        (folder / name).chmod(0o444)
    manifest.files = {name: manifest.files[name] for name in sorted(wanted)}
    manifest.complete = True
    manifest.write(path)
    return manifest


def _start(job: Job, source: Source, report: Report) -> tuple[Manifest, dict[str, Wanted]]:
    """Return the manifest to go on with, and what is wanted; a complete manifest says that without the source."""
    path = Path(job.manifest)
    manifest = Manifest.read(path)
    if manifest and (manifest.id, manifest.commit, manifest.exclude) == (job.id, job.commit, job.exclude):
        if manifest.complete:
            return manifest, manifest.wanted()
    else:
        manifest = Manifest(id=job.id, commit=job.commit, exclude=job.exclude)
    report.step("listing", f"{job.id}: asking {source.name} what belongs to {job.commit}")
    listing = _patient(source.listing, job, report)
    unlisted = [name for name in listing.wanted if name.endswith(".py") and name not in (job.code_files or [name])]
    if unlisted:
        refuse_code(job.id, job.commit, unlisted)
    # Verified against another's word before: not verified against this one's.
    manifest.files = {
        name: entry
        for name, entry in manifest.files.items()
        if name in listing.wanted and (listing.compared == manifest.compared)
    }
    manifest.revision, manifest.source, manifest.compared = job.revision or job.commit, source.name, listing.compared
    manifest.write(path)
    return manifest, listing.wanted


def _transfer(job: Job, source: Source, report: Report, verifier: Verifier, wanted: Mapping[str, Wanted]) -> None:
    """Run the client until nothing is missing."""
    folder = Path(job.folder)
    tries = 0  # in a row that brought nothing
    cut_short = 0  # all that ended otherwise than they should
    seen_wrong: dict[str, int] = {}
    why = ""
    while True:
        missing = verifier.missing()
        if not missing:
            return
        if tries >= job.tries:
            _give_up(job, source, wanted, missing, why)
        if tries:
            _pause(job, tries, why, report)
        remove_partial(folder)
        sizes = [wanted[name].size for name in missing]
        _require_space(job, sizes)
        try:
            source.require(missing if why else missing[:1])  # after a failure, every one: which is refused?
        except PassingError as error:
            tries, cut_short, why = tries + 1, cut_short + 1, str(error)
            report.step("waiting", f"{job.id}: {why}")
            continue
        plain = cut_short >= TRIES_WITH_XET and source.can_do_without_xet(sizes)
        note = f"try {cut_short + 1}{', without Xet' if plain else ''}" if cut_short else ""
        command, environment = source.command(missing, plain=plain)
        report.step(
            "transferring", f"{job.id}: {len(missing)} files, {gib(sum(sizes))}{', ' + note if note else ''}", note=note
        )

        def on_look(written: int) -> None:
            report.progress(written)
            verifier.look()

        outcome = transfer.run(command, _environment(environment), folder, job.stall_minutes * 60, on_look)
        report.step("verifying", note=note)
        verifier.count_settled()
        wrong = verifier.finish(report.progress)
        _remove(folder, wrong, report)
        for name, how in wrong.items():
            seen_wrong[name] = seen_wrong.get(name, 0) + 1
            if seen_wrong[name] >= WRONG_TWICE:
                _refuse_bytes(job, source, name, how)
        left = verifier.missing()
        if left:
            why = _why(job, outcome, wrong)
            cut_short += 1
            tries = 0 if len(left) < len(missing) else tries + 1
            report.step("transferring", f"{job.id}: {why}; {len(left)} of {len(wanted)} files are missing")


def _record(job: Job, report: Report) -> Manifest:
    """Hash a folder that is used in place; what was recorded of it before must still be true."""
    folder, path = Path(job.folder), Path(job.manifest)
    manifest = Manifest.read(path) or Manifest.read(folder / path.name)
    if manifest is None or manifest.exclude != job.exclude:
        manifest = Manifest(exclude=job.exclude)
    manifest.id, manifest.commit, manifest.revision = job.id, job.commit, job.revision
    manifest.source = manifest.source or str(folder)
    found = scan(folder, job.exclude)
    gone = [name for name in manifest.files if name not in found]
    known = manifest.wanted()
    wanted = {name: known.get(name) or Wanted(status.st_size) for name, status in found.items()}
    total = sum(want.size for want in wanted.values())
    report.step("verifying", f"{folder}: {len(wanted)} files, {gib(total)}", total_bytes=total, done_bytes=0)
    verifier = Verifier(folder, wanted, manifest, lambda: None)
    try:
        verifier.count_settled()
        changed = verifier.finish(report.progress)
    except PermissionError as error:
        raise WeightsError(
            f"{error.filename} cannot be read by the job that verifies it. It runs as a user of its own: let everyone "
            "read the folder and its files."
        ) from None
    finally:
        verifier.close()
    if gone or changed:
        raise WeightsError(
            f"{folder} is not what it was when it was recorded: "
            + "; ".join(
                [f"{some(gone)} gone"] * bool(gone) + [f"{name}: {how}" for name, how in sorted(changed.items())][:5]
            )
            + f". Bring the files back; or, if this is what you want to serve, remove {path} and deploy again."
        )
    if any(name not in known for name in wanted):
        manifest.compared = "nothing"
    manifest.complete = True
    manifest.write(path)
    return manifest


def _patient(ask: Callable[[], Listing], job: Job, report: Report) -> Listing:
    """Ask until the server answers; an answer that refuses ends it at once."""
    for tried in range(1, _LISTING_TRIES + 1):
        try:
            return ask()
        except PassingError as error:
            if tried == _LISTING_TRIES:
                raise WeightsError(
                    f"{error}, {tried} times. Nothing of {job.id} was downloaded. Check that this host reaches it "
                    "(a proxy belongs into vllm_fleet_environment), or set model_weights_endpoint to a mirror, or "
                    "model_weights_source to a folder or a bundle."
                ) from None
            report.step("waiting", f"{job.id}: {error}")
            _pause(job, tried, str(error), report, error.wait_seconds)
    raise AssertionError


def _pause(job: Job, tries: int, why: str, report: Report, at_least_seconds: float = 0.0) -> None:
    seconds = max(min(job.pause_seconds * 3 ** (tries - 1), _LONGEST_PAUSE_SECONDS), at_least_seconds)
    report.step("waiting", f"{job.id}: next try in {seconds:.0f} s", note=f"{why}; next try in {seconds:.0f} s")
    time.sleep(seconds)


def _require_space(job: Job, sizes: list[int]) -> None:
    """Room for every missing file, and twice the largest: one that is begun again lies there beside its former try."""
    needed = sum(sizes) + 2 * max(sizes)
    free = shutil.disk_usage(job.folder).free
    if free < needed:
        raise WeightsError(
            f"{job.folder} has {gib(free)} free, and {gib(needed)} are needed: {gib(sum(sizes))} of {job.id} are "
            f"missing, and a transfer may hold its largest file ({gib(max(sizes))}) twice more. What is there and "
            "verified is kept. Make room, or set model_weights_root to a larger disk."
        )


def _why(job: Job, outcome: transfer.Outcome, wrong: Mapping[str, str]) -> str:
    """Say in a few words how a try ended."""
    if wrong:
        return f"{some(wrong)} arrived with other content than the repository states"
    if outcome.stalled:
        return f"nothing arrived for {job.stall_minutes:g} min"
    if outcome.returncode == 0:
        return "the client ended as if all files were there"
    said = " ".join(line for line in outcome.output[-6:] if not line.startswith("Hint:"))[:400]
    return f"the client ended with {outcome.returncode}" + (f" ({said})" if said else "")


def _give_up(job: Job, source: Source, wanted: Mapping[str, Wanted], missing: list[str], why: str) -> NoReturn:
    raise WeightsError(
        f"{len(missing)} of {len(wanted)} files of {job.id} did not come from {source.name}: {job.tries} tries in a "
        f"row brought none of them, with and without Xet. The last one: {why}. The other files are kept, and the next "
        f"deploy takes up from there. Missing: {some(missing)}."
    )


def _refuse_bytes(job: Job, source: Source, name: str, how: str) -> NoReturn:
    raise WeightsError(
        f"{source.name} gives out a {name} that is not the one of {job.id} at {job.commit}: {how}, twice. It was "
        "removed, and nothing is served. Something between this host and the publisher changes or cuts files (a "
        "proxy, a mirror, a bad copy, memory or disk): use another model_weights_endpoint or model_weights_source."
    )


def refuse_code(repository: str, commit: str, names: list[str]) -> NoReturn:
    """Refuse code that nobody has reviewed."""
    raise WeightsError(
        f"{repository} at {commit} holds Python files that the card does not allow: {some(names)}. With "
        "--trust-remote-code the engine would run them with its own rights, so it is refused. Read them, then list "
        "each with its SHA-256 under engine.trust_remote_code of the card; or set that to false, if vLLM has the "
        "model's class itself."
    )


def _refuse_strangers(job: Job, folder: Path, wanted: Mapping[str, Wanted]) -> None:
    """An engine reads whatever lies in the folder, so nothing may lie there that was not verified."""
    strangers = [name for name in scan(folder) if name not in wanted and not excluded(name, job.exclude)]
    if strangers:
        raise WeightsError(
            f"{folder} holds files that do not belong to {job.id} at {job.commit}: {some(strangers)}. Move them "
            "elsewhere, and deploy again."
        )


def _remove(folder: Path, wrong: Mapping[str, str], report: Report) -> None:
    for name, how in wrong.items():
        report.step("verifying", f"{name} is removed: {how}")
        (folder / name).unlink()


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """What a client gets: nothing of ours but where programs and temporary files are."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    return {**kept, "HOME": "/nonexistent", **own}


@contextlib.contextmanager
def _alone(manifest: Path) -> Iterator[None]:
    """Hold the folder for this job; hosts that share it over NFS wait for each other here too."""
    manifest.parent.mkdir(parents=True, exist_ok=True)
    with manifest.with_name(f"{manifest.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise WeightsError(
                f"Another job fills {manifest.parent} at this moment, on this or another host. Wait for it, or end it, "
                "and deploy again."
            ) from None
        yield
