"""Reads a GPU host into the topology structure: what is there, what could not be learned, never a decision.

sysfs is the truth for PCI devices, NUMA nodes and CPUs; nvidia-smi adds what only the driver knows, in two calls;
everything is joined by PCI address. A live host and a saved capture go through the same code: `read_host` takes the
folders and a function that runs nvidia-smi, `read_capture` gives it the saved ones.

Standard library only, Python 3.9: this runs on target hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import pwd
import re
import subprocess
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, Sequence

from .cross_check import compare_driver, compare_gpus, compare_lstopo
from .gpu_generations import chip_of
from .gpu_topology import (
    Problem,
    format_ranges,
    normalise_bus_id,
    parse_ranges,
    parse_smi,
    parse_topo_matrix,
    problem,
    topo_disagreements,
)
from .host_checks import UNTESTED, circumstances, hold_against
from .listeners import unit_from_cgroup

__all__ = [
    "ACS_REDIRECT",
    "RunSmi",
    "SmiOutput",
    "acs_control",
    "pci_gpus",
    "read_capture",
    "read_checks",
    "read_host",
    "read_kernel_log",
    "read_lstopo",
    "smi_runner",
]

_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # VGA controller, 3D controller
_BRIDGE_CLASS = "0x0680"  # "other bridge": how an NVSwitch appears
_CPU_NODE_REMEDY = "Update the firmware or, in a virtual machine, give each GPU a pxb-pcie bridge with its NUMA node."
ACS_REDIRECT = 0b1100  # request and completion redirect, in the ACS control register: traffic goes up to the root
_FIRST_OPEN_ONLY_CAPABILITY = 10.0  # from Blackwell on only the open kernel modules drive the GPU

_LINK_GENERATIONS = {"2.5": 1, "5": 2, "5.0": 2, "8.0": 3, "8": 3, "16.0": 4, "32.0": 5, "64.0": 6}

# Xid numbers by which NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors) means failing hardware or a lost GPU; the
# others are mostly faults of the program that was running.
_HARDWARE_XIDS = {48, 62, 63, 64, 74, 79, 92, 94, 95, 109, 119, 120, 140, 143}

_OUR_UNITS = "vllm-"  # how the service role names its units


class SmiOutput(NamedTuple):
    """What one call of nvidia-smi gave; `failure` is `missing` or `timeout` when it gave nothing."""

    text: str
    exit_code: Optional[int]
    failure: Optional[str] = None


RunSmi = Callable[[Sequence[str]], SmiOutput]


class _Tree:
    """A sysfs or procfs folder, read without ever raising; what is there but unreadable is remembered.

    `reads`, where given, receives the path of everything that was looked at: a capture consists of these.
    """

    def __init__(self, root: str, reads: Optional[list[Path]] = None) -> None:
        self.root = Path(root)
        self.unreadable: list[Path] = []
        self._reads = [] if reads is None else reads

    def path(self, *parts: str) -> Path:
        path = self.root.joinpath(*parts)
        self._reads.append(path)
        return path

    def exists(self, *parts: str) -> bool:
        return os.path.lexists(self.path(*parts))

    def data(self, *parts: str) -> Optional[bytes]:
        path = self.path(*parts)
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError):
            self.unreadable.append(path)
            return None

    def text(self, *parts: str) -> Optional[str]:
        data = self.data(*parts)
        return None if data is None else data.decode("utf-8", "replace").strip()

    def link_name(self, *parts: str) -> Optional[str]:
        """Last part of what a symbolic link leads to, None where there is no such link."""
        try:
            return self.path(*parts).readlink().name
        except (OSError, ValueError):
            return None

    def names(self, *parts: str) -> list[str]:
        path = self.path(*parts)
        try:
            return sorted(entry.name for entry in path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, ValueError):
            self.unreadable.append(path)
            return []


# --- PCI ------------------------------------------------------------------------------------------------------------


class _PciDevice(NamedTuple):
    """An NVIDIA PCI device; `bridges` are those above it, the root port first."""

    bus_id: str
    folder: str
    device: str
    class_code: str
    numa_node: Optional[int]
    root_complex: str
    bridges: list[str]
    driver: Optional[str]


def _nvidia_devices(sysfs: _Tree) -> list[_PciDevice]:
    devices = []
    for name in sysfs.names("bus", "pci", "devices"):
        folder = f"bus/pci/devices/{name}"
        bus_id = normalise_bus_id(name)
        # A virtual function (physfn leads to its card) is a share of a GPU that is listed itself.
        if bus_id is None or sysfs.text(folder, "vendor") != _NVIDIA or sysfs.exists(folder, "physfn"):
            continue
        above = Path(os.path.realpath(sysfs.path(folder))).parts[:-1]  # a loop of links must not raise
        node = sysfs.text(folder, "numa_node") or ""
        devices.append(
            _PciDevice(
                bus_id=bus_id,
                folder=folder,
                device="10de:" + (sysfs.text(folder, "device") or "0x????")[2:],
                class_code=sysfs.text(folder, "class") or "",
                numa_node=int(node) if node.isdecimal() else None,  # the kernel prints -1 where firmware says nothing
                root_complex=next((part for part in above if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)), ""),
                bridges=[bridge for bridge in map(normalise_bus_id, above) if bridge],
                driver=sysfs.link_name(folder, "driver"),
            ),
        )
    return sorted(devices, key=lambda device: _bus_order(device.bus_id))


def pci_gpus(sysfs_root: str) -> dict[str, Any]:
    """NVIDIA's GPUs and NVSwitches on the PCI bus, without asking the driver.

    Returns:
        `gpus`: in bus order, each with `pci_bus_id`, `pci_device` and the kernel `driver` it is bound to (null: none).
        `nvswitch`: whether an NVSwitch is on the bus.
    """
    devices = _nvidia_devices(_Tree(sysfs_root))
    gpus = [
        {"pci_bus_id": device.bus_id, "pci_device": device.device, "driver": device.driver}
        for device in devices
        if device.class_code.startswith(_GPU_CLASSES)
    ]
    return {"gpus": gpus, "nvswitch": any(device.class_code.startswith(_BRIDGE_CLASS) for device in devices)}


def _bus_order(bus_id: Optional[str]) -> tuple[int, ...]:
    return tuple(int(part, 16) for part in re.split(r"[:.]", bus_id)) if bus_id else (1 << 32,)


def _link_speed(text: Optional[str]) -> Optional[int]:
    match = re.match(r"([\d.]+) ?GT/s", text or "")
    return _LINK_GENERATIONS.get(match[1]) if match else None


def _link_width(text: Optional[str]) -> Optional[int]:
    return int(text) if text and text.isdecimal() and 0 < int(text) <= 32 else None  # noqa: PLR2004  (63, 255: no link)


def _first(*values: Any) -> Any:
    """The first value that is known: the order of the arguments is the order of trust."""
    return next((value for value in values if value is not None), None)


def _pcie(sysfs: _Tree, device: Optional[_PciDevice], from_smi: dict[str, Any]) -> dict[str, Any]:
    def own(name: str) -> Optional[str]:
        return sysfs.text(device.folder, name) if device else None

    return {
        "generation": _first(_link_speed(own("current_link_speed")), from_smi.get("generation")),
        "width": _first(_link_width(own("current_link_width")), from_smi.get("width")),
        "max_generation": _first(_link_speed(own("max_link_speed")), from_smi.get("max_generation")),
        "max_width": _first(_link_width(own("max_link_width")), from_smi.get("max_width")),
        # Below the root port a switch shows as two bridges, its upstream and a downstream port: name it by the first.
        "switches": device.bridges[1::2] if device else [],
    }


def _bar1_mib(resource: Optional[str]) -> Optional[int]:
    """Size of BAR1, the window to GPU memory: the second line of `resource` (kernel's PCI sysfs documentation)."""
    lines = (resource or "").split("\n")
    region = re.match(r"0x([0-9a-f]+) 0x([0-9a-f]+) 0x", lines[1]) if len(lines) > 1 else None
    size = int(region[2], 16) - int(region[1], 16) + 1 if region else 0
    return size >> 20 or None


def acs_control(config: Optional[bytes]) -> Optional[int]:
    """A bridge's ACS control register, 0 where it has none; None if its config space was cut short.

    PCI Express base specification, Access Control Services: extended capability 0x000d, control register at offset 6.
    Without root the kernel shows only the first 64 bytes.
    """
    extended = 0x100
    if config is None or len(config) <= extended:
        return None
    offset = extended
    for _ in range(48):  # at most that many capabilities fit
        header = int.from_bytes(config[offset : offset + 4], "little")
        if len(config) < offset + 8 or header in (0, 0xFFFFFFFF):
            return 0
        if header & 0xFFFF == 0x000D:  # noqa: PLR2004  (see above)
            return int.from_bytes(config[offset + 6 : offset + 8], "little")
        offset = header >> 20
        if offset < extended:
            return 0
    return 0


def _host_pcie(sysfs: _Tree, procfs: _Tree, gpus: list[_PciDevice]) -> dict[str, Any]:
    types = {sysfs.text(gpu.folder, "iommu_group", "type") for gpu in gpus}
    grouped = any(sysfs.exists(gpu.folder, "iommu_group") for gpu in gpus)
    arguments = (procfs.text("cmdline") or "").split()
    if not gpus:
        iommu = "unknown"
    elif not grouped:
        iommu = "off"
    elif any(kind and kind.startswith("DMA") for kind in types):
        iommu = "translated"
    elif types == {"identity"} or {"iommu=pt", "iommu.passthrough=1"} & set(arguments):
        iommu = "passthrough"
    else:
        iommu = "unknown"
    redirect: Optional[list[str]] = []
    for bridge in sorted({bridge for gpu in gpus for bridge in gpu.bridges}, key=_bus_order):
        control = acs_control(sysfs.data("bus", "pci", "devices", bridge, "config"))
        if control is None:
            redirect = None
            break
        if control & ACS_REDIRECT and redirect is not None:
            redirect.append(bridge)
    return {"iommu": iommu, "acs_redirect": redirect}


def _pci_link(first: _PciDevice, second: _PciDevice) -> Optional[str]:
    """Link class between two devices by the definitions in the legend of `nvidia-smi topo -m`, NVLink aside."""
    if not first.root_complex or not second.root_complex:
        return None
    if first.root_complex != second.root_complex:
        if first.numa_node is None or second.numa_node is None:
            return None
        return "NODE" if first.numa_node == second.numa_node else "SYS"
    shared = [bridge for bridge in first.bridges if bridge in second.bridges]
    if not shared:
        return "PHB"
    beyond = max(len(first.bridges), len(second.bridges)) - len(shared)
    return "PIX" if beyond <= 1 else "PXB"


# --- CPUs and NUMA nodes --------------------------------------------------------------------------------------------


def _status_list(status: str, name: str) -> Optional[list[int]]:
    match = re.search(rf"^{name}:\s*(\S*)\s*$", status, re.MULTILINE)
    return parse_ranges(match[1]) if match else None


def _cpus(sysfs: _Tree, status: str) -> dict[str, Optional[set[int]]]:
    """Online, isolated and allowed CPUs; None where the host does not say.

    Isolated are those that kernel arguments keep from general work: isolcpus and nohz_full.
    """
    online = parse_ranges(sysfs.text("devices", "system", "cpu", "online") or "") or None
    isolated: set[int] = set()
    for name in ("isolated", "nohz_full"):  # an unset nohz_full reads "(null)" on older kernels
        isolated.update(parse_ranges(sysfs.text("devices", "system", "cpu", name) or "") or [])
    allowed = _status_list(status, "Cpus_allowed_list")
    return {
        "online": set(online) if online else None,
        "isolated": isolated,
        "allowed": set(allowed) if allowed else None,
    }


def _numa_nodes(sysfs: _Tree, status: str, cpus: dict[str, Optional[set[int]]]) -> list[dict[str, Any]]:
    """NUMA nodes that have CPUs; memory-only nodes, such as those of GPU memory, are nothing to pin to."""
    mems_allowed = _status_list(status, "Mems_allowed_list")
    nodes = []
    for name in sysfs.names("devices", "system", "node"):
        match = re.fullmatch(r"node(\d+)", name)
        own = parse_ranges(sysfs.text("devices", "system", "node", name, "cpulist") or "") if match else None
        if not match or not own:
            continue
        usable = set(own) - (cpus["isolated"] or set())
        for limit in ("online", "allowed"):
            allowed = cpus[limit]
            usable = usable if allowed is None else usable & allowed
        memory = re.search(r"MemTotal:\s+(\d+) kB", sysfs.text("devices", "system", "node", name, "meminfo") or "")
        total_mib = int(memory[1]) // 1024 if memory else None
        nodes.append(
            {
                "id": int(match[1]),
                "cpus": format_ranges(usable),
                "memory_total_mib": total_mib,
                "bindable": None if mems_allowed is None else int(match[1]) in mems_allowed and total_mib != 0,
            },
        )
    return sorted(nodes, key=lambda node: node["id"])


# --- processes ------------------------------------------------------------------------------------------------------


def _fill_holders(procfs: _Tree, holders: list[dict[str, Any]], *, here: bool) -> None:
    """Add owner and systemd unit of each process; both stay null when the process is gone or hidden.

    The users of a saved host have no names here, only numbers.
    """
    for holder in holders:
        # Processes live in the folder that `self` is in: in the lab's tree `self` leads to the real /proc.
        folder = ("self", "..", str(holder["pid"]))
        uid = re.search(r"^Uid:\s+(\d+)", procfs.text(*folder, "status") or "", re.MULTILINE)
        if uid:
            holder["user"] = uid[1]
            if here:
                with contextlib.suppress(KeyError):
                    holder["user"] = pwd.getpwuid(int(uid[1])).pw_name
        holder["unit"] = unit_from_cgroup(procfs.text(*folder, "cgroup") or "")


# --- driver ---------------------------------------------------------------------------------------------------------


def _driver(procfs: _Tree, output: SmiOutput, smi: dict[str, Any], deadline: str) -> dict[str, Any]:
    line = (procfs.text("driver", "nvidia", "version") or "").partition("\n")[0]
    loaded = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", line)
    codes = {entry["code"] for entry in smi["problems"]}
    state, message = "ok", None
    if output.failure == "missing" or "driver_missing" in codes:
        state, message = "missing", f"nvidia-smi was not found{f' ({output.text})' if output.text else ''}"
    elif output.failure == "timeout":
        state, message = "unreachable", f"nvidia-smi did not answer within {deadline}"
    elif "driver_mismatch" in codes:
        state = "mismatch"
    elif "driver_unreachable" in codes or (not smi["gpus"] and "no_devices" not in codes and not smi["driver_version"]):
        state = "unreachable"
    if state in ("mismatch", "unreachable") and message is None:
        message = " ".join(output.text.split())[:300] or "nvidia-smi printed nothing"
    library = re.search(r"NVML library version: ?(\d[\d.]*)", output.text)
    return {
        "state": state,
        "version": smi["driver_version"] or (library[1] if library else None),
        "module_version": loaded[1] if loaded else None,
        # As `modinfo -F license nvidia` would print it.
        "module_licence": None if not line else "Dual MIT/GPL" if "Open Kernel Module" in line else "NVIDIA",
        "cuda_version": smi["cuda_version"] if smi["cuda_version"] != "N/A" else None,
        "message": message,
    }


# --- putting it together --------------------------------------------------------------------------------------------


def _module_says(procfs: _Tree, bus_id: str) -> dict[str, Any]:
    """What the kernel module says of a GPU, which answers even when nvidia-smi does not."""
    text = procfs.text("driver", "nvidia", "gpus", bus_id, "information") or ""
    told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.split("\n"))}
    minor, uuid = told.get("Device Minor", ""), told.get("GPU UUID", "")
    return {
        "name": told.get("Model") or None,
        "minor": int(minor) if minor.isdecimal() else None,
        "uuid": uuid if re.fullmatch(r"GPU-[0-9a-f-]{36}", uuid) else None,
    }


