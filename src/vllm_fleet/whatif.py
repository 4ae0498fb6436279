"""Hosts that nobody has probed: so many GPUs of a known model, as such hosts usually are."""

import itertools
import re
from typing import Any

from vllm_fleet.errors import BadInputError
from vllm_fleet.gpus import known_gpus
from vllm_fleet.topology import SCHEMA

NODE_CPUS = 64
NODE_MEMORY_MIB = 1024 * 1024
MOST_GPUS = 64
ONE_NODE_GPUS = 4  # so many hang on one socket


def host(text: str) -> dict[str, Any]:
    """A topology for "8x H200": one NUMA node up to four GPUs, else two; NVLink where such hosts have it, else PCIe.

    Raises:
        BadInputError: It does not read so, or the GPU is not in the table.
    """
    match = re.fullmatch(r"\s*(\d+)\s*x\s*(.+?)\s*", text)
    count = int(match[1]) if match else 0
    if match is None or not 1 <= count <= MOST_GPUS:
        raise BadInputError(f"--gpus is {text!r}; write it like '8x H200', with 1 to {MOST_GPUS} GPUs.")
    wanted = match[2].lower()
    found = [(device, facts) for device, facts in known_gpus().items() if wanted in (facts.name or "").lower()]
    if not found:
        names = ", ".join(str(facts.name) for facts in known_gpus().values())
        raise BadInputError(f"--gpus names {match[2]!r}, which is not in the table of GPUs. It has: {names}.")
    device, facts = found[0]
    nodes = 1 if count <= ONE_NODE_GPUS else 2
    numa = [index * nodes // count for index in range(count)]
    links = {
        f"{a}-{b}": "NV18" if facts.nvlink else "NODE" if numa[a] == numa[b] else "SYS"
        for a, b in itertools.combinations(range(count), 2)
    }
    gpus = [
        {
            "index": index,
            "uuid": None,
            "pci_bus_id": f"0000:{index + 1:02x}:00.0",
            "pci_device": device,
            "name": facts.name,
            "compute_capability": facts.compute_capability,
            "memory_total_mib": facts.memory_total_mib,
            "memory_reserved_mib": facts.memory_reserved_mib,
            "numa_nodes": [numa[index]],
        }
        for index in range(count)
    ]
    return {
        "schema": SCHEMA,
        "architecture": None,
        "driver": {"state": "assumed", "version": None},
        "gpus": gpus,
        "links": links,
        "numa_nodes": [
            {
                "id": node,
                "cpus": f"{node * NODE_CPUS}-{(node + 1) * NODE_CPUS - 1}",
                "memory_total_mib": NODE_MEMORY_MIB,
                "bindable": True,
            }
            for node in range(nodes)
        ],
    }
