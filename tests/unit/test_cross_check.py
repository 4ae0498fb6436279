"""Where the kernel, nvidia-smi and lstopo differ, a problem names both and nothing is chosen in silence."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_fleet.target.cross_check import compare_lstopo, parse_lstopo
from vllm_fleet.target.host_probe import read_capture

_CAPTURES = Path(__file__).parent.parent / "fixtures" / "captures"

# The shape that hwloc 2 prints, CPU and cache objects left out: two packages with a node each (CPUs 0-3 and 4-7), and
# below each a bridge with a GPU. hwloc 1 has the packages below the nodes instead.
HWLOC_2 = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
  <object type="Machine" os_index="0" cpuset="0x000000ff" nodeset="0x00000003">
    <info name="HostName" value="gpu-7"/>
    <object type="Package" os_index="0" cpuset="0x0000000f" nodeset="0x00000001">
      <object type="NUMANode" os_index="0" cpuset="0x0000000f" nodeset="0x00000001" local_memory="25193295872"/>
      <object type="Bridge" bridge_type="0-1" bridge_pci="0000:[00-01]">
        <object type="PCIDev" pci_busid="0000:01:00.0" pci_type="0302 [10de:2bb5]"/>
      </object>
    </object>
    <object type="Package" os_index="1" cpuset="0x000000f0" nodeset="0x00000002">
      <object type="NUMANode" os_index="1" cpuset="0x000000f0" nodeset="0x00000002"/>
      <object type="Bridge" bridge_type="0-1" bridge_pci="0000:[80-81]">
        <object type="PCIDev" pci_busid="0000:81:00.0" pci_type="0302 [10de:2bb5]"/>
      </object>
    </object>
  </object>
</topology>
"""
HWLOC_1 = """<topology>
  <object type="Machine" cpuset="0x000000ff" nodeset="0x00000003">
    <object type="NUMANode" os_index="0" cpuset="0x0000000f" nodeset="0x00000001">
      <object type="Socket" os_index="0" cpuset="0x0000000f" nodeset="0x00000001"/>
      <object type="Bridge" bridge_type="0-1"><object type="PCIDev" pci_busid="0000:01:00.0"/></object>
    </object>
    <object type="NUMANode" os_index="1" cpuset="0x000000f0" nodeset="0x00000002">
      <object type="Bridge" bridge_type="0-1"><object type="PCIDev" pci_busid="0000:81:00.0"/></object>
    </object>
  </object>
</topology>
"""


def node(number: int, cpus: str) -> dict[str, Any]:
    return {"id": number, "cpus": cpus, "memory_total_mib": 1024, "bindable": True}


def gpu(bus_id: str, *nodes: int) -> dict[str, Any]:
    return {"pci_bus_id": bus_id, "numa_nodes": list(nodes)}


GPUS = [gpu("0000:01:00.0", 0), gpu("0000:81:00.0", 1)]
NODES = [node(0, "0-3"), node(1, "4-7")]


def messages(problems: list[dict[str, Any]]) -> str:
    assert all(entry["remedy"] for entry in problems)
    return "\n".join(entry["message"] for entry in problems)


@pytest.mark.parametrize("text", [HWLOC_2, HWLOC_1], ids=["hwloc 2", "hwloc 1"])
def test_lstopo_is_read(text: str) -> None:
    read = parse_lstopo(text)
    assert read is not None
    assert read.node_cpus == {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}}
    assert read.device_nodes == {"0000:01:00.0": {0}, "0000:81:00.0": {1}}


def test_masks_of_more_than_32_cpus() -> None:
    """Words of 32 bits, the highest first; a blank one is zero: CPUs 64-71 and 0-3."""
    read = parse_lstopo(HWLOC_2.replace('"0x0000000f"', '"0x000000ff,,0x0000000f"'))
    assert read is not None
    assert read.node_cpus[0] == {*range(4), *range(64, 72)}


def test_agreement_is_silent() -> None:
    assert compare_lstopo(GPUS, NODES, HWLOC_2) == []
    assert compare_lstopo(GPUS, NODES, None) == []  # not installed


def test_warnings_around_the_document_are_passed_over() -> None:
    """hwloc prints them when it finds the kernel's topology inconsistent."""
    warning = "****\n* hwloc 2.9.0 received invalid information from the operating system.\n****\n"
    assert compare_lstopo(GPUS, NODES, warning + HWLOC_2 + warning) == []


def test_isolated_and_offline_cpus_are_no_disagreement() -> None:
    assert compare_lstopo(GPUS, [node(0, "1-2"), node(1, "4-7")], HWLOC_2) == []


