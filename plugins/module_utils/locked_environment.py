"""Python environments made from locks: complete or not there, and pruned by count. Standard library, Python 3.9.

One folder per lock: `lock.txt`, `venv/` and, written last, `complete`. A folder without `complete` is an interrupted
install: nobody may use it, and it is made anew from what uv has in its cache by then.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MIB = 1 << 20
TAIL_LINES = 12
SHOWN_FILES = 3
_COMPLETE = "complete"


class EnvironmentMakingError(Exception):
    """Why there is no environment, in one paragraph."""


@dataclass(frozen=True)
class Wanted:
    """An environment, and where what it is made of comes from.

    `lock` and `uv_lock` are texts, requirements with hashes. `uv` is the folder that holds uv itself. `bundle` is a
    folder made by playbooks/bundle.yml; with it nothing is asked of any network.
    """

    path: Path
    lock: str
    uv: Path
    uv_lock: str
    python: str
    cache: Path
    python_downloads: bool = True
    index_url: str = ""
    find_links: tuple[str, ...] = ()
    torch_backend: str = ""
    bundle: Optional[Path] = None
    wait_seconds: int = 3600

    @property
    def is_complete(self) -> bool:
        """Whether it is there to be used."""
        return (self.path / _COMPLETE).exists()


def locked_size_mib(lock: str) -> Optional[tuple[int, int]]:
    """(MiB to download, MiB installed) as the lock's header says, or None: a lock made by hand has none."""
    said = re.search(r"^# Size: (\d+) MiB to download, about (\d+) MiB installed", lock, re.MULTILINE)
    return (int(said[1]), int(said[2])) if said else None


def locked_packages(lock: str) -> dict[str, str]:
    """{name: version} of a lock, names normalized."""
    return {normal(found[1]): found[2] for found in re.finditer(r"^([\w.-]+)==([^\s;\\]+)", lock, re.MULTILINE)}


def normal(name: str) -> str:
    """A distribution's name as the packaging specifications compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def make(wanted: Wanted) -> dict[str, Any]:
    """Make the environment, or wait for the run that is making it; {changed, python}.

    Raises:
        EnvironmentMakingError: With what was wrong, where, and what to do. The folder then has no `complete`.
    """
    os.umask(0o022)  # engines run as another user than the one who installs
    with only_one(wanted.path.parent / ".lock", wanted.wait_seconds) as lock_file:
        if wanted.is_complete:
            return {"changed": False, "python": None}
        check_bundle(wanted)
        if not (wanted.path / "lock.txt").exists():  # a resumed install has passed this, and used some of it
            check_space(wanted)
        wanted.path.mkdir(exist_ok=True)
        (wanted.path / "lock.txt").write_text(wanted.lock, encoding="utf-8")
        tools = _Tools(wanted, lock_file)
        tools.bring_uv()
        python = tools.find_python()
        tools.uv("venv", "--clear", "--quiet", "--python", python, wanted.path / "venv")
        tools.sync()
        damage = damaged(wanted.path / "venv")
        if damage:  # power was lost while uv filled its cache: what came from there is not what it wrote
            names = sorted({entry["package"] for entry in damage})
            tools.uv("cache", "clean", "--quiet", *names)
            tools.sync(*(f"--reinstall-package={name}" for name in names))
            # What is the same after a fresh install is how the wheel is: some list sizes that their files never had.
            damage = [entry for entry in damaged(wanted.path / "venv") if entry not in damage]
        if damage:
            raise EnvironmentMakingError(
                f"What was installed in {wanted.path} is not what its wheels list: {describe(damage)}. The disk may be "
                "failing; see the kernel's log. Nothing uses this environment, and the next run makes it anew."
            )
        mark_complete(wanted.path)
    return {"changed": True, "python": python}


@contextlib.contextmanager
def only_one(path: Path, wait_seconds: int) -> Iterator[int]:
    """Hold the lock file at `path`, waiting for whoever has it; gives its descriptor.

    A child that is given the descriptor holds the lock too: where this program is killed and its uv is not, the next
    run waits for that uv.

    Raises:
        EnvironmentMakingError: When it is not free within `wait_seconds`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
                    raise EnvironmentMakingError(
                        f"Another run has been at work in {path.parent} for more than {wait_seconds} seconds (it "
                        f"began as process {holder}). Look at it with `ps`, or end it, and deploy again: what it had "
                        "done by then is used."
                    ) from None
                time.sleep(min(1.0, wait_seconds))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def check_bundle(wanted: Wanted) -> None:
    """Refuse a bundle that was made for other locks.

    Raises:
        EnvironmentMakingError: When the bundle, or the lock in it, is not there.
    """
    if wanted.bundle is None:
        return
    held = {path.read_text(encoding="utf-8") for path in (wanted.bundle / "locks").glob("*.txt")}
    if {wanted.lock, wanted.uv_lock} <= held:
        return
    names = sorted(path.name for path in (wanted.bundle / "locks").glob("*.txt"))
    raise EnvironmentMakingError(
        f"The bundle {wanted.bundle} cannot make {wanted.path.name}: "
        + (
            f"it was made for other locks ({', '.join(names)})"
            if names
            else "there is no folder locks/ with locks in it"
        )
        + ". Run playbooks/bundle.yml of this very version of the repository, for this host's Python and architecture, "
        "and bring the folder that it makes to this host."
    )