def _gpu(
    sysfs: _Tree,
    bus_id: Optional[str],
    device: Optional[_PciDevice],
    record: dict[str, Any],
    module: dict[str, Any],
) -> dict[str, Any]:
    """One GPU of the result: sysfs first, then nvidia-smi, then the kernel module."""
    pci_device = device.device if device else record.get("pci_device")
    return {
        "index": record.get("index"),
        "minor": _first(record.get("minor"), module.get("minor")),
        "uuid": _first(record.get("uuid"), module.get("uuid")),
        "pci_bus_id": bus_id,
        "pci_device": pci_device,
        "name": _first(record.get("name"), module.get("name")),
        "compute_capability": _first(
            record.get("compute_capability"),
            chip.compute_capability or None if (chip := chip_of(pci_device)) else None,
        ),
        "memory_total_mib": record.get("memory_total_mib"),
        "memory_reserved_mib": record.get("memory_reserved_mib"),
        "memory_used_mib": record.get("memory_used_mib"),
        "holders": record.get("holders", []),
        "unified_memory": record.get("unified_memory"),
        "numa_nodes": [],
        "pcie": _pcie(sysfs, device, record.get("pcie", {})),
        "bar1_mib": _first(
            record.get("bar1_mib"),
            _bar1_mib(sysfs.text(device.folder, "resource")) if device else None,
        ),
        "mig": record.get("mig", {"enabled": None, "instances": []}),
        "vgpu": record.get("vgpu"),
        "ecc": record.get("ecc"),
        "power_limit_w": record.get("power_limit_w"),
        "problems": list(record.get("problems", [])),
    }


