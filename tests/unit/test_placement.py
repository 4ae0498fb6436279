"""Which GPUs share a replica on hosts that people published, and where it is pinned.

The expected groups were read off the matrices by eye.
"""

from typing import Any

import pytest
from hosts import RTX_PRO_6000, host, nvlink, published, two_sockets
from hypothesis import given
from hypothesis import strategies as st

from vllm_fleet.placement import farthest_link, form_groups, pin, spans
from vllm_fleet.topology import Topology


def groups(topology: dict[str, Any], size: int, unusable: set[int] | None = None) -> dict[int, tuple[int, ...]]:
    view = Topology.from_dict(topology)
    members = list(range(len(view.gpus)))
    formed = form_groups(view, members, set(members) - (unusable or set()), size)
    return {group.slot: group.members for group in formed}


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("rtxpro6000-8x-server-2nodes-1nic-ansi", 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        # No affinity columns at all: the links alone tell the sockets apart.
        ("rtxpro6000-8x-dual-cpu-phb", 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        # Six GPUs on one node, two on the other: one group inside a node, one across.
        ("pcie-8x-uneven-6-2-phb", 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        # Pairs under one root complex first: 1-2, 3-4 and 6-7; 0 and 5 are what is left on node 0.
        ("pcie-8x-uneven-6-2-phb", 2, [(0, 5), (1, 2), (3, 4), (6, 7)]),
        # NVLink bridges join pairs; the matrix shows SYS even inside a node.
        ("a6000-8x-nv4-single-space", 2, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("a6000-8x-nv4-single-space", 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        # All reach all over NVLink, on two nodes: groups of four keep to a node.
        ("h100-8x-ansi", 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("a100-4x-uneven-3-1", 4, [(0, 1, 2, 3)]),
        # Two PCIe switches on one node.
        ("rtxpro6000-8x-threadripper-1node-switches", 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
    ],
)
def test_groups_keep_to_the_closest_links(name: str, size: int, expected: list[tuple[int, ...]]) -> None:
    assert list(groups(published(name), size).values()) == expected


def test_interleaved_nodes_are_untangled() -> None:
    """Bus order 0, 1, 0, 1: neighbours in the list are on different sockets."""
    links = {"0-1": "SYS", "0-2": "NODE", "0-3": "SYS", "1-2": "SYS", "1-3": "NODE", "2-3": "SYS"}
    assert groups(host([RTX_PRO_6000] * 4, [[0], [1], [0], [1]], links), 2) == {0: (0, 2), 1: (1, 3)}


def test_a_gpu_taken_away_leaves_the_other_group_and_its_number() -> None:
    assert groups(two_sockets(), 4, unusable={2}) == {1: (4, 5, 6, 7)}
    assert groups(two_sockets(), 4, unusable={5}) == {0: (0, 1, 2, 3)}


def test_what_broken_groups_leave_forms_a_new_one_under_a_free_number() -> None:
    """Of (0,1) (2,3) (4,5) (6,7) the first two are broken: 0 and 3 join, as number 0."""
    assert groups(two_sockets(), 2, unusable={1, 2}) == {0: (0, 3), 2: (4, 5), 3: (6, 7)}


@given(
    size=st.sampled_from([1, 2, 3, 4, 8]),
    unusable=st.sets(st.integers(0, 7)),
    topology=st.sampled_from([published("pcie-8x-uneven-6-2-phb"), two_sockets(), nvlink(8, nodes=2)]),
)
def test_no_gpu_twice_and_as_many_groups_as_there_can_be(
    size: int, unusable: set[int], topology: dict[str, Any]
) -> None:
    found = groups(topology, size, unusable)
    used = [member for group in found.values() for member in group]
    assert len(used) == len(set(used))
    assert not set(used) & unusable
    assert all(len(group) == size for group in found.values())
    assert len(found) == (8 - len(unusable)) // size


def test_spanning_is_about_sockets_without_nvlink() -> None:
    pcie, fabric = Topology.from_dict(two_sockets()), Topology.from_dict(nvlink(8, nodes=2))
    assert not spans(pcie, (0, 1, 2, 3))
    assert spans(pcie, (2, 3, 4, 5))
    assert not spans(fabric, tuple(range(8)))


@pytest.mark.parametrize(("members", "link"), [((0,), None), ((1, 2), "PHB"), ((0, 1, 2), "NODE"), ((5, 6), "SYS")])
def test_farthest_link(members: tuple[int, ...], link: str | None) -> None:
    assert farthest_link(Topology.from_dict(published("pcie-8x-uneven-6-2-phb")), members) == link


# Pins. The replica wants 246 GiB of host memory here.


def pinned(topology: dict[str, Any], members: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[Any, ...]:
    place = pin(Topology.from_dict(topology), members, 246)
    return place.numa_nodes, place.cpus, place.memory_policy, place.reason


def test_memory_is_bound_to_a_node_that_holds_the_checkpoint() -> None:
    nodes, cpus, policy, reason = pinned(two_sockets(), (4, 5, 6, 7))
    assert (nodes, cpus, policy) == ((1,), "64-127", "bind")
    assert "1000 GiB" in reason


def test_memory_is_only_preferred_on_a_node_that_is_too_small() -> None:
    nodes, cpus, policy, reason = pinned(two_sockets(node_gib=200))
    assert (nodes, cpus, policy) == ((0,), "0-63", "preferred")
    assert "200 GiB" in reason
    assert "246" in reason


def test_memory_of_unknown_size_is_preferred() -> None:
    assert pinned(two_sockets(node_gib=None))[2] == "preferred"


def test_cpus_are_pinned_where_memory_cannot_be_bound() -> None:
    nodes, cpus, policy, reason = pinned(two_sockets(bindable=False))
    assert (nodes, cpus, policy) == ((0,), "0-63", "none")
    assert "cannot be bound" in reason


def test_a_group_across_nodes_gets_both_nodes_cpus_and_free_memory() -> None:
    assert pinned(two_sockets(), (2, 3, 4, 5))[:3] == ((0, 1), "0-127", "none")


@pytest.mark.parametrize(
    ("name", "told"),
    [("rtxpro6000-8x-dual-cpu-phb", "does not tell"), ("a100-8x-numa-range-0-1", "several (0, 1)")],
)
def test_unknown_or_ambiguous_nodes_are_not_pinned_and_said(name: str, told: str) -> None:
    nodes, cpus, policy, reason = pinned(published(name))
    assert (nodes, cpus, policy) == ((), None, "none")
    assert told in reason


def test_a_node_without_cpus_is_not_pinned() -> None:
    """As on machines whose GPUs sit on memory-only nodes."""
    topology = two_sockets()
    topology["numa_nodes"][0]["cpus"] = ""
    assert pinned(topology)[1] is None
