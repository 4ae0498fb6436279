"""Which program listens on a TCP port, read from procfs. Standard library, Python 3.9."""

from __future__ import annotations

import os
from typing import Any, Optional

_LISTEN = "0A"  # TCP_LISTEN in the kernel's include/net/tcp_states.h


def listening_inodes(table: str) -> dict[int, list[str]]:
    """Parse /proc/net/tcp or tcp6 into {port: [socket inode, ...]}, listening sockets only.

    The format is in the kernel's Documentation/networking/proc_net_tcp.rst: local
    address as HEX:PORT in column 1, state in column 3, inode in column 9.
    """
    inodes: dict[int, list[str]] = {}
    for line in table.splitlines()[1:]:
        cells = line.split()
        if len(cells) > 9 and cells[3] == _LISTEN:
            inodes.setdefault(int(cells[1].rsplit(":", 1)[1], 16), []).append(cells[9])
    return inodes


def unit_from_cgroup(text: str) -> Optional[str]:
    """Name of the systemd unit in a /proc/PID/cgroup text (version 1 or 2), or None."""
    for line in text.splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers in ("", "name=systemd"):
            for part in reversed(path.split("/")):
                if part.endswith((".service", ".scope")):
                    return part
    return None


def listeners(ports: list[int], procfs_root: str = "/proc") -> list[dict[str, Any]]:
    """Find who listens on `ports`: [{port, pid, program, unit}], one entry per port and process.

    A socket whose process cannot be seen (another container, no rights) gives pid,
    program and unit null: the port is taken all the same.
    """
    wanted: dict[str, int] = {}
    for name in ("tcp", "tcp6"):
        for port, inodes in listening_inodes(_read(procfs_root, "net", name)).items():
            if port in ports:
                wanted.update(dict.fromkeys(inodes, port))
    found: list[dict[str, Any]] = []
    for pid in sorted((entry for entry in os.listdir(procfs_root) if entry.isdigit()), key=int) if wanted else []:
        held = {wanted[inode] for inode in _socket_inodes(os.path.join(procfs_root, pid, "fd")) if inode in wanted}
        found += [
            {
                "port": port,
                "pid": int(pid),
                "program": _read(procfs_root, pid, "comm").strip() or None,
                "unit": unit_from_cgroup(_read(procfs_root, pid, "cgroup")),
            }
            for port in sorted(held)
        ]
    unseen = sorted(set(wanted.values()) - {entry["port"] for entry in found})
    return found + [{"port": port, "pid": None, "program": None, "unit": None} for port in unseen]


def _socket_inodes(folder: str) -> list[str]:
    try:
        entries = os.listdir(folder)
    except OSError:  # the process ended, or is not ours to see
        return []
    inodes = []
    for entry in entries:
        try:
            link = os.readlink(os.path.join(folder, entry))
        except OSError:  # closed meanwhile; this very listing is one such
            continue
        if link.startswith("socket:["):
            inodes.append(link[len("socket:[") : -1])
    return inodes


def _read(*parts: str) -> str:
    try:
        with open(os.path.join(*parts), encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:  # no IPv6, or the process ended
        return ""