def _place(
    gpu: dict[str, Any],
    device: Optional[_PciDevice],
    printed: list[int],
    cpu_nodes: set[int],
) -> None:
    """Set the NUMA node: sysfs, else what topo -m printed, else unknown; only nodes that have CPUs count."""
    own = {device.numa_node} & cpu_nodes if device and device.numa_node is not None else set()
    named = set(printed) & cpu_nodes if cpu_nodes else set(printed)
    gpu["numa_nodes"] = sorted(own or named)
    label = gpu["pci_bus_id"] or gpu["uuid"]
    if own and named and not own <= named:
        gpu["problems"].append(
            problem(
                "warning",
                "numa_disagreement",
                f"GPU {label}: sysfs says NUMA node {format_ranges(own)}, nvidia-smi {format_ranges(named)}; "
                "sysfs was taken.",
                "Compare with lstopo; a firmware or driver update usually settles it.",
            ),
        )
    elif len(gpu["numa_nodes"]) > 1:
        gpu["problems"].append(
            problem(
                "warning",
                "numa_ambiguous",
                f"GPU {label}: could be on any of NUMA nodes {format_ranges(named)}; memory will not be bound.",
                _CPU_NODE_REMEDY,
            ),
        )
    elif not gpu["numa_nodes"] and len(cpu_nodes) != 1:
        gpu["problems"].append(
            problem(
                "warning",
                "numa_unknown",
                f"GPU {label}: neither sysfs (numa_node) nor nvidia-smi topo -m says on which NUMA node it is.",
                _CPU_NODE_REMEDY,
            ),
        )