def check_listed(bundle: Path, folder: Path) -> None:
    """Require that the files of a folder in a bundle are those that its manifest lists.

    Raises:
        EnvironmentMakingError: With the first that is not.
    """
    listed = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))["files"]
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(bundle).as_posix()
        if path.is_file() and not path.is_symlink():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if listed.get(name, {}).get("sha256") != digest:
                raise EnvironmentMakingError(
                    f"{path} is not the file that the bundle was made with: its checksum is not in "
                    f"{bundle / 'manifest.json'}. Bring the bundle to this host again."
                )


def check_space(wanted: Wanted) -> None:
    """Require room for the environment and for uv's cache, before anything is downloaded.

    uv unpacks into its cache and links from there, so one file system needs the environment's size once; another file
    system for the cache, or copying instead of linking, needs it twice.

    Raises:
        EnvironmentMakingError: With folder, needed and free.
    """
    size = locked_size_mib(wanted.lock)
    if size is None:
        return
    installed = size[1]
    places = {"the environment": wanted.path, "uv's cache": wanted.cache}
    devices = {name: existing(path).stat().st_dev for name, path in places.items()}
    shared = len(set(devices.values())) == 1
    twice = shared and os.environ.get("UV_LINK_MODE") == "copy"
    for name, path in places.items():
        needed = installed * 2 if twice else installed
        free = free_mib(path)
        if free < needed:
            raise EnvironmentMakingError(
                f"There is too little room in {path} ({name}): {wanted.path.name} needs {needed / 1024:.1f} GiB there "
                f"and {free / 1024:.1f} GiB are free. Nothing was downloaded. Free some, or set "
                + ("vllm_runtime_root" if name == "the environment" else "vllm_runtime_uv_cache")
                + " to a folder on a larger disk."
            )
        if shared:
            return


