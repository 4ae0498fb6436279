"""Saves what the probe reads of a host as one small archive that can be shown to others.

What to save is not listed here: the probe runs once and tells every path that it looked at, so a capture has exactly
what the probe needs, and reading it back gives the same topology. Host names, serial numbers, MAC addresses, process
names and whatever else identifies a machine or its users are replaced; GPU UUIDs stay, they are what a plan names.

Standard library only, Python 3.9: this runs on target hosts.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import socket
import tarfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, Sequence

from .host_probe import RunSmi, SmiOutput, read_checks, read_host
from .listeners import unit_from_cgroup

__all__ = ["save_host"]

_FILES = {"-q": "q-x.xml", "topo": "topo-m.txt"}

# Elements of `nvidia-smi -q -x` that identify a machine, a part of it or its users.
_PRIVATE_ELEMENTS = (
    "serial",
    "board_serial",
    "chassis_serial_number",
    "pdi",
    "host_id",
    "gpu_fabric_guid",
    "clusterUuid",
    "process_name",
)
_IOMMU_ARGUMENTS = re.compile(r"(?:(?:intel_|amd_)?iommu(?:\.\w+)?|isolcpus|nohz_full|pci)(?:=|$)")


class _Contents(NamedTuple):
    """What an archive holds, by path inside it."""

    files: dict[str, bytes]
    links: dict[str, str]


def _follow(root: Path, path: Path, links: dict[str, str]) -> Optional[Path]:
    """Follow the links of a path below root, each noted in `links`; returns where it ends, None for a loop."""
    ahead = list(path.relative_to(root).parts)
    here: list[str] = []
    for _ in range(256):
        if not ahead:
            return Path(*here)
        part = ahead.pop(0)
        if part == "..":
            del here[-1:]
            continue
        try:
            target = os.readlink(root.joinpath(*here, part))  # noqa: PTH115  (no absolute path is made of it)
        except (OSError, ValueError):
            target = ""
        outside = len([name for name in target.split("/") if name == ".."]) > len(here) or target.startswith("/")
        if target and not outside:
            links["/".join([*here, part])] = target
            ahead = target.split("/") + ahead
        else:  # a file or folder, or a link out of the tree, which is saved as what it leads to
            here.append(part)
    return None


def _lines(text: str, wanted: str) -> str:
    return "".join(f"{line}\n" for line in text.split("\n") if re.match(wanted, line))


def _config_space(data: bytes) -> bytes:
    """A bridge's config space: the header, and of the capabilities only Access Control Services.

    Among the others is the device serial number.
    """
    extended, header = 0x100, data[:64]
    offset = extended
    for _ in range(48):
        capability = data[offset : offset + 8]
        if len(capability) < 8 or capability[:4] in (bytes(4), b"\xff" * 4):  # noqa: PLR2004  (up to its control)
            break
        if capability[:2] == b"\x0d\x00":
            return header + bytes(extended - 64) + capability[:2] + b"\x01\x00" + capability[4:8] + bytes(8)
        offset = int.from_bytes(capability[:4], "little") >> 20
        if offset < extended:
            break
    return data[:64] if len(data) <= extended else header + bytes(extended - 64 + 16)


def _scrubbed_file(path: str, data: bytes) -> bytes:
    """Keep of one file of sysfs or procfs what the probe reads in it."""
    if path.endswith("/config"):
        return _config_space(data)
    text = data.decode("utf-8", "replace")
    if path.endswith("/meminfo"):
        text = _lines(text, r".*MemTotal:")
    elif path.endswith("/status"):
        text = _lines(text, r"Cpus_allowed_list:|Mems_allowed_list:|Uid:")
    elif path.endswith("/cgroup"):
        unit = unit_from_cgroup(text)
        text = f"0::/{unit}\n" if unit else ""
    elif path == "proc/cmdline":
        text = " ".join(filter(_IOMMU_ARGUMENTS.match, text.split())) + "\n"
    else:
        return data
    return text.encode()


def _scrubbed_report(text: str) -> str:
    text = re.sub(r"<supported_clocks>.*?</supported_clocks>\s*", "", text, flags=re.DOTALL)  # 10,000 lines, never read
    return re.sub(rf"(<({'|'.join(_PRIVATE_ELEMENTS)})>)[^<]*(</\2>)", r"\1removed\3", text)


def _scrubbed_log(text: str) -> str:
    """Lines of NVIDIA's driver, without time, host and the names of processes; the last 500."""
    lines = re.findall(r"NVRM: [^\n]*", text)[-500:]
    return "".join(re.sub(r"\bname=[^,\n]*", "name=removed", line) + "\n" for line in lines)


