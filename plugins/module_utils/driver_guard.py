"""Writes what keeps a driver in place: files, holds, and an initramfs without the modules that would take its GPUs.

Standard library only, Python 3.9: this runs on target hosts.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Mapping, NamedTuple, Optional, Sequence

from .driver_probe import dpkg_state
from .kernel_modules import Run  # noqa: TC001  (a plain import on every Python)

__all__ = ["Difference", "GuardError", "differences", "hold", "program", "rebuild_initramfs", "write"]


class GuardError(Exception):
    """A command of the host failed: what, and what it said."""


class Difference(NamedTuple):
    """A file that is other than wanted; None: it is not there, or must not be."""

    path: str
    before: Optional[str]
    after: Optional[str]


def program(name: str) -> bool:
    """Whether the host has this program."""
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is not None


def differences(files: Mapping[str, Optional[str]], root: str = "/") -> list[Difference]:
    """Files whose content is other than wanted."""
    found = []
    for path, after in files.items():
        place = Path(root) / path.lstrip("/")
        before = place.read_bytes().decode("utf-8", "surrogateescape") if place.is_file() else None
        if before != after:
            found.append(Difference(path, before, after))
    return found


def write(changes: Sequence[Difference], root: str = "/") -> None:
    """Make files as wanted, each at once; a script may be run, everything else is only read."""
    for path, _, after in changes:
        place = Path(root) / path.lstrip("/")
        if after is None:
            place.unlink()
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = place.with_name(place.name + ".new~")
        draft.write_bytes(after.encode("utf-8", "surrogateescape"))
        draft.chmod(0o755 if after.startswith("#!") else 0o644)
        os.replace(draft, place)  # noqa: PTH105  (atomic, and says so)


def hold(run: Run, names: Sequence[str], *, check: bool = False) -> list[str]:
    """Hold those of the packages that are not held; returns them.

    Raises:
        GuardError: apt-mark failed.
    """
    state = dpkg_state(run)
    held = {package["name"] for package in state["packages"] + state["kernel_packages"] if package["held"]}
    free = [name for name in names if name not in held]
    if free and not check:
        code, _, error = run(["apt-mark", "hold", *free])
        if code != 0:
            raise GuardError(f"apt-mark hold failed: {' '.join(error.split())}")
    return free


def rebuild_initramfs(run: Run) -> None:
    """Make the initramfs of every kernel anew, where the host has any.

    Raises:
        GuardError: The host's tool failed.
    """
    for name, arguments in (("update-initramfs", ["-u", "-k", "all"]), ("dracut", ["--regenerate-all", "--force"])):
        if program(name):
            code, output, error = run([name, *arguments])
            if code != 0:
                raise GuardError(f"{name} failed: {' '.join((error or output).split())[-600:]}")
            return
