"""Starts a job as a transient systemd unit: it outlives the controller, has its own user, and sees no key but its own.

All that a job needs lies in its folder below /run, this package included, so that it goes on as it began whatever is
installed meanwhile. After a restart of the host the next deploy starts it again, and it takes up where its manifest is.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Sequence

from . import copy_files, files, hub, job, peer, program, sources, transfer
from .files import WeightsError

if TYPE_CHECKING:
    from .unit import Unit

_PROGRAM = (copy_files, files, hub, job, peer, program, sources, transfer)
_SANDBOX = (
    "NoNewPrivileges=yes",
    "ProtectSystem=strict",
    "ProtectHome=read-only",
    "PrivateDevices=yes",
    "CapabilityBoundingSet=",
    "RestrictSUIDSGID=yes",
    "LockPersonality=yes",
    "InaccessiblePaths=-/etc/vllm-fleet",
    "UMask=0022",
    "Nice=10",
    "TimeoutStopSec=30",
)


def start(
    unit: Unit,
    options: dict[str, Any],
    *,
    user: str,
    writable: Sequence[str],
    token: Optional[str] = None,
    token_file: Optional[str] = None,
    limit_seconds: Optional[int] = None,
) -> bool:
    """Start a job, or leave it running if it is the same one; returns whether it was started.

    `writable` are the folders that it fills; they become its user's. A token reaches systemd by a file that exists for
    a moment on a memory file system, and the job by systemd's credentials.

    Raises:
        WeightsError: It does not start.
    """
    text = json.dumps(options, sort_keys=True)
    written = unit.run / "job.json"
    if unit.active():
        if written.exists() and written.read_text(encoding="utf-8") == text:
            return False
        unit.stop()
    try:
        owner = pwd.getpwnam(user)
    except KeyError:
        raise WeightsError(f"There is no user {user} on this host to run the job as.") from None
    os.umask(0o022)  # engines must get at what is made here, whatever root's own habit is
    shutil.rmtree(unit.run, ignore_errors=True)
    unit.run.mkdir(mode=0o700, parents=True)
    _private(written, text)
    _install(unit.run / "program")
    for folder in (str(unit.run), *writable):
        _hand_over(Path(folder), owner.pw_uid, owner.pw_gid)
    passing = unit.run.with_name(f"{unit.run.name}.token")
    try:
        if token:
            _private(passing, token)
            token_file = str(passing)
        done = subprocess.run(
            _command(unit, user, writable, token_file, limit_seconds), check=False, capture_output=True, text=True
        )
    finally:
        with contextlib.suppress(FileNotFoundError):
            passing.unlink()
    if done.returncode != 0:
        raise WeightsError(
            f"systemd does not start {unit.name}: {done.stderr.strip() or done.stdout.strip()}. See journalctl "
            f"--unit={unit.name}."
        )
    return True


def _command(
    unit: Unit, user: str, writable: Sequence[str], token_file: Optional[str], limit_seconds: Optional[int]
) -> list[str]:
    properties = [
        *_SANDBOX,
        f"WorkingDirectory={unit.run / 'program'}",
        f"ReadWritePaths={' '.join([*writable, str(unit.run)])}",
        *([f"LoadCredential=hub-token:{token_file}"] if token_file else []),
        *([f"RuntimeMaxSec={limit_seconds}"] if limit_seconds else []),
    ]
    return [
        *("systemd-run", f"--unit={unit.name}", "--collect", "--quiet", "--service-type=exec", f"--uid={user}"),
        *(f"--description=Weights: {unit.command} {unit.folder}", f"--setenv=TMPDIR={unit.run}"),
        *("--setenv=PYTHONDONTWRITEBYTECODE=1", *(f"--property={entry}" for entry in properties)),
        *(sys.executable, "-m", "weights.program", unit.command, str(unit.run / "job.json")),
    ]


def _install(folder: Path) -> None:
    """Put this package into a folder, out of whatever archive a module runs from."""
    package = folder / "weights"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for part in _PROGRAM:
        name = part.__name__.rsplit(".", 1)[-1]
        (package / f"{name}.py").write_text(inspect.getsource(part), encoding="utf-8")


def _private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, from its first moment on."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "w", encoding="utf-8") as stream:
        stream.write(text)


def _hand_over(folder: Path, uid: int, gid: int) -> None:
    """Make a folder, and give it with all that is in it to the job's user."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    for parent, _, names in os.walk(folder):
        for path in (parent, *(f"{parent}/{name}" for name in names)):
            if os.lstat(path).st_uid != uid:
                os.chown(path, uid, gid, follow_symlinks=False)
