"""Which GPUs share a replica, and which CPUs and memory that replica gets.

GPUs that talk over NVLink, or that share a NUMA node, are taken together; a group spans nodes only when no closer one
is left.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from vllm_fleet.target.gpu_topology import format_ranges, parse_ranges
from vllm_fleet.topology import NumaNode, Topology

# nvidia-smi's names, near to far.
_DISTANCE = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")


@dataclass(frozen=True)
class Group:
    """The GPUs of one replica, as positions in `Topology.gpus`. `slot` numbers it for good: see `form_groups`."""

    slot: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Pin:
    """CPUs and memory of one replica, and why."""

    numa_nodes: tuple[int, ...]
    cpus: str | None
    memory_policy: str  # bind, preferred or none
    reason: str


def form_groups(topology: Topology, members: Sequence[int], usable: Iterable[int], size: int) -> list[Group]:
    """Form as many groups of `size` GPUs as there are, the closest first.

    Groups are formed over all members and then those with an unusable GPU are dropped, so that a GPU taken away leaves
    every other group, with its number, exactly as it was. What the broken groups leave over forms new ones, which take
    the numbers that fell free.
    """
    usable = set(usable)
    formed = _partition(topology, list(members), size)
    whole = {slot: group for slot, group in enumerate(formed) if usable.issuperset(group)}
    left = usable.difference(*whole.values())
    rest = _partition(topology, [m for m in members if m in left], size)
    free_slots = (slot for slot in range(len(formed)) if slot not in whole)
    whole |= dict(zip(free_slots, rest, strict=False))  # never more groups than slots: fewer GPUs make fewer groups
    return [Group(slot, group) for slot, group in sorted(whole.items())]


def _partition(topology: Topology, remaining: list[int], size: int) -> list[tuple[int, ...]]:
    """Cut GPUs into groups, level by level from near to far; fewer than `size` remain."""
    groups: list[tuple[int, ...]] = []
    for level in _levels(topology):
        cells: dict[Hashable, list[int]] = {}
        for member in remaining:
            cells.setdefault(level[member], []).append(member)
        for cell in cells.values():
            groups += [tuple(cell[start : start + size]) for start in range(0, len(cell) - size + 1, size)]
        taken = {m for group in groups for m in group}
        remaining = [m for m in remaining if m not in taken]
    return sorted(groups)


def _levels(topology: Topology) -> Iterator[Sequence[Hashable]]:
    """For each level, the cell of every GPU: NVLink on one node, NVLink, PCIe switch, root complex, node, host."""
    island, node = _within(topology, "NV"), locality(topology)
    yield list(zip(island, node, strict=True))
    yield island
    for link in ("PIX", "PXB", "PHB"):
        yield _within(topology, link)
    yield node
    yield [None] * len(topology.gpus)


def locality(topology: Topology) -> list[Hashable]:
    """For each GPU, its NUMA node; where unknown, the GPUs it reaches without crossing sockets."""
    cluster = _within(topology, "NODE")
    return [("links", cluster[i]) if gpu.numa_node is None else gpu.numa_node for i, gpu in enumerate(topology.gpus)]


def _within(topology: Topology, farthest: str) -> list[int]:
    """For each GPU, the first one that it reaches, in hops, over links no slower than this."""
    root = list(range(len(topology.gpus)))
    for (a, b), kind in topology.links.items():
        if _distance(kind) <= _distance(farthest):
            low, high = sorted((root[a], root[b]))
            root = [low if r == high else r for r in root]
    return root


def _distance(link: str) -> int:
    """Rank of a link from near to far; what nvidia-smi may yet invent counts as far."""
    name = "NV" if link.startswith("NV") else link
    return _DISTANCE.index(name) if name in _DISTANCE else len(_DISTANCE)


def farthest_link(topology: Topology, members: Sequence[int]) -> str | None:
    """The slowest kind of link inside a group, without NVLink's number; None for one GPU or unknown links."""
    kinds = [topology.link(a, b) for i, a in enumerate(members) for b in members[i + 1 :]]
    ranks = [len(_DISTANCE) if kind is None else _distance(kind) for kind in kinds]
    worst = max(ranks, default=len(_DISTANCE))
    return _DISTANCE[worst] if worst < len(_DISTANCE) else None


def spans(topology: Topology, members: Sequence[int]) -> bool:
    """Whether a group's traffic leaves its NUMA node without NVLink to carry it."""
    if len(members) == 1 or farthest_link(topology, members) == "NV":
        return False
    nodes = locality(topology)
    return len({nodes[m] for m in members}) > 1


def pin(topology: Topology, members: Sequence[int], host_gib: float) -> Pin:
    """CPUs and memory policy of a group.

    Memory is bound only when its node is known, one, bindable and large enough: a bound process that runs out of its
    node is killed while other nodes are free.

    Args:
        topology: The host.
        members: Positions of the group's GPUs.
        host_gib: Host memory that the replica needs, the page cache of its weights included.
    """
    gpus = [topology.gpus[m] for m in members]
    ids = sorted({gpu.numa_node for gpu in gpus if gpu.numa_node is not None})
    if any(gpu.numa_node is None for gpu in gpus):
        found = sorted({n for gpu in gpus for n in gpu.numa_nodes})
        told = f"the host names several ({', '.join(map(str, found))})" if found else "the host does not tell it"
        return Pin((), None, "none", f"not pinned: the NUMA node of its GPUs is unknown ({told})")
    missing = [n for n in ids if n not in topology.numa_nodes]
    if missing:
        return Pin((), None, "none", f"not pinned: NUMA node {missing[0]} of its GPUs is not among the host's nodes")
    nodes = [topology.numa_nodes[n] for n in ids]
    cpus = format_ranges([cpu for node in nodes for cpu in parse_ranges(node.cpus) or []]) or None
    where = f"CPUs {cpus}" if cpus else "no CPU pinning (its node has no CPU this service may use)"
    policy, reason = _memory_policy(nodes, host_gib)
    return Pin(tuple(ids), cpus, policy, f"{where}; {reason}")


def _memory_policy(nodes: Sequence[NumaNode], host_gib: float) -> tuple[str, str]:
    if len(nodes) > 1:
        return "none", f"memory left free because the GPUs span NUMA nodes {' and '.join(str(n.id) for n in nodes)}"
    node = nodes[0]
    if not node.bindable:
        return "none", f"memory of node {node.id} cannot be bound on this host"
    if node.memory_total_mib is None:
        return "preferred", f"memory preferred on node {node.id}, whose size is unknown"
    size = node.memory_total_mib / 1024
    if size < host_gib:
        return (
            "preferred",
            f"memory preferred, not bound: node {node.id} has {size:.0f} GiB, the replica wants {host_gib:.0f}",
        )
    return "bind", f"memory bound to node {node.id} ({size:.0f} GiB)"
