"""Where a process may run: this process by its own system calls, and kernel text as proc(5) and numa(7) describe it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from vllm_fleet.target.gpu_topology import parse_ranges
from vllm_fleet.target.process_placement import differences, read_placement

if TYPE_CHECKING:
    from pathlib import Path

PLANNED = {"cpus": "1,3", "memory_policy": "bind", "numa_nodes": [1]}
PLACED = {"cpus": "1,3", "allowed_numa_nodes": "0-1", "memory_policy": "bind", "numa_nodes": [1]}
UNIT = {"Id": "vllm-a-1.service", "Slice": "system.slice", "EffectiveCPUs": "1 3"}


def why(*, asked: dict[str, Any] | None = None, unit: dict[str, str] | None = None, **found: Any) -> list[str]:
    return differences(PLANNED | (asked or {}), PLACED | found, UNIT | (unit or {}), "0-3")


def process(folder: Path, numa_maps: str) -> str:
    (folder / "7").mkdir()
    status = "Name:\tvllm\nCpus_allowed:\ta\nCpus_allowed_list:\t1,3\nMems_allowed_list:\t0-1\n"
    (folder / "7" / "status").write_text(status)
    (folder / "7" / "numa_maps").write_text(numa_maps)
    return str(folder)


def test_reads_the_cpus_that_the_kernel_gives_this_process() -> None:
    assert set(parse_ranges(read_placement(os.getpid())["cpus"]) or []) == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("printed", "policy", "nodes"),
    [
        ("bind:1", "bind", [1]),
        ("bind:0-1", "bind", [0, 1]),
        ("bind=static:1", "bind=static", [1]),
        ("prefer:0", "preferred", [0]),
        ("prefer (many):0-1", "prefer (many)", [0, 1]),
        ("interleave:0,2", "interleave", [0, 2]),
        ("default", "none", []),
        ("local", "none", []),
    ],
)
def test_reads_the_policy_of_the_process_and_not_of_a_mapping(
    tmp_path: Path, printed: str, policy: str, nodes: list[int]
) -> None:
    maps = (
        "7f0000000000 interleave:0-1 file=/dev/shm/x dirty=1 N0=1 kernelpagesize_kB=4\n"
        f"7ffd7f862000 {printed} stack anon=11 dirty=11 active=1 N0=11 kernelpagesize_kB=4\n"
    )
    found = read_placement(7, process(tmp_path, maps))
    assert (found["memory_policy"], found["numa_nodes"]) == (policy, nodes)
    assert (found["cpus"], found["allowed_numa_nodes"]) == ("1,3", "0-1")


def test_what_cannot_be_read_is_null(tmp_path: Path) -> None:
    unknown = {"cpus": None, "allowed_numa_nodes": None, "memory_policy": None, "numa_nodes": []}
    assert read_placement(7, str(tmp_path)) == unknown


def test_a_process_that_is_where_it_was_put_is_no_difference() -> None:
    assert why() == []
    assert why(unit={"EffectiveCPUs": ""}) == []  # no cgroup version 2


def test_what_was_not_asked_for_is_no_difference() -> None:
    assert why(asked={"cpus": None, "memory_policy": "none", "numa_nodes": []}, cpus="0-3", memory_policy="none") == []


@pytest.mark.parametrize(
    ("case", "said", "cause"),
    [
        ({"cpus": "0", "unit": {"EffectiveCPUs": "0"}}, "CPUs 1,3 and may run on 0", "EffectiveCPUs system.slice"),
        ({"cpus": "0-3"}, "CPUs 1,3 and may run on 0-3", "changed it after the start"),
        ({"unit": {"EffectiveCPUs": "0-3"}}, "CPUs 1,3", "systemctl revert vllm-a-1.service"),
        ({"cpus": "0-3", "unit": {"EffectiveCPUs": ""}}, "may run on 0-3", "changed it after the start"),
        ({"cpus": None}, "may run on an unknown set", "changed it after the start"),
        ({"memory_policy": "none", "numa_nodes": []}, "bind on node 1 and is none", "changed it after the start"),
        ({"numa_nodes": [0]}, "bind on node 1 and is bind on node 0", "changed it after the start"),
        ({"numa_nodes": [0], "allowed_numa_nodes": "0"}, "is bind on node 0", "EffectiveMemoryNodes system.slice"),
        ({"memory_policy": None, "numa_nodes": []}, "bind on node 1", "as root"),
    ],
)
def test_a_difference_is_told_with_its_cause(case: dict[str, Any], said: str, cause: str) -> None:
    (sentence,) = why(**case)
    assert said in sentence
    assert cause in sentence


def test_a_cpu_that_went_offline_is_named() -> None:
    (sentence,) = differences(PLANNED, PLACED | {"cpus": "1"}, UNIT | {"EffectiveCPUs": "1"}, "0-2")
    assert "CPU 3 is offline" in sentence


def test_cpus_and_memory_are_both_told() -> None:
    assert len(why(cpus="0", memory_policy="none", numa_nodes=[])) == 2