def _foreign_holders(gpu: dict[str, Any], label: str) -> list[Problem]:
    """Processes on a GPU that no service of ours runs."""
    foreign = [holder for holder in gpu["holders"] if not (holder["unit"] or "").startswith(_OUR_UNITS)]
    if not foreign:
        return []
    processes = ", ".join(
        f"process {holder['pid']} of {holder['user'] or 'an unknown user'} ({holder['unit'] or 'no unit'}) "
        f"{'unknown' if holder['memory_mib'] is None else holder['memory_mib']} MiB"
        for holder in foreign[:4]
    )
    return [
        problem(
            "warning",
            "gpu_in_use",
            f"{label}: {len(foreign)} processes that are not ours hold its memory: {processes}.",
            "Stop them, or leave this GPU to them with the planner's option exclude_gpus.",
        ),
    ]


def _gpu_problems(
    gpu: dict[str, Any],
    device: Optional[_PciDevice],
    record: dict[str, Any],
    sysfs: _Tree,
    driver: dict[str, Any],
) -> None:
    """Append what is wrong with one GPU; `record` is what nvidia-smi says of it, empty when it does not list it."""
    label = f"GPU {gpu['pci_bus_id'] or gpu['uuid']}"
    pcie, found = gpu["pcie"], gpu["problems"]
    found += _foreign_holders(gpu, label)
    state = record.get("performance_state")
    if driver["state"] == "ok" and not record:
        bound = f"is bound to {device.driver}" if device and device.driver else "is bound to no driver"
        found.append(
            problem(
                "error",
                "gpu_not_seen_by_driver",
                f"{label} ({gpu['pci_device']}) is on the PCI bus and {bound}, but nvidia-smi does not list it.",
                "Read the kernel log for this address (NVRM; Xid 79 means fallen off the bus); bind it to the driver "
                "nvidia, reset or reboot; reseat the card if it comes back.",
            ),
        )
    if pcie["width"] and pcie["max_width"] and pcie["width"] < pcie["max_width"]:
        found.append(
            problem(
                "warning",
                "pcie_width_below_max",
                f"{label}: PCIe link runs x{pcie['width']} of x{pcie['max_width']}.",
                "Reseat the card and riser, clean the contacts, check the slot's lanes in the firmware setup.",
            ),
        )
    port = f"bus/pci/devices/{device.bridges[-1]}" if device and device.bridges else None
    slot = _link_speed(sysfs.text(port, "max_link_speed")) if port else None
    if slot and pcie["max_generation"] and slot < pcie["max_generation"]:
        found.append(
            problem(
                "warning",
                "pcie_slot_slower",
                f"{label}: the slot offers PCIe generation {slot}, the card {pcie['max_generation']}.",
                "Move the card to a faster slot or raise the slot's link speed in the firmware setup.",
            ),
        )
    # An idle GPU lowers its link speed by itself, so a low speed means something only in a working state.
    elif state in ("P0", "P1", "P2") and (pcie["generation"] or 9) < (pcie["max_generation"] or 0):
        found.append(
            problem(
                "warning",
                "pcie_speed_below_max",
                f"{label}: PCIe runs at generation {pcie['generation']} of {pcie['max_generation']} in state {state}.",
                "Look for PCIe AER errors in the kernel log; reseat the card and riser.",
            ),
        )
    if gpu["bar1_mib"] and gpu["memory_total_mib"] and gpu["bar1_mib"] < gpu["memory_total_mib"] and not gpu["vgpu"]:
        found.append(
            problem(
                "warning",
                "bar1_small",
                f"{label}: BAR1 is {gpu['bar1_mib']} MiB for {gpu['memory_total_mib']} MiB of memory: peer-to-peer "
                "transfers and loading are limited.",
                "Turn on Above 4G Decoding and Resizable BAR in the firmware setup.",
            ),
        )
    if gpu["mig"]["enabled"]:
        found.append(
            problem(
                "warning",
                "mig_enabled",
                f"{label} is split by MIG into {len(gpu['mig']['instances'])} instances.",
                "To use the whole card, stop its users and turn MIG off: nvidia-smi -mig 0 -i UUID.",
            ),
        )
    if gpu["vgpu"]:
        found.append(
            problem(
                "warning",
                "vgpu",
                f"{label} is a vGPU ({gpu['name']}): its memory and time are a share of a card.",
                "Expect no peer-to-peer transfers; use pass-through where whole cards are meant.",
            ),
        )
    if gpu["unified_memory"]:
        found.append(
            problem(
                "warning",
                "unified_memory",
                f"{label} shares the host's memory: {gpu['memory_total_mib']} MiB, the CPU's part included.",
                "Leave room for the operating system and page cache in the memory fraction.",
            ),
        )
    capability = float(gpu["compute_capability"] or 0)
    if driver["module_licence"] == "NVIDIA" and capability >= _FIRST_OPEN_ONLY_CAPABILITY:
        found.append(
            problem(
                "error",
                "proprietary_module",
                f"{label} is a Blackwell GPU, and the loaded kernel module is the proprietary one.",
                "Install the open kernel modules (package nvidia-open or nvidia-driver-*-open) and reboot.",
            ),
        )