def _scrubbed_lstopo(text: str) -> str:
    """The tree of lstopo with the attributes that the probe compares, no names, sizes and serial numbers."""
    document = re.search(r"<topology\b.*</topology>", text, re.DOTALL)
    try:
        root = ET.fromstring(document[0] if document else "")  # noqa: S314  (printed by a program of this host)
    except ET.ParseError:
        return text[:200]
    kept = {"type", "os_index", "cpuset", "nodeset", "pci_busid", "bridge_type"}

    def reduced(element: ET.Element) -> ET.Element:
        copy = ET.Element(element.tag, {name: value for name, value in element.attrib.items() if name in kept})
        copy.extend(
            reduced(child) for child in element if child.get("type") not in (None, "PU", "Core", "OSDev", "Misc")
        )
        return copy

    return ET.tostring(reduced(root), encoding="unicode") + "\n"


def _scrubbed_checks(text: str) -> str:
    return re.sub(r'("boot_id": )"[^"]*"', r"\1null", text)


def _anonymous(text: str, host_names: Sequence[str]) -> str:
    for name in host_names:
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "host", text)
    return re.sub(r"\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b", "00:00:00:00:00:00", text)


def _own_names() -> list[str]:
    """The names of this machine, the longest first; common words for one are left."""
    names = {socket.gethostname(), socket.gethostname().partition(".")[0], platform.node()}
    return sorted(names - {"", "host", "localhost"}, key=len, reverse=True)


def _add_tree(contents: _Contents, name: str, root: Path, reads: Sequence[Path]) -> None:
    """Add what was read below root, links as links; what could not be read is left out."""
    links: dict[str, str] = {}
    for path in sorted(set(reads)):
        end = _follow(root, path, links) if root in (path, *path.parents) else None
        if end is None or not os.path.isfile(root / end):  # noqa: PTH113  (Path.is_file may raise)
            continue
        try:
            data = (root / end).read_bytes()
        except OSError:
            continue
        contents.files[f"{name}/{end}"] = _scrubbed_file(f"{name}/{end}", data)
    contents.links.update({f"{name}/{path}": target for path, target in links.items()})


def _write(contents: _Contents, path: str) -> None:
    """Write the archive; the same contents give the same bytes but for the gzip header's time."""
    with tarfile.open(path, "w:gz") as archive:
        for name in sorted(contents.files.keys() | contents.links.keys()):
            member = tarfile.TarInfo(name)
            member.mode = 0o644
            if name in contents.links:
                member.type, member.linkname = tarfile.SYMTYPE, contents.links[name]
                archive.addfile(member)
            else:
                member.size = len(contents.files[name])
                archive.addfile(member, io.BytesIO(contents.files[name]))


def save_host(
    path: str,
    sysfs_root: str,
    procfs_root: str,
    run_smi: RunSmi,
    *,
    kernel_log: Optional[str],
    checks_file: str,
    lstopo: Optional[str] = None,
    host_names: Optional[Sequence[str]] = None,
) -> dict[str, Any]:
    """Probe a host and save what was read.

    Args:
        path: The archive to write, a gzipped tar; its layout is that of `read_capture`.
        sysfs_root: Where sysfs is.
        procfs_root: Where procfs is.
        run_smi: Runs nvidia-smi.
        kernel_log: Text of the kernel log, None when it could not be read.
        checks_file: Path of the host facts that earlier tests saved.
        lstopo: What lstopo printed, None where it is not installed.
        host_names: Names to replace; by default those of this machine.

    Returns:
        The topology as probed, the same that `read_capture` gives for the archive.
    """
    reads: list[Path] = []
    contents = _Contents({}, {})
    names = _own_names() if host_names is None else host_names

    def add(name: str, text: Optional[str], scrub: Callable[[str], str] = str) -> None:
        if text is not None:
            contents.files[name] = _anonymous(scrub(text), names).encode()

    def recorded(arguments: Sequence[str]) -> SmiOutput:
        output = run_smi(arguments)
        name = f"nvidia-smi/{_FILES[arguments[0]]}"
        if output.failure == "timeout":
            add(f"{name.rpartition('.')[0]}.rc", "timeout\n")
        elif output.failure is None:
            add(name, output.text, _scrubbed_report)
            if output.exit_code:
                add(f"{name.rpartition('.')[0]}.rc", f"{output.exit_code}\n")
        return output

    checks, _ = read_checks(checks_file)
    topology = read_host(sysfs_root, procfs_root, recorded, kernel_log, checks, lstopo=lstopo, reads=reads)
    _add_tree(contents, "sys", Path(sysfs_root), reads)
    _add_tree(contents, "proc", Path(procfs_root), reads)
    add("proc/sys/kernel/arch", f"{topology['architecture']}\n" if topology["architecture"] else None)
    add("kernel.log", kernel_log, _scrubbed_log)
    add("lstopo.xml", lstopo, _scrubbed_lstopo)
    if checks:
        add("checks.json", json.dumps(checks, indent=2) + "\n", _scrubbed_checks)
    _write(contents, path)
    return topology
