"""Where the kernel lets a process run and take memory, and why that is not what was asked.

A unit file is a wish: a narrower slice, a cpuset, a CPU that went offline or the program itself can change what becomes
of it, and nothing fails. So what counts is read back from the process.

Standard library, Python 3.9.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Optional

from .gpu_topology import format_ranges, parse_ranges

_CHANGED_LATER = (
    "the program, or a tool that places processes, changed it after the start. Take such flags (--numa-bind) from the "
    "card's arguments, and such tools from the host."
)

# How /proc/PID/numa_maps calls what NUMAPolicy= sets (the kernel's mm/mempolicy.c, policy_modes).
_POLICY_NAMES = {"prefer": "preferred", "bind": "bind", "default": "none", "local": "none"}


def read_placement(pid: int, procfs_root: str = "/proc") -> dict[str, Any]:
    """CPUs, memory nodes and memory policy of a process.

    Returns:
        `cpus` and `allowed_numa_nodes` as lists of ranges; `memory_policy` and the `numa_nodes` that it names. What
        cannot be read (without root, or from a kernel without NUMA) is null.
    """
    folder = Path(procfs_root) / str(pid)
    status = _read(folder / "status")
    # The stack is always there and always under the policy of the process, which other mappings may not be.
    stack = re.search(r"^[0-9a-f]+ (.+?)(?::([\d,-]+))? stack\b", _read(folder / "numa_maps"), re.MULTILINE)
    return {
        "cpus": _field(status, "Cpus_allowed_list"),
        "allowed_numa_nodes": _field(status, "Mems_allowed_list"),
        "memory_policy": _POLICY_NAMES.get(stack[1], stack[1]) if stack else None,
        "numa_nodes": parse_ranges(stack[2] or "") or [] if stack else [],
    }


def differences(
    asked: dict[str, Any], found: dict[str, Any], unit: dict[str, str], online_cpus: Optional[str]
) -> list[str]:
    """One sentence with cause and remedy for each thing that is not as asked.

    Args:
        asked: `cpus` (ranges, or null for any), `memory_policy` and `numa_nodes`, as in a plan.
        found: What `read_placement` gave.
        unit: `Id`, `Slice` and `EffectiveCPUs` as systemd shows them; the last is empty without cgroup version 2.
        online_cpus: The CPUs that are online, as ranges.
    """
    return _cpu_differences(asked, found, unit, online_cpus) + _memory_differences(asked, found, unit)


def _cpu_differences(
    asked: dict[str, Any], found: dict[str, Any], unit: dict[str, str], online_cpus: Optional[str]
) -> list[str]:
    wanted, got, effective = (_set(ranges) for ranges in (asked["cpus"], found["cpus"], unit.get("EffectiveCPUs")))
    if not wanted or (got == wanted and effective in (set(), wanted)):
        return []
    said = "It was to run on CPUs {0} and may run on {1}".format(asked["cpus"], found["cpus"] or "an unknown set")
    offline = wanted - _set(online_cpus) if online_cpus else set()
    if offline:
        cause = (
            "CPU {0} is offline, and was online when the host was probed. Deploy again to plan without it, or bring it "
            "back (echo 1 > /sys/devices/system/cpu/cpuN/online)."
        ).format(format_ranges(offline))
    elif wanted - effective and effective:
        cause = (
            "its control group gets {0}, because a slice above it allows no more. See `systemctl show "
            "--property=AllowedCPUs,EffectiveCPUs {1}`, and set that slice's AllowedCPUs= to a list with them: "
            "emptied, the old one stays in force."
        ).format(format_ranges(effective), unit.get("Slice") or "system.slice")
    elif effective - wanted:
        cause = (
            "its control group gets {0}, because a drop-in sets AllowedCPUs= anew. See `systemctl cat {1}`, and remove "
            "the drop-in (systemctl revert {1})."
        ).format(format_ranges(effective), unit["Id"])
    else:
        cause = _CHANGED_LATER
    return ["{0}: {1}".format(said, cause)]


def _memory_differences(asked: dict[str, Any], found: dict[str, Any], unit: dict[str, str]) -> list[str]:
    policy, nodes = asked["memory_policy"], asked["numa_nodes"]
    if policy == "none" or (found["memory_policy"], found["numa_nodes"]) == (policy, nodes):
        return []
    wish = "{0} on node {1}".format(policy, format_ranges(nodes))
    if found["memory_policy"] is None:
        return ["Its memory was to be {0}, and its numa_maps in /proc cannot be read: do so as root.".format(wish)]
    said = "Its memory was to be {0} and is {1}".format(wish, found["memory_policy"])
    if found["numa_nodes"]:
        said += " on node {0}".format(format_ranges(found["numa_nodes"]))
    closed = set(nodes) - _set(found["allowed_numa_nodes"])
    if closed:
        cause = (
            "its control group may not use node {0}, because a slice above it allows no more. See `systemctl show "
            "--property=AllowedMemoryNodes,EffectiveMemoryNodes {1}`."
        ).format(format_ranges(closed), unit.get("Slice") or "system.slice")
    else:
        cause = _CHANGED_LATER
    return ["{0}: {1}".format(said, cause)]


def _set(ranges: Optional[str]) -> set[int]:
    """CPUs or nodes of a list; systemd puts blanks where the kernel puts commas."""
    return set(parse_ranges(",".join((ranges or "").split())) or [])


def _field(status: str, name: str) -> Optional[str]:
    match = re.search(r"^{0}:\s*(\S+)$".format(name), status, re.MULTILINE)
    return match[1] if match else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # the process ended, or is not ours to see
        return ""