def log_problems(kernel_log: Optional[str]) -> list[Problem]:
    """What the kernel log says of failing GPUs: one problem for each GPU and Xid, with `pci_bus_id`."""
    if kernel_log is None:
        return [
            problem(
                "warning",
                "kernel_log_unreadable",
                "The kernel log could not be read, so Xid errors and lost GPUs would go unnoticed.",
                "Run as root, or name a file with the output of journalctl -k.",
            ),
        ]
    seen: dict[tuple[str, int], list[str]] = {}
    for match in re.finditer(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)[^\n]*", kernel_log):
        seen.setdefault((normalise_bus_id(match[1]) or match[1], int(match[2])), []).append(match[0].strip())
    found = []
    for (bus_id, xid), lines in sorted(seen.items()):
        hardware, times = xid in _HARDWARE_XIDS, "once" if len(lines) == 1 else f"{len(lines)} times"
        found.append(
            problem(
                "error" if hardware else "warning",
                "xid",
                f"GPU {bus_id}: Xid {xid} in the kernel log, {times}; the last: {lines[-1][:200]}",
                "Drain the host, reset or reboot, and watch for it to return; then check power, seating and the card."
                if hardware
                else "Usually a fault of the program that used the GPU; look it up in NVIDIA's Xid catalogue.",
            ),
        )
        found[-1]["pci_bus_id"] = bus_id
    found += [entry for entry in parse_smi(kernel_log)["problems"] if entry["code"] == "gpu_unreachable"]
    return found


def _host_problems(topology: dict[str, Any], sysfs: _Tree, procfs: _Tree, device_count: int) -> list[Problem]:
    found: list[Problem] = []
    gpus, driver, pcie = topology["gpus"], topology["driver"], topology["pcie"]
    if not gpus:
        found.append(
            problem(
                "error",
                "no_gpu",
                f"No NVIDIA GPU: none of {device_count} PCI devices under {sysfs.path('bus/pci/devices')} has vendor "
                "10de and class 0300 or 0302, and nvidia-smi lists none.",
                "Check the inventory group, the card's seating and power, and PCI pass-through of a virtual machine.",
            ),
        )
    if driver["state"] == "missing":
        found.append(
            problem(
                "error",
                "driver_missing",
                f"No NVIDIA driver: {driver['message']}; loaded kernel module: {driver['module_version'] or 'none'}.",
                "Install the NVIDIA driver, branch 580 or later for CUDA 13, and reboot if a former one was loaded.",
            ),
        )
    if len({gpu["pci_device"] for gpu in gpus}) > 1:
        models = sorted({gpu["name"] or gpu["pci_device"] or "unknown" for gpu in gpus})
        found.append(
            problem(
                "warning",
                "mixed_gpus",
                f"The GPUs are not alike: {', '.join(models)}.",
                "None needed: a replica uses GPUs of one model only, chosen by UUID.",
            ),
        )
    if pcie["iommu"] == "translated":
        found.append(
            problem(
                "warning",
                "iommu_translated",
                "The IOMMU translates the GPUs' addresses: peer-to-peer transfers over PCIe are slow or corrupt.",
                "Set host_tuning_iommu to passthrough (docs/tuning.md), deploy and reboot; or add iommu=pt, on Arm "
                "iommu.passthrough=1, to the kernel's command line yourself.",
            ),
        )
    if pcie["acs_redirect"]:
        found.append(
            problem(
                "warning",
                "acs_redirect",
                f"ACS redirects peer-to-peer traffic to the root complex at {', '.join(pcie['acs_redirect'])}.",
                "Turn ACS off in the firmware setup; or set host_tuning_acs_redirect_off, which clears its two bits at "
                "each boot (docs/tuning.md). By hand, until the next boot: setpci -s ADDRESS ECAP_ACS+6.w=0:c",
            ),
        )
    elif pcie["acs_redirect"] is None and gpus:
        found.append(
            problem(
                "warning",
                "acs_unreadable",
                "The config space of the bridges above the GPUs is not readable: whether ACS redirects is unknown.",
                "Probe as root.",
            ),
        )
    if topology["cpus"]["allowed"] is None:
        found.append(
            problem(
                "warning",
                "allowed_cpus_unknown",
                f"{procfs.path('self/status')} does not say which CPUs may be used; all online ones were taken.",
                "Check that procfs is mounted and readable.",
            ),
        )
    if not topology["numa_nodes"]:
        found.append(
            problem(
                "warning",
                "numa_nodes_unknown",
                f"No NUMA node with CPUs under {sysfs.path('devices/system/node')}: nothing can be pinned.",
                "Use a kernel with CONFIG_NUMA; in a capture, save /sys/devices/system/node.",
            ),
        )
    unreadable = sorted({str(path) for path in sysfs.unreadable + procfs.unreadable})
    if unreadable:
        message = f"{len(unreadable)} files could not be read, the first: {', '.join(unreadable[:3])}."
        found.append(problem("warning", "unreadable", message, "Probe as root."))
    return found


