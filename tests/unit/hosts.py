"""Hosts for planner tests, as the `gpu_topology` fact describes them."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_fleet.target.gpu_topology import parse_topo_matrix

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"

# name, PCI device, compute capability, nvidia-smi's total and reserved in MiB
Model = tuple[str, str, str, int, int | None]
RTX_PRO_6000: Model = ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "10de:2bb5", "12.0", 97887, 636)
H200: Model = ("NVIDIA H200", "10de:2335", "9.0", 143771, 616)
A100: Model = ("NVIDIA A100-SXM4-80GB", "10de:20b2", "8.0", 81920, 500)
H100: Model = ("NVIDIA H100 80GB HBM3", "10de:2330", "9.0", 81559, 479)


def gpu(index: int, model: Model, numa_nodes: list[int]) -> dict[str, Any]:
    """One GPU of the fact."""
    name, device, capability, total, reserved = model
    return {
        "index": index,
        "minor": index,
        "uuid": f"GPU-0000000{index}-aaaa-bbbb-cccc-dddddddddddd",
        "pci_bus_id": f"0000:{8 * (index + 1):02x}:00.0",
        "pci_device": device,
        "name": name,
        "compute_capability": capability,
        "memory_total_mib": total,
        "memory_reserved_mib": reserved,
        "memory_used_mib": 0,
        "holders": [],
        "unified_memory": False,
        "numa_nodes": numa_nodes,
        "pcie": {"generation": 5, "width": 16, "max_generation": 5, "max_width": 16, "switches": []},
        "bar1_mib": 131072,
        "mig": {"enabled": False, "instances": []},
        "vgpu": False,
        "ecc": True,
        "power_limit_w": 600,
        "problems": [],
    }


def host(
    models: Sequence[Model],
    numa: list[list[int]],
    links: dict[str, str],
    *,
    node_gib: int | None = 1000,
    bindable: bool = True,
) -> dict[str, Any]:
    """A host of these GPUs; node n has CPUs 64n to 64n+63."""
    nodes = sorted(set(itertools.chain.from_iterable(numa)))
    return {
        "schema": 1,
        "architecture": "x86_64",
        "driver": {"state": "ok", "version": "580.159.04", "message": None},
        "gpus": [gpu(i, model, numa[i]) for i, model in enumerate(models)],
        "links": links,
        "numa_nodes": [
            {
                "id": node,
                "cpus": f"{64 * node}-{64 * node + 63}",
                "memory_total_mib": None if node_gib is None else node_gib * 1024,
                "bindable": bindable,
            }
            for node in nodes
        ],
        "cpus": {"online": f"0-{64 * len(nodes) - 1}", "isolated": "", "allowed": f"0-{64 * len(nodes) - 1}"},
        "pcie": {"iommu": "off", "acs_redirect": []},
        "nvswitch": False,
        "checks": {"p2p": {"verdict": "untested", "detail": None}, "disk_read_mib_s": None, "kernel_build": None},
        "problems": [],
    }


def two_sockets(count: int = 8, model: Model = RTX_PRO_6000, **kwargs: Any) -> dict[str, Any]:
    """PCIe GPUs split evenly over two sockets: NODE inside, SYS across."""
    half = count // 2
    numa = [[int(i >= half)] for i in range(count)]
    links = {f"{a}-{b}": "NODE" if numa[a] == numa[b] else "SYS" for a, b in itertools.combinations(range(count), 2)}
    return host([model] * count, numa, links, **kwargs)


def nvlink(count: int, model: Model = H100, nodes: int = 1) -> dict[str, Any]:
    """GPUs that all reach each other over NVLink, split evenly over the nodes."""
    links = {f"{a}-{b}": "NV18" for a, b in itertools.combinations(range(count), 2)}
    return host([model] * count, [[i * nodes // count] for i in range(count)], links)


def published(name: str, model: Model = RTX_PRO_6000) -> dict[str, Any]:
    """A host with the links and NUMA nodes of a matrix that someone published (tests/fixtures/topologies)."""
    text = json.loads((FIXTURES / "topologies" / f"{name}.json").read_text())["topo_matrix_text"]
    matrix = parse_topo_matrix(text)
    return host([model] * len(matrix["gpus"]), [matrix["numa"].get(i, []) for i in matrix["gpus"]], matrix["links"])