def existing(path: Path) -> Path:
    """The nearest folder at or above `path` that is there."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def free_mib(path: Path) -> int:
    """MiB that may be written on the file system of `path`."""
    return shutil.disk_usage(existing(path)).free // MIB


def damaged(venv: Path) -> list[dict[str, str]]:
    """Files of an environment that are missing or shorter than their wheel's RECORD says.

    Sizes and not hashes: it is lost writes that are looked for, and reading 10 GB would take longer than installing.
    Bytecode that wheels bring is compiled anew, to another size.
    RECORD is described in the packaging specifications ("Recording installed projects").
    """
    found = []
    for record in venv.glob("lib/python*/site-packages/*.dist-info/RECORD"):
        site = record.parent.parent
        package = normal(record.parent.name.split("-")[0])
        with record.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.reader(lines))
        found += [{"package": package, "file": f"{record.name} is empty"}] if not rows else []
        for name, _, size in rows:
            try:
                actual = (site / name).stat().st_size
            except FileNotFoundError:
                found.append({"package": package, "file": f"{name} is missing"})
            else:
                if size and actual < int(size) and not name.endswith(".pyc"):
                    found.append({"package": package, "file": f"{name} has {actual} bytes of {size}"})
    return found


def describe(damage: Sequence[Mapping[str, str]]) -> str:
    """The first few of what `damaged` found, in words."""
    shown = "; ".join(f"{entry['package']}: {entry['file']}" for entry in damage[:SHOWN_FILES])
    return shown + (f"; and {len(damage) - SHOWN_FILES} more" if len(damage) > SHOWN_FILES else "")


def mark_complete(path: Path) -> None:
    """Write `complete`, after all else is on the disk: a loss of power leaves either both or no mark."""
    subprocess.run(["sync", "--file-system", str(path)], check=True)
    draft = path / f".{_COMPLETE}"
    with draft.open("w", encoding="utf-8") as file:
        file.write(f"{path.name}\n")
        os.fsync(file.fileno())
    draft.rename(path / _COMPLETE)
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@dataclass(frozen=True)
class _Tools:
    """uv and what brings it, run for one environment."""

    wanted: Wanted
    lock_file: int

    def run(self, *command: object) -> str:
        """Run a command and return its standard output, or raise with the end of what it said."""
        words = [str(word) for word in command]
        try:
            done = subprocess.run(
                words,
                check=False,
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                pass_fds=(self.lock_file,),
                env={**os.environ, **settings(self.wanted)},
            )
        except OSError as error:
            raise EnvironmentMakingError(f"{words[0]} could not be run: {error.strerror}.") from error
        if done.returncode:
            raise EnvironmentMakingError(self._failure(words, done))
        return done.stdout

    def _failure(self, words: list[str], done: subprocess.CompletedProcess[str]) -> str:
        said = redacted(done.stderr + done.stdout, (self.wanted.index_url, *self.wanted.find_links)).strip()
        tail = "\n".join(said.splitlines()[-TAIL_LINES:]) or "It printed nothing."
        name = " ".join([Path(words[0]).name, *words[1:3]])
        if done.returncode < 0:
            return (
                f"`{name}` was killed (signal {-done.returncode}) while it made {self.wanted.path}. Out of memory? See "
                f"`journalctl -k`. Deploy again: what it had done by then is used. {tail}"
            )
        if os.strerror(errno.ENOSPC) in said:
            return (
                f"The disk is full: `{name}` stopped while it made {self.wanted.path}, with "
                f"{free_mib(self.wanted.path)} MiB free there and {free_mib(self.wanted.cache)} MiB in "
                f"{self.wanted.cache}. Free some and deploy again: what it had done by then is used. {tail}"
            )
        return f"`{name}` failed while it made {self.wanted.path}. Nothing uses that folder. It said:\n{tail}"

    def uv(self, *arguments: object) -> str:
        """Run the locked uv."""
        return self.run(self.wanted.uv / "venv/bin/uv", *arguments)

    def bring_uv(self) -> None:
        """Install the locked uv into an environment of its own, by the pip of the host's Python."""
        folder = self.wanted.uv
        if (folder / _COMPLETE).exists():
            return
        folder.mkdir(exist_ok=True)
        (folder / "lock.txt").write_text(self.wanted.uv_lock, encoding="utf-8")
        self.run("/usr/bin/python3", "-m", "venv", "--clear", folder / "venv")
        self.run(
            *(folder / "venv/bin/pip", "install", "--quiet", "--require-hashes", "--no-deps"),
            *("--only-binary=:all:", f"--requirement={folder / 'lock.txt'}"),
        )
        mark_complete(folder)

    def find_python(self) -> str:
        """Path of the Python to use: the host's own, the bundle's, or one that uv brings where that is allowed."""
        wanted = self.wanted
        with contextlib.suppress(EnvironmentMakingError):
            return self.uv("python", "find", "--no-project", wanted.python).strip()
        if wanted.bundle is not None:
            for python in (wanted.bundle / "python").glob(f"cpython-{wanted.python}.*"):
                check_listed(wanted.bundle, python)
                shutil.copytree(python, python_folder(wanted) / python.name, symlinks=True, dirs_exist_ok=True)
            with contextlib.suppress(EnvironmentMakingError):
                return self.uv("python", "find", "--no-project", wanted.python).strip()
            remedy = f"Install it, or make the bundle with bundle_python set: {wanted.bundle}/python has none"
        elif wanted.python_downloads:
            try:
                self.uv("python", "install", "--quiet", wanted.python)
                return self.uv("python", "find", "--no-project", wanted.python).strip()
            except EnvironmentMakingError as error:
                remedy = f"Install it, or let uv reach where it gets one from. {error}"
        else:
            remedy = "Install it, or set vllm_runtime_python_downloads to let uv bring one"
        raise EnvironmentMakingError(
            f"This host has no Python {wanted.python}, which the lock is for. {remedy}. Or set vllm_runtime_python to "
            "a version that it has, if there is a lock for that."
        )

    def sync(self, *options: str) -> None:
        """Make the environment hold what the lock names, nothing else."""
        if self.wanted.bundle is not None:
            options = ("--no-index", *options)
        elif self.wanted.torch_backend:
            options = (f"--torch-backend={self.wanted.torch_backend}", *options)
        self.uv(
            *("pip", "sync", "--quiet", "--require-hashes", "--no-build", "--compile-bytecode"),
            *(f"--python={self.wanted.path / 'venv/bin/python'}", *options),
            self.wanted.path / "lock.txt",
        )


def python_folder(wanted: Wanted) -> Path:
    """Where Pythons that are not the host's own lie."""
    return wanted.path.parent / "python"