def _links(
    gpus: list[dict[str, Any]],
    devices: dict[str, _PciDevice],
    topo_text: str,
) -> tuple[dict[str, str], list[Problem]]:
    """Link class by position in `gpus`: as nvidia-smi prints it, else as far as the PCI tree tells."""
    printed = parse_topo_matrix(topo_text)
    position = {gpu["index"]: place for place, gpu in enumerate(gpus) if gpu["index"] is not None}
    links: dict[str, str] = {}
    for pair, link in printed["links"].items():
        first, second = (position.get(int(index)) for index in pair.split("-"))
        if first is not None and second is not None:
            links[f"{min(first, second)}-{max(first, second)}"] = link
    problems = [
        problem(
            "warning",
            "link_disagreement",
            f"nvidia-smi topo -m prints {there} from GPU {first} to GPU {second} and {back} the other way.",
            "Check the NVLinks of both (nvidia-smi nvlink -s) and take the output again.",
        )
        for first, second, there, back in topo_disagreements(topo_text)
    ]
    derived = 0
    for first in range(len(gpus)):
        for second in range(first + 1, len(gpus)):
            ends = [devices.get(gpus[place]["pci_bus_id"] or "") for place in (first, second)]
            if f"{first}-{second}" not in links and ends[0] and ends[1]:
                link = _pci_link(ends[0], ends[1])
                if link:
                    links[f"{first}-{second}"] = link
                    derived += 1
    if derived:
        problems.append(
            problem(
                "warning",
                "links_from_pci_tree",
                f"nvidia-smi topo -m says nothing of {derived} GPU pairs; their links were read from the PCI tree, "
                "which does not show NVLink.",
                "Probe again when the driver works.",
            ),
        )
    return dict(sorted(links.items(), key=lambda item: [int(end) for end in item[0].split("-")])), problems


