"""Which program listens on a TCP port, read from procfs. Standard library, Python 3.9."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

_INODE_COLUMN = 10
_LISTEN = "0A"  # TCP_LISTEN in the kernel's include/net/tcp_states.h


def listening_inodes(table: str) -> dict[int, list[str]]:
    """Parse /proc/net/tcp or tcp6 into {port: [socket inode, ...]}, listening sockets only.

    The format is in the kernel's Documentation/networking/proc_net_tcp.rst: local
    address as HEX:PORT in the second column, the state in the fourth, the inode in the tenth.
    """
    inodes: dict[int, list[str]] = {}
    for line in table.splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:_INODE_COLUMN]
        if state == _LISTEN:
            inodes.setdefault(int(local.rsplit(":", 1)[1], 16), []).append(inode)
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
    procfs = Path(procfs_root)
    wanted: dict[str, int] = {}
    for name in ("tcp", "tcp6"):
        for port, inodes in listening_inodes(_read(procfs / "net" / name)).items():
            if port in ports:
                wanted.update(dict.fromkeys(inodes, port))
    found: list[dict[str, Any]] = []
    processes = [entry for entry in procfs.iterdir() if entry.name.isdigit()] if wanted else []
    for process in sorted(processes, key=lambda entry: int(entry.name)):
        found += [
            {
                "port": port,
                "pid": int(process.name),
                "program": _read(process / "comm").strip() or None,
                "unit": unit_from_cgroup(_read(process / "cgroup")),
            }
            for port in sorted({wanted[inode] for inode in _socket_inodes(process / "fd") if inode in wanted})
        ]
    unseen = sorted(set(wanted.values()) - {entry["port"] for entry in found})
    return found + [{"port": port, "pid": None, "program": None, "unit": None} for port in unseen]


def _socket_inodes(folder: Path) -> list[str]:
    try:
        entries = list(folder.iterdir())
    except OSError:  # the process ended, or is not ours to see
        return []
    inodes = []
    for entry in entries:
        try:
            link = str(entry.readlink())
        except OSError:  # closed meanwhile; this very listing is one such
            continue
        if link.startswith("socket:["):
            inodes.append(link[len("socket:[") : -1])
    return inodes


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # no IPv6, or the process ended
        return ""