def settings(wanted: Wanted) -> dict[str, str]:
    """What uv and pip read from their environment: addresses may carry passwords, and arguments are for all to see."""
    offline = wanted.bundle is not None
    links = [str(wanted.bundle / "wheels")] if wanted.bundle else list(wanted.find_links)
    result = {
        "UV_CACHE_DIR": str(wanted.cache),
        "UV_NO_PROGRESS": "1",
        "UV_COMPILE_BYTECODE_TIMEOUT": "1800",  # a host that serves may be slow
        "UV_PYTHON_INSTALL_DIR": str(python_folder(wanted)),
        "UV_PYTHON_DOWNLOADS": "manual" if wanted.python_downloads and not offline else "never",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_CACHE_DIR": "1",
    }
    if links:
        result |= {"UV_FIND_LINKS": ",".join(links), "PIP_FIND_LINKS": " ".join(links)}
    if offline:
        result |= {"UV_OFFLINE": "1", "PIP_NO_INDEX": "1"}
    elif wanted.index_url:
        result |= {"UV_DEFAULT_INDEX": wanted.index_url, "PIP_INDEX_URL": wanted.index_url}
    return result


def redacted(text: str, addresses: Sequence[str]) -> str:
    """`text` without the user names and passwords of `addresses`."""
    for address in addresses:
        account = urlsplit(address).netloc.rpartition("@")[0]
        for secret in (account, account.partition(":")[2]):
            if secret:
                text = text.replace(secret, "****")
    return text


@dataclass(frozen=True)
class Pruning:
    """What may go: all environments in `root` but `wanted`, those in use, and the newest `keep` of the others.

    `named_by` are glob patterns of files that name the environments they need, such as units. `caches` holds a folder
    of compiled kernels per environment, under the environment's name.
    """

    root: Path
    wanted: str
    keep: int
    named_by: tuple[str, ...] = ()
    caches: Optional[Path] = None


def prunable(pruning: Pruning, procfs: Path = Path("/proc")) -> list[Path]:
    """Environments that go, oldest first. One without `complete` is what an interrupted run left, and always goes."""
    others = [
        folder
        for folder in sorted(pruning.root.glob("*"))
        if (folder / "lock.txt").exists() and (folder / "venv").exists() and folder.name != pruning.wanted
    ]
    others = [folder for folder in others if not folder.name.startswith("uv-")]
    texts = [_text(Path(name)) for pattern in pruning.named_by for name in glob.glob(pattern)]  # noqa: PTH207  absolute
    texts += [_text(entry / "cmdline") for entry in procfs.glob("[0-9]*")]
    idle = [folder for folder in others if not any(f"{folder}/" in text for text in texts)]
    finished = [folder for folder in idle if (folder / _COMPLETE).exists()]
    finished.sort(key=lambda folder: (folder / _COMPLETE).stat().st_mtime)
    kept = finished[max(0, len(finished) - pruning.keep) :]
    return [folder for folder in idle if folder not in finished] + [f for f in finished if f not in kept]


def prune(pruning: Pruning, wanted: Wanted) -> list[str]:
    """Remove what is prunable, with its compiled kernels and its share of uv's cache; the paths removed.

    The mark goes first, so that a run that is interrupted here leaves no environment that looks whole. uv links from
    its cache, so the disk is free only when the cache has let go too, of what no environment that stays has.
    """
    gone: list[str] = []
    if not pruning.root.exists():
        return gone
    with only_one(pruning.root / ".lock", wanted.wait_seconds) as lock_file:
        folders = prunable(pruning)
        if not folders:
            return gone
        staying = [_text(path) for path in pruning.root.glob("*/lock.txt") if path.parent not in folders]
        held = {pair for lock in [*staying, wanted.lock] for pair in locked_packages(lock).items()}
        stale = {
            name
            for folder in folders
            for name, version in locked_packages(_text(folder / "lock.txt")).items()
            if (name, version) not in held
        }
        for folder in folders:
            (folder / _COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(folder)
            if pruning.caches is not None:
                shutil.rmtree(pruning.caches / folder.name, ignore_errors=True)
            gone.append(str(folder))
        ours = pruning.root in wanted.cache.parents  # a cache elsewhere may have other users
        if ours and stale and (wanted.uv / _COMPLETE).exists():
            _Tools(wanted, lock_file).uv("cache", "clean", "--quiet", *sorted(stale))
    return gone


def _text(path: Path) -> str:
    """A file as text, arguments of /proc/PID/cmdline apart by blanks; empty when it is not there or not a file."""
    try:
        return path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