def test_cpus_of_another_node_are() -> None:
    told = messages(compare_lstopo(GPUS, [node(0, "0-4"), node(1, "5-7")], HWLOC_2))
    assert "CPUs of NUMA node 0 (sysfs was taken): sysfs says 0-4, but lstopo says 0-3" in told
    assert "CPUs of NUMA node 1 (sysfs was taken): sysfs says 5-7, but lstopo says 4-7" in told


def test_a_gpu_on_another_node_is() -> None:
    swapped = [gpu("0000:01:00.0", 1), gpu("0000:81:00.0", 1)]
    told = messages(compare_lstopo(swapped, NODES, HWLOC_2))
    assert told == "NUMA node of GPU 0000:01:00.0 (the first was taken): sysfs and nvidia-smi say 1, but lstopo says 0."


def test_a_gpu_below_the_machine_is_one_that_lstopo_cannot_place() -> None:
    below = HWLOC_2.replace(
        "</object>\n</topology>", '<object type="PCIDev" pci_busid="0000:c1:00.0"/></object>\n</topology>'
    )
    assert compare_lstopo([*GPUS, gpu("0000:c1:00.0", 1)], NODES, below) == []


@pytest.mark.parametrize("text", ["", "lstopo: error", "<html/>", HWLOC_2[:500]])
def test_rubbish_is_told(text: str) -> None:
    (entry,) = compare_lstopo(GPUS, NODES, text)
    assert entry["code"] == "lstopo_unreadable"


@given(st.integers(0, len(HWLOC_2)), st.integers(0, 40), st.text(max_size=5))
def test_damage_never_raises(start: int, length: int, junk: str) -> None:
    compare_lstopo(GPUS, NODES, HWLOC_2[:start] + junk + HWLOC_2[start + length :])


# --- sysfs, kernel module and nvidia-smi of a saved host ------------------------------------------------------------


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    return Path(shutil.copytree(_CAPTURES / "rtxpro6000-2x", tmp_path / "host", symlinks=True))


def changed(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def _forget_second_card(host: Path) -> None:
    (host / "sys/bus/pci/devices/0000:11:00.0").unlink()


DIFFERENT: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "width": (
        lambda host: changed(host / "nvidia-smi/q-x.xml", "<current_link_width>16x", "<current_link_width>8x"),
        "gpu_disagreement",
        "link width (the first was taken): sysfs says 16, but nvidia-smi says 8",
    ),
    "PCI device": (
        lambda host: changed(host / "nvidia-smi/q-x.xml", "2BB510DE", "2B8510DE"),
        "gpu_disagreement",
        "PCI device (the first was taken): sysfs says 10de:2bb5, but nvidia-smi says 10de:2b85",
    ),
    "minor number": (
        lambda host: changed(host / "proc/driver/nvidia/gpus/0000:01:00.0/information", "Minor: \t 0", "Minor: \t 5"),
        "gpu_disagreement",
        "minor number (the first was taken): nvidia-smi says 0, but the kernel module says 5",
    ),
    "not on the bus, as under WSL": (
        _forget_second_card,
        "gpu_not_on_pci_bus",
        "GPU 0000:11:00.0: nvidia-smi lists it",
    ),
    "count": (
        lambda host: (host / "nvidia-smi/topo-m.txt").write_text(
            "\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-31\t0\n"
        ),
        "gpu_count_disagreement",
        "nvidia-smi topo -m has 1, but nvidia-smi -q -x has 2",
    ),
    "driver": (
        lambda host: changed(host / "proc/driver/nvidia/version", "595.58.03", "580.159.04"),
        "driver_disagreement",
        "The loaded kernel module is 580.159.04, but nvidia-smi says driver 595.58.03.",
    ),
    "lstopo": (
        lambda host: (host / "lstopo.xml").write_text(HWLOC_2.replace("0x0000000f", "0x00000007")),
        "lstopo_disagreement",
        "CPUs of NUMA node 0 (sysfs was taken): sysfs says 0-31, but lstopo says 0-2",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_difference_is_told_with_both_sides(name: str, capture: Path) -> None:
    edit, code, told = DIFFERENT[name]
    edit(capture)
    found = [entry for entry in read_capture(str(capture))["problems"] if entry["code"] == code]
    assert told in messages(found)
    assert {entry["severity"] for entry in found} == {"warning"}


@pytest.mark.parametrize("name", sorted(path.name for path in _CAPTURES.iterdir()))
def test_saved_hosts_agree_with_themselves(name: str) -> None:
    codes = {entry["code"] for entry in read_capture(str(_CAPTURES / name))["problems"]}
    assert not {code for code in codes if "disagreement" in code or code == "gpu_not_on_pci_bus"}
