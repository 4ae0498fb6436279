"""Ask and tell a gateway's HAProxy over its admin socket: who gets requests, who is drained, what is running.

What it says of running requests is true of its present process only: after a reload the former one finishes its own.
The engine's counters know all.

Standard library, Python 3.9.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ANSWER_SECONDS = 10.0
POLL_SECONDS = 0.5

_MAINTENANCE, _DRAINED = 0x01, 0x08  # of SRV_ADMF_*, as an operator sets them
_RUNNING = 2  # SRV_ST_RUNNING
_AGE_PART = re.compile(r"(\d+)([dhms])")
_AGE_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


class AdminError(Exception):
    """HAProxy refused a command; the text is its own."""


def ask(path: str, command: str) -> str:
    """Send one command and return the answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(path)
        connection.sendall((command + "\n").encode())
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


def read_servers(state: str, stat: str, models: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Read `show servers state` and `show stat` into {server: {...}}.

    Args:
        state: The first answer.
        stat: The second.
        models: Model by server's name.

    Returns:
        For each server "backend", "model", "drained", "up" (it takes what it is sent), "status" as HAProxy words it,
        and "running", "queued": requests of the present process.
    """
    columns: list[str] = []
    servers: dict[str, dict[str, Any]] = {}
    for line in state.splitlines():
        if line.startswith("# be_id"):
            columns = line[2:].split()
        elif columns and line and not line.startswith("#"):
            cell = dict(zip(columns, line.split()))  # noqa: B905  Python 3.9 has no strict
            servers[cell["srv_name"]] = {
                "backend": cell["be_name"],
                "model": models.get(cell["srv_name"]),
                "drained": bool(int(cell["srv_admin_state"]) & (_MAINTENANCE | _DRAINED)),
                "up": int(cell["srv_op_state"]) == _RUNNING,
            }
    header, *rows = stat.lstrip("# ").splitlines()
    names = header.split(",")
    for row in rows:
        seen = dict(zip(names, row.split(",")))  # noqa: B905
        if seen.get("svname") in servers and seen["pxname"] == servers[seen["svname"]]["backend"]:
            counts = {"running": int(seen["scur"] or 0), "queued": int(seen["qcur"] or 0)}
            servers[seen["svname"]].update({**counts, "status": seen["status"]})
    return servers


def read_requests(sessions: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Read `show sess`: the running requests of some servers, the oldest first, with client and age in seconds."""
    found = []
    for line in sessions.splitlines():
        cell = dict(part.split("=", 1) for part in line.split() if "=" in part)
        if cell.get("srv") in names:
            age = sum(int(count) * _AGE_SECONDS[unit] for count, unit in _AGE_PART.findall(cell.get("age", "")))
            found.append({"server": cell["srv"], "client": cell.get("src", "unknown"), "age_seconds": age})
    return sorted(found, key=lambda request: -request["age_seconds"])


def refusal(servers: Mapping[str, Mapping[str, Any]], names: Sequence[str], keep: int) -> str:
    """Say why servers may not be drained: the model that too few others would be left for. Empty when they may.

    Args:
        servers: All of the gateway, as read_servers gives them.
        names: Those that are to go; one that takes no requests takes nothing away.
        keep: How many others must take requests.
    """

    def takes(name: str) -> bool:
        return bool(servers[name]["up"]) and not servers[name]["drained"]

    for model in sorted({servers[name]["model"] or "" for name in names if takes(name)}):
        others = [name for name in servers if name not in names and (servers[name]["model"] or "") == model]
        left = [name for name in others if takes(name)]
        if len(left) < keep:
            out = ["{0} ({1})".format(name, servers[name].get("status", "down")) for name in others if name not in left]
            why = "; these take none: " + ", ".join(out) if out else ""
            return "{0} would be left to serve {1}{2}".format(len(left) or "nobody", model, why)
    return ""


class Gateway:
    """A gateway's HAProxy."""

    def __init__(self, path: str, backends: str) -> None:
        """Know where its admin socket is, and the file that says what it balances over."""
        self._path = path
        self._models: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError):
            for entry in json.loads(Path(backends).read_text(encoding="utf-8")).values():
                self._models.update({server["name"]: server["model"] for server in entry["servers"]})

    def servers(self) -> dict[str, dict[str, Any]]:
        """All servers; none where HAProxy does not run."""
        try:
            return read_servers(ask(self._path, "show servers state"), ask(self._path, "show stat"), self._models)
        except (FileNotFoundError, ConnectionRefusedError):
            return {}

    def requests(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """The running requests of some servers."""
        return read_requests(ask(self._path, "show sess"), names)

    def set_drained(self, servers: Mapping[str, Mapping[str, Any]], names: Sequence[str], *, drained: bool) -> None:
        """Drain servers, or put them back.

        Raises:
            AdminError: HAProxy refused.
        """
        for name in names:
            word = "drain" if drained else "ready"
            said = ask(self._path, "set server {0}/{1} state {2}".format(servers[name]["backend"], name, word)).strip()
            if said:
                raise AdminError("{0}: {1}".format(name, said))

    def wait_up(self, names: Sequence[str], seconds: float) -> list[str]:
        """Wait until servers take requests; those that do not by then."""
        deadline = time.monotonic() + seconds
        while True:
            servers = self.servers()
            late = [name for name in names if name in servers and not servers[name]["up"]]
            if not late or time.monotonic() >= deadline:
                return late
            time.sleep(POLL_SECONDS)
