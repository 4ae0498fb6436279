"""Compares what the kernel, nvidia-smi and hwloc's lstopo say of one host.

Where two of them differ, one of them is wrong, and a plan built on it would be, too: each difference is a problem that
names both, and which was taken.

Standard library only, Python 3.9: this runs on target hosts.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any, NamedTuple, Optional

from .gpu_topology import Problem, format_ranges, normalise_bus_id, parse_ranges, problem

__all__ = ["Lstopo", "compare_driver", "compare_gpus", "compare_lstopo", "parse_lstopo"]

_REMEDY = "Take both outputs again; if they still differ, update firmware and driver, and do not pin until they agree."


class Lstopo(NamedTuple):
    """What lstopo says: CPUs of each NUMA node, and the nodes near each PCI device."""

    node_cpus: dict[int, set[int]]
    device_nodes: dict[str, set[int]]


def _bits(mask: Optional[str]) -> set[int]:
    """Read an hwloc bitmap such as `0xff,,0xffffffff`: words of 32 bits, the highest first, a blank one zero."""
    if not mask or not re.fullmatch(r"(?:0x[0-9a-f]{1,8})?(?:,(?:0x[0-9a-f]{1,8})?)*", mask):
        return set()
    number = 0
    for word in mask.split(","):
        number = number << 32 | int(word or "0", 16)
    return {bit for bit in range(number.bit_length()) if number >> bit & 1}


def parse_lstopo(text: str) -> Optional[Lstopo]:
    """Read `lstopo-no-graphics --of xml`; None when it is no such document.

    A PCI device belongs to the nodes of the nearest object above it that has a set of nodes (hwloc manual, "I/O
    objects": their locality is that of their non-I/O parent).
    """
    document = re.search(r"<topology\b.*</topology>", text, re.DOTALL)  # warnings may stand before and behind it
    try:
        root = ET.fromstring(document[0] if document else "")  # noqa: S314  (printed by a program of this host; expat limits entities itself)
    except (ET.ParseError, ValueError):
        return None
    found = Lstopo({}, {})
    queue: list[tuple[ET.Element, set[int]]] = [(root, set())]
    while queue:
        element, nodes = queue.pop()
        nodes = _bits(element.get("nodeset")) or nodes
        index, bus_id = element.get("os_index", ""), normalise_bus_id(element.get("pci_busid", ""))
        if element.get("type") == "NUMANode" and index.isdecimal():
            found.node_cpus[int(index)] = _bits(element.get("cpuset"))
        elif element.get("type") == "PCIDev" and bus_id:
            found.device_nodes[bus_id] = nodes
        queue += [(child, nodes) for child in element if child.tag == "object"]
    return found


def _disagreement(code: str, what: str, first: str, second: str) -> Problem:
    return problem("warning", code, f"{what}: {first}, but {second}.", _REMEDY)


def compare_gpus(
    gpus: list[dict[str, Any]],
    on_bus: set[str],
    records: dict[str, dict[str, Any]],
    module_says: dict[str, dict[str, Any]],
    matrix_gpus: list[int],
) -> list[Problem]:
    """Compare each GPU of the result with every source that knows it.

    Args:
        gpus: The GPUs as the probe will report them.
        on_bus: PCI addresses of the GPUs that sysfs has.
        records: What `nvidia-smi -q -x` says, by PCI address.
        module_says: What /proc/driver/nvidia/gpus says, by PCI address.
        matrix_gpus: Numbers of the GPUs in `nvidia-smi topo -m`; empty when there was no matrix.
    """
    found = []
    for gpu in gpus:
        bus_id = gpu["pci_bus_id"]
        label = f"GPU {bus_id or gpu['uuid']}"
        record, module = records.get(bus_id, {}), module_says.get(bus_id, {})
        if bus_id in records and bus_id not in on_bus:
            found.append(
                problem(
                    "warning",
                    "gpu_not_on_pci_bus",
                    f"{label}: nvidia-smi lists it, but sysfs has no such PCI device; its NUMA node, link and bridges "
                    "come from nvidia-smi alone.",
                    "Under WSL this is normal; in a container mount the host's /sys.",
                ),
            )
        for name, taken, told, source in (
            ("PCI device", gpu["pci_device"], record.get("pci_device"), "nvidia-smi"),
            ("link width", gpu["pcie"]["width"], record.get("pcie", {}).get("width"), "nvidia-smi"),
            ("UUID", gpu["uuid"], module.get("uuid"), "the kernel module"),
            ("minor number", gpu["minor"], module.get("minor"), "the kernel module"),
        ):
            if taken is not None and told is not None and taken != told:
                taken_from = "sysfs" if source == "nvidia-smi" else "nvidia-smi"
                what = f"{label}, {name} (the first was taken)"
                found.append(
                    _disagreement("gpu_disagreement", what, f"{taken_from} says {taken}", f"{source} says {told}")
                )
    if matrix_gpus and records and len(matrix_gpus) != len(records):
        what = "Number of GPUs"
        matrix, report = f"nvidia-smi topo -m has {len(matrix_gpus)}", f"nvidia-smi -q -x has {len(records)}"
        found.append(_disagreement("gpu_count_disagreement", what, matrix, report))
    return found


def compare_driver(driver: dict[str, Any]) -> list[Problem]:
    """Compare the loaded kernel module with the library that nvidia-smi uses, where both answered."""
    library, module = driver["version"], driver["module_version"]
    if driver["state"] != "ok" or not library or not module or library == module:
        return []
    return [
        problem(
            "warning",
            "driver_disagreement",
            f"The loaded kernel module is {module}, but nvidia-smi says driver {library}.",
            "Reboot, or stop all GPU users and reload the module.",
        ),
    ]


def compare_lstopo(gpus: list[dict[str, Any]], nodes: list[dict[str, Any]], text: Optional[str]) -> list[Problem]:
    """Compare NUMA nodes, and the node of each GPU, with lstopo's; no text means that lstopo is not there."""
    if text is None:
        return []
    lstopo = parse_lstopo(text)
    if lstopo is None:
        message = f"lstopo printed no topology but: {' '.join(text.split())[:120]!r}"
        return [problem("warning", "lstopo_unreadable", message, "Run lstopo-no-graphics --of xml by hand.")]
    found = []
    usable = {node["id"]: set(parse_ranges(node["cpus"]) or []) for node in nodes}
    for node, cpus in usable.items():
        theirs = lstopo.node_cpus.get(node, set())
        others = {cpu for other, own in usable.items() if other != node for cpu in own}
        # lstopo counts isolated CPUs, too, so it may have more; it must not lack any nor have another node's.
        if not cpus <= theirs or theirs & others:
            ours, what = format_ranges(cpus) or "none", f"CPUs of NUMA node {node} (sysfs was taken)"
            said = format_ranges(theirs) or "none"
            found.append(_disagreement("lstopo_disagreement", what, f"sysfs says {ours}", f"lstopo says {said}"))
    for gpu in gpus:
        own, near = set(gpu["numa_nodes"]), lstopo.device_nodes.get(gpu["pci_bus_id"] or "", set()) & set(usable)
        # All nodes at once is how lstopo says that it does not know.
        if own and near and (len(usable) == 1 or near != set(usable)) and not own & near:
            what = f"NUMA node of GPU {gpu['pci_bus_id']} (the first was taken)"
            ours = f"sysfs and nvidia-smi say {format_ranges(own)}"
            found.append(_disagreement("lstopo_disagreement", what, ours, f"lstopo says {format_ranges(near)}"))
    return found