def read_host(
    sysfs_root: str,
    procfs_root: str,
    run_smi: RunSmi,
    kernel_log: Optional[str],
    checks: Optional[dict[str, Any]] = None,
    *,
    lstopo: Optional[str] = None,
    deadline: str = "its deadline",
    here: bool = True,
    reads: Optional[list[Path]] = None,
) -> dict[str, Any]:
    """Read one host, live or saved, into the topology structure (schema 1).

    Args:
        sysfs_root: Where sysfs is, `/sys` on a live host.
        procfs_root: Where procfs is, `/proc` on a live host.
        run_smi: Runs nvidia-smi with the arguments it is given; called twice, `-q -x` and `topo -m`.
        kernel_log: Text of the kernel log, None when it could not be read.
        checks: Facts saved by tests that ran on the host earlier; None or missing keys mean not tested.
        lstopo: What `lstopo-no-graphics --of xml` printed, None where it is not installed.
        deadline: How long nvidia-smi was given, in words, for the message when it did not answer.
        here: Whether the processes are of this machine, so that its user names are theirs.
        reads: Receives the path of every file that was looked at.

    Returns:
        The structure, plain JSON types only. What could not be learned is null, or an entry in `problems`.
    """
    sysfs, procfs = _Tree(sysfs_root, reads), _Tree(procfs_root, reads)
    devices = _nvidia_devices(sysfs)
    by_bus = {device.bus_id: device for device in devices if device.class_code.startswith(_GPU_CLASSES)}

    output = run_smi(["-q", "-x"])
    smi = parse_smi(output.text)
    driver = _driver(procfs, output, smi, deadline)
    asked = driver["state"] == "ok" and smi["gpus"]
    topo = run_smi(["topo", "-m"]) if asked else SmiOutput("", 0)
    matrix = parse_topo_matrix(topo.text)

    records = {record["pci_bus_id"]: record for record in smi["gpus"] if record["pci_bus_id"]}
    unplaced = [record for record in smi["gpus"] if not record["pci_bus_id"]]
    joined: list[tuple[Optional[str], dict[str, Any]]] = [
        (bus_id, records.get(bus_id, {})) for bus_id in sorted(by_bus.keys() | records.keys(), key=_bus_order)
    ]
    joined += [(None, record) for record in unplaced]
    module = {bus_id: _module_says(procfs, bus_id) for bus_id, _ in joined if bus_id}
    gpus = [
        _gpu(sysfs, bus_id, by_bus.get(bus_id or ""), record, module.get(bus_id or "", {})) for bus_id, record in joined
    ]
    _fill_holders(procfs, [holder for gpu in gpus for holder in gpu["holders"]], here=here)

    status = procfs.text("self", "status") or ""
    cpus = _cpus(sysfs, status)
    nodes = _numa_nodes(sysfs, status, cpus)
    host_memory = re.search(r"^MemTotal:\s+(\d+) kB", procfs.text("meminfo") or "", re.MULTILINE)
    for gpu, (bus_id, record) in zip(gpus, joined):  # noqa: B905  (no `strict` in Python 3.9)
        device = by_bus.get(bus_id or "")
        if gpu["unified_memory"] and gpu["memory_total_mib"] is None and host_memory:
            gpu["memory_total_mib"] = int(host_memory[1]) // 1024
        _place(gpu, device, matrix["numa"].get(gpu["index"], []), {node["id"] for node in nodes})
        _gpu_problems(gpu, device, record, sysfs, driver)
        for entry in gpu["problems"]:
            entry["remedy"] = entry["remedy"].replace("-i UUID", f"-i {gpu['uuid'] or 'UUID'}")
    links, link_problems = _links(gpus, by_bus, topo.text)

    topology: dict[str, Any] = {
        "schema": 1,
        "architecture": _architecture(procfs, sysfs_root),
        "driver": driver,
        "gpus": gpus,
        "links": links,
        "numa_nodes": nodes,
        "cpus": {name: None if numbers is None else format_ranges(numbers) for name, numbers in cpus.items()},
        "pcie": _host_pcie(sysfs, procfs, list(by_bus.values())),
        "nvswitch": any(device.class_code.startswith(_BRIDGE_CLASS) for device in devices)
        or any(record["fabric_state"] in ("Completed", "In Progress") for record in smi["gpus"]),
        "checks": UNTESTED,
        "problems": [],
    }
    # Read apart from the rest, so that a capture does not hold which boot it was.
    boot = _Tree(procfs_root).text("sys", "kernel", "random", "boot_id")
    topology["checks"], of_checks = hold_against(checks or {}, circumstances(topology, boot))
    of_gpus = [entry for gpu in gpus for entry in gpu["problems"]]
    of_smi = [entry for entry in smi["problems"] if entry not in of_gpus and not _is_repeated(entry, output, driver)]
    # That a GPU has no MIG or no ECC stays with the GPU: it is nothing to act on.
    of_gpus = [entry for entry in of_gpus if entry["code"] != "value_not_supported"]
    of_smi += _call_problems("nvidia-smi -q -x", output, deadline)
    if asked:
        of_smi += _call_problems("nvidia-smi topo -m", topo, deadline)
    topology["problems"] = (
        _host_problems(topology, sysfs, procfs, len(sysfs.names("bus", "pci", "devices")))
        + of_smi
        + of_gpus
        + link_problems
        + compare_driver(driver)
        + compare_gpus(gpus, set(by_bus), records, module, matrix["gpus"])
        + compare_lstopo(gpus, nodes, lstopo)
        + of_checks
        + log_problems(kernel_log)
    )
    return topology


def _call_problems(command: str, output: SmiOutput, deadline: str) -> list[Problem]:
    """What a call of nvidia-smi shows by how it ended."""
    if output.failure == "timeout":
        return [
            problem(
                "error",
                "nvidia_smi_timeout",
                f"{command} did not answer within {deadline}.",
                "A hung driver: read the kernel log for NVRM lines and reboot; do not start more GPU work.",
            ),
        ]
    if output.exit_code:
        return [
            problem(
                "warning",
                "nvidia_smi_exit_code",
                f"{command} ended with exit code {output.exit_code}: {' '.join(output.text.split())[-160:]!r}",
                "See the other problems of this host; nvidia-smi's manual page lists its exit codes.",
            ),
        ]
    return []


def _is_repeated(entry: Problem, output: SmiOutput, driver: dict[str, Any]) -> bool:
    """A missing driver or a hung nvidia-smi is one problem of the host, not also an empty answer."""
    if output.failure is not None:
        return bool(entry["code"] == "empty_output" or driver["state"] == "missing")
    return bool(driver["state"] == "missing" and entry["code"] == "driver_missing")


def _architecture(procfs: _Tree, sysfs_root: str) -> Optional[str]:
    """Machine name as `uname -m` prints it: from the kernel, or for an old live kernel from this process."""
    return procfs.text("sys", "kernel", "arch") or (platform.machine() if sysfs_root == "/sys" else None)


# --- where the text comes from --------------------------------------------------------------------------------------


def _run(command: Sequence[str], timeout_seconds: float) -> SmiOutput:
    """Run a command under a deadline; one that cannot even be killed (stuck in the driver) is left behind."""
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C"},
            )
        except OSError as error:
            return SmiOutput(str(error), None, "missing")
        try:
            exit_code: Optional[int] = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
            return SmiOutput("", None, "timeout")
        output.seek(0)
        return SmiOutput(output.read().decode("utf-8", "replace"), exit_code)


def smi_runner(nvidia_smi: str, timeout_seconds: float) -> RunSmi:
    """A `run_smi` for a live host: nvidia-smi by name or path, each call under the deadline."""
    return lambda arguments: _run([nvidia_smi, *arguments], timeout_seconds)


