"""Runs a client that writes files, and ends it when nothing arrives any more.

Clients hang: the `hf` client was reported to stand still at 98 % for an hour, with Xet and without. Neither its output
nor an open connection tells, so the watchdog looks at what reaches the disk.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Callable, Mapping, Sequence

from .files import usage

if TYPE_CHECKING:
    from pathlib import Path

LEAST_BYTES_PER_MINUTE = 1024 * 1024  # a trickle below it counts as nothing: 230 GB would take five months
_LOOK_SECONDS = 1.0
_KILL_AFTER_SECONDS = 10.0
_KEPT_LINES = 40
BEGIN_AGAIN = 10  # times that a client may fall back behind what it had, without getting further


@dataclass(frozen=True)
class Outcome:
    """How a client ended.

    Attributes:
        returncode: Its exit status, negative for a signal.
        stalled: The watchdog ended it.
        output: The last lines that it printed.
    """

    returncode: int
    stalled: bool
    output: tuple[str, ...]


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    stall_seconds: float,
    on_look: Callable[[int], None],
) -> Outcome:
    """Run a client that writes below `folder`; `on_look` is told every second how many bytes are there.

    It is ended, with every process that it started, when less than LEAST_BYTES_PER_MINUTE has been written for
    `stall_seconds`.
    """
    client = subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
    reader = threading.Thread(target=_read, args=(client.stdout, lines), daemon=True)
    reader.start()
    try:
        stalled = _watch(client, folder, stall_seconds, on_look)
    finally:
        _end(client)
    reader.join(timeout=_LOOK_SECONDS)
    return Outcome(client.returncode, stalled, tuple(lines))


def _read(stream: IO[str], lines: collections.deque[str]) -> None:
    for line in stream:
        if line.strip():
            lines.append(line.strip())


def _watch(client: subprocess.Popen[str], folder: Path, stall_seconds: float, on_look: Callable[[int], None]) -> bool:
    """Wait for the client's end; True when it stalled first."""
    look_seconds = min(_LOOK_SECONDS, stall_seconds / 3)
    enough = LEAST_BYTES_PER_MINUTE * stall_seconds / 60
    begun_again = 0
    mark_bytes = usage(folder)
    most_bytes, mark_time = mark_bytes, time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            client.wait(timeout=look_seconds)
            return False
        written = usage(folder)
        on_look(written)
        now = time.monotonic()
        if written - mark_bytes >= enough:
            mark_bytes, mark_time = written, now
            if written > most_bytes:
                most_bytes, begun_again = written, 0
        elif written < mark_bytes and begun_again < BEGIN_AGAIN:
            # A partial file was given up and begun anew: no standstill, unless it goes on like that.
            mark_bytes, mark_time, begun_again = written, now, begun_again + 1
        elif now - mark_time > stall_seconds:
            return True


def _end(client: subprocess.Popen[str]) -> None:
    """End the client and its children, politely and then not."""
    for wait, ending in ((_KILL_AFTER_SECONDS, signal.SIGTERM), (None, signal.SIGKILL)):
        if client.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(client.pid, ending)
        with contextlib.suppress(subprocess.TimeoutExpired):
            client.wait(timeout=wait)
    with contextlib.suppress(ProcessLookupError):  # a child that outlived it would write on
        os.killpg(client.pid, signal.SIGKILL)