def read_kernel_log(path: Optional[str], timeout_seconds: float, since: Optional[str] = None) -> Optional[str]:
    """The kernel log from a file, or of this boot from journalctl or dmesg; None when none of them answers.

    With `since` (a time as journalctl takes it) only what came later, and only from journalctl.
    """
    if path:
        data = _Tree("").data(path)
        return None if data is None else data.decode("utf-8", "replace")
    journal = ["journalctl", "-k", "-b", "--no-pager", "-o", "short", "-n", "20000"]
    for command in ([*journal, "--since", since],) if since else (journal, ["dmesg"]):
        output = _run(command, timeout_seconds)
        # A user who may not read the kernel's messages is shown none, with success; a boot without any does not exist.
        if output.failure is None and output.exit_code == 0 and re.search(r"kernel: |^\[", output.text, re.MULTILINE):
            return output.text
    return None


def read_lstopo(program: str, timeout_seconds: float) -> Optional[str]:
    """What hwloc's lstopo prints as XML, None where it is not installed."""
    output = _run([program, "--of", "xml"], timeout_seconds)
    return None if output.failure == "missing" else output.text


def read_checks(path: str) -> tuple[dict[str, Any], list[Problem]]:
    """Host facts saved by earlier tests; no file means nothing tested, a damaged one is a problem."""
    tree = _Tree("")
    text = tree.text(path)
    if text is None and not tree.unreadable:
        return {}, []
    try:
        checks = json.loads(text or "")
        if isinstance(checks, dict):
            return checks, []
    except ValueError:
        pass
    remedy = "Remove the file; the checks run again at the next deploy."
    return {}, [problem("warning", "checks_unreadable", f"{path} is not a JSON object; taken as untested.", remedy)]


def read_capture(path: str) -> dict[str, Any]:
    """Read what playbooks/capture.yml saved of a host: the folder, or a tar archive of it.

    In the folder are `sys`, `proc`, `nvidia-smi/{q-x.xml,topo-m.txt}`, `kernel.log`, `checks.json` and `lstopo.xml`.
    A missing file reads as it would on a host that lacks it. How a call of nvidia-smi ended, where not with exit code
    0, is in `q-x.rc` and `topo-m.rc`: the code, or `timeout`.
    """
    if not os.path.isfile(path):  # noqa: PTH113  (Path.is_file raises where a folder above is closed)
        return _read_capture_folder(path)
    with tempfile.TemporaryDirectory() as folder:
        cut = _unpack(path, folder)
        entries = os.listdir(folder)  # noqa: PTH208  (names are wanted)
        inner = os.path.join(folder, entries[0]) if len(entries) == 1 else folder  # noqa: PTH118
        topology = _read_capture_folder(inner)
    for entry in topology["problems"]:
        entry["message"] = entry["message"].replace(inner, path)  # the temporary folder says nothing to anyone
    if cut:
        remedy = "Copy the archive again; what it still holds was read."
        topology["problems"].append(problem("error", "capture_truncated", f"{path}: {cut}.", remedy))
    return topology


_LARGEST_FILE = 16 << 20  # bytes; a report of 16 GPUs has half a MiB


def _unpack(archive: str, folder: str) -> Optional[str]:
    """Unpack files, folders and links that stay inside `folder`; returns what went wrong, if anything did."""
    root = os.path.realpath(folder)

    def inside(path: str) -> bool:
        return os.path.realpath(path).startswith(root + os.sep)

    try:
        with tarfile.open(archive) as opened:
            for member in opened:
                path = os.path.join(root, member.name)  # noqa: PTH118  (`..` and links are resolved below, not here)
                parent = os.path.dirname(path)  # noqa: PTH120
                link = os.path.join(parent, member.linkname)  # noqa: PTH118
                content = opened.extractfile(member) if member.isfile() and member.size < _LARGEST_FILE else None
                if not inside(path) or os.path.lexists(path):
                    continue
                if member.isdir():
                    os.makedirs(path, exist_ok=True)  # noqa: PTH103
                elif member.issym() and inside(link):
                    os.makedirs(parent, exist_ok=True)  # noqa: PTH103
                    os.symlink(member.linkname, path)  # noqa: PTH211
                elif content:
                    os.makedirs(parent, exist_ok=True)  # noqa: PTH103
                    Path(path).write_bytes(content.read())
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error) as error:
        return f"not readable to its end ({error})"
    return None


def _read_capture_folder(folder: str) -> dict[str, Any]:
    saved = _Tree(f"{folder}/nvidia-smi")
    files = {"-q": ("q-x.xml", "q-x.rc"), "topo": ("topo-m.txt", "topo-m.rc")}

    def run_smi(arguments: Sequence[str]) -> SmiOutput:
        name, exit_file = files[arguments[0]]
        text, ending = saved.text(name), saved.text(exit_file) or "0"
        if ending == "timeout":
            return SmiOutput("", None, "timeout")
        if text is None:
            return SmiOutput("", None, "missing")
        return SmiOutput(text, int(ending) if ending.isdecimal() else None)

    checks, problems = read_checks(f"{folder}/checks.json")
    topology = read_host(
        f"{folder}/sys",
        f"{folder}/proc",
        run_smi,
        read_kernel_log(f"{folder}/kernel.log", timeout_seconds=0),
        checks,
        lstopo=_Tree(folder).text("lstopo.xml"),
        here=False,
    )
    if not os.path.isdir(folder):  # noqa: PTH112  (Path.is_dir raises where a folder above is closed)
        remedy = "Give a folder saved by playbooks/capture.yml."
        problems.append(problem("error", "no_capture", f"{folder} is not a folder, or not a readable one.", remedy))
    topology["problems"] += problems
    return topology
