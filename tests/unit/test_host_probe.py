"""A host read from sysfs, procfs and nvidia-smi: the saved hosts, and hosts built file by file.

Expected values of the saved hosts are those of their recipes in lab/make_host_tree.py, which name the records they
come from; the others are what the test itself wrote.
"""

import importlib.util
import json
import os
import pwd
import shutil
import sys
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_fleet.target.gpu_topology import format_ranges
from vllm_fleet.target.host_probe import SmiOutput, read_capture, read_host, read_kernel_log, smi_runner

_REPOSITORY = Path(__file__).parent.parent.parent
_CAPTURES = _REPOSITORY / "tests" / "fixtures" / "captures"

type Edit = Callable[[Path], object]


def codes(topology: dict[str, Any]) -> list[str]:
    return [entry["code"] for entry in topology["problems"]]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """A copy of the reference host that a test may damage."""
    return Path(shutil.copytree(_CAPTURES / "rtxpro6000-8x-2nodes", tmp_path / "host", symlinks=True))


def gpu_folder(capture: Path, position: int = 0) -> Path:
    return sorted(capture.glob("sys/devices/pci0000:*/*/0000:*:00.0"))[position]


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


# --- the saved hosts ------------------------------------------------------------------------------------------------


def test_the_reference_host() -> None:
    topology = read_capture(str(_CAPTURES / "rtxpro6000-8x-2nodes"))
    gpus = topology["gpus"]
    assert [gpu["pci_bus_id"] for gpu in gpus] == [
        f"0000:{bus}:00.0" for bus in ("01", "11", "61", "71", "81", "91", "e1", "f1")
    ]
    assert [gpu["numa_nodes"] for gpu in gpus] == [[0]] * 4 + [[1]] * 4
    assert [gpu["minor"] for gpu in gpus] == [2, 3, 0, 1, 6, 7, 4, 5]
    assert {(gpu["memory_total_mib"], gpu["memory_reserved_mib"], gpu["compute_capability"]) for gpu in gpus} == {
        (97887, 636, "12.0"),
    }
    assert len({gpu["uuid"] for gpu in gpus}) == 8
    assert topology["links"] == {
        f"{first}-{second}": "NODE" if first // 4 == second // 4 else "SYS"
        for first, second in combinations(range(8), 2)
    }
    # lscpu of that class of host: CPU 239 is offline; nvidia-smi, which cuts lists, ends node 1 at 238.
    assert [(node["id"], node["cpus"], node["bindable"]) for node in topology["numa_nodes"]] == [
        (0, "0-63,128-191", True),
        (1, "64-127,192-238,240-255", True),
    ]
    assert topology["driver"] == {
        "state": "ok",
        "version": "595.58.03",
        "module_version": "595.58.03",
        "module_licence": "Dual MIT/GPL",
        "cuda_version": "13.2",
        "message": None,
    }
    assert topology["pcie"] == {"iommu": "passthrough", "acs_redirect": []}
    assert topology["checks"]["p2p"] == {"verdict": "untested", "detail": None}
    assert topology["problems"] == []


def test_the_result_is_plain_json() -> None:
    topology = read_capture(str(_CAPTURES / "rtxpro6000-8x-2nodes"))
    assert json.loads(json.dumps(topology)) == topology


def test_an_nvlink_host() -> None:
    topology = read_capture(str(_CAPTURES / "h100-8x-80gb"))
    assert set(topology["links"].values()) == {"NV18"}
    assert topology["nvswitch"] is True
    assert len(topology["gpus"]) == 8  # the NVSwitches on the bus are not GPUs


def test_a_host_without_driver_still_has_its_gpus() -> None:
    topology = read_capture(str(_CAPTURES / "no-driver"))
    assert topology["driver"]["state"] == "missing"
    assert [(gpu["pci_device"], gpu["uuid"], gpu["memory_total_mib"]) for gpu in topology["gpus"]] == [
        ("10de:2bb5", None, None),
    ] * 8
    assert [gpu["numa_nodes"] for gpu in topology["gpus"]] == [[0]] * 4 + [[1]] * 4
    assert topology["links"]["0-1"] == "NODE"
    assert topology["links"]["0-4"] == "SYS"
    assert codes(topology) == ["driver_missing", "links_from_pci_tree"]


def test_a_host_without_gpu_says_where_it_looked() -> None:
    topology = read_capture(str(_CAPTURES / "no-gpu"))
    assert topology["gpus"] == []
    assert codes(topology) == ["no_gpu", "driver_missing"]
    assert "bus/pci/devices" in topology["problems"][0]["message"]


def test_the_lab_host_has_this_machines_cpus_and_memory_nodes(tmp_path: Path) -> None:
    host = tmp_path / "gpu_host"
    shutil.copytree(_REPOSITORY / "lab" / "gpu_host", host, symlinks=True)
    (host / "proc" / "self").symlink_to("/proc/self")  # as lab/up.yml does
    topology = read_capture(str(host))
    assert [gpu["numa_nodes"] for gpu in topology["gpus"]] == [[0], [1]]
    assert topology["links"] == {"0-1": "SYS"}
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    assert f"Cpus_allowed_list:\t{topology['cpus']['allowed']}\n" in status


def test_the_saved_hosts_are_what_the_recipes_make(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_host_tree", _REPOSITORY / "lab" / "make_host_tree.py")
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def files(folder: Path) -> dict[str, bytes | str]:
        return {
            str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
            for path in folder.rglob("*")
            if path.is_symlink() or path.is_file()
        }

    for host in module.HOSTS.values():
        again = tmp_path / host.folder.name  # the UUIDs depend on the folder's name, so it stays
        module.write_host(module.replace(host, folder=again))
        assert files(again) == files(host.folder), f"run lab/make_host_tree.py {host.folder.name}"


# --- one thing wrong ------------------------------------------------------------------------------------------------


def _set_acs(capture: Path) -> None:
    config = min(capture.glob("sys/devices/pci0000:*/*/config"))
    space = bytearray(config.read_bytes())
    space[0x106] = 0b0001_1101  # source validation, request redirect, completion redirect, upstream forwarding
    config.write_bytes(space)


WRONG: dict[str, tuple[Edit, str]] = {
    "fell off the bus, multi-line": (
        lambda host: write(
            host / "kernel.log",
            "NVRM: The NVIDIA GPU 0000:b3:00.0\nNVRM: (PCI ID: 10de:26b5) installed in this system has\n"
            "NVRM: fallen off the bus and is not responding to commands.\n",
        ),
        "gpu_unreachable",
    ),
    "Xid": (
        lambda host: write(host / "kernel.log", "NVRM: Xid (PCI:0000:81:00): 79, pid=1, GPU has fallen off the bus.\n"),
        "xid",
    ),
    "no kernel log": (lambda host: (host / "kernel.log").unlink(), "kernel_log_unreadable"),
    "ACS redirects": (_set_acs, "acs_redirect"),
    "config space cut, as without root": (
        lambda host: next(host.glob("sys/devices/pci0000:*/*/config")).write_bytes(bytes(64)),
        "acs_unreadable",
    ),
    "IOMMU translates": (lambda host: write(gpu_folder(host) / "iommu_group" / "type", "DMA-FQ\n"), "iommu_translated"),
    "narrow link": (lambda host: write(gpu_folder(host) / "current_link_width", "8\n"), "pcie_width_below_max"),
    "slow slot": (
        lambda host: write(gpu_folder(host).parent / "max_link_speed", "16.0 GT/s PCIe\n"),
        "pcie_slot_slower",
    ),
    "slow link at work": (
        lambda host: replace_in(host / "nvidia-smi/q-x.xml", "<performance_state>P8", "<performance_state>P0"),
        "pcie_speed_below_max",
    ),
    "small BAR1": (
        lambda host: replace_in(host / "nvidia-smi/q-x.xml", "<total>131072 MiB", "<total>256 MiB"),
        "bar1_small",
    ),
    "MIG": (
        lambda host: replace_in(host / "nvidia-smi/q-x.xml", "<current_mig>Disabled", "<current_mig>Enabled"),
        "mig_enabled",
    ),
    "vGPU": (
        lambda host: replace_in(host / "nvidia-smi/q-x.xml", "<virtualization_mode>None", "<virtualization_mode>VGPU"),
        "vgpu",
    ),
    "ECC": (
        lambda host: replace_in(host / "nvidia-smi/q-x.xml", "<dram_uncorrectable>0", "<dram_uncorrectable>2"),
        "ecc_uncorrected",
    ),
    "proprietary module": (
        lambda host: write(
            host / "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  595.58.03  Tue Dec  1 00:00:00 UTC 2026\n",
        ),
        "proprietary_module",
    ),
    "mixed": (lambda host: write(gpu_folder(host) / "device", "0x2b85\n"), "mixed_gpus"),
    "numa_node says -1 and so does nvidia-smi": (
        lambda host: (
            write(gpu_folder(host) / "numa_node", "-1\n"),
            replace_in(host / "nvidia-smi/topo-m.txt", "0-63,128-191\t0\t\tN/A", "0-63,128-191\t\tN/A\t\tN/A"),
        ),
        "numa_unknown",
    ),
    "sysfs against nvidia-smi": (lambda host: write(gpu_folder(host) / "numa_node", "1\n"), "numa_disagreement"),
    "not in the driver's list": (
        lambda host: write(
            host / "nvidia-smi/q-x.xml",
            (_CAPTURES / "rtxpro6000-2x/nvidia-smi/q-x.xml").read_text(encoding="utf-8"),
        ),
        "gpu_not_seen_by_driver",
    ),
    "report cut": (
        lambda host: write(
            host / "nvidia-smi/q-x.xml",
            (host / "nvidia-smi/q-x.xml").read_text(encoding="utf-8")[:9000],
        ),
        "output_incomplete",
    ),
    "no matrix": (lambda host: (host / "nvidia-smi/topo-m.txt").unlink(), "links_from_pci_tree"),
    "exit code": (lambda host: write(host / "nvidia-smi/q-x.rc", "15\n"), "nvidia_smi_exit_code"),
    "no status": (lambda host: (host / "proc/self/status").unlink(), "allowed_cpus_unknown"),
    "no nodes": (lambda host: shutil.rmtree(host / "sys/devices/system/node"), "numa_nodes_unknown"),
    "checks damaged": (lambda host: write(host / "checks.json", "{"), "checks_unreadable"),
    "asymmetric matrix": (
        lambda host: replace_in(host / "nvidia-smi/topo-m.txt", "GPU1\tNODE", "GPU1\tSYS"),
        "link_disagreement",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_once_with_a_remedy(name: str, capture: Path) -> None:
    edit, code = WRONG[name]
    edit(capture)
    topology = read_capture(str(capture))
    found = [entry for entry in topology["problems"] if entry["code"] == code]
    assert found, codes(topology)
    assert all(entry["message"] and entry["remedy"] for entry in found)
    assert len({entry["message"] for entry in found}) == len(found)
    assert {gpu["pci_bus_id"] for gpu in topology["gpus"]} >= {"0000:01:00.0", "0000:f1:00.0"}


def test_an_idle_link_is_no_problem() -> None:
    topology = read_capture(str(_CAPTURES / "rtxpro6000-8x-2nodes"))
    assert topology["gpus"][0]["pcie"]["generation"] == 1
    assert topology["problems"] == []


def test_the_node_is_never_zero_by_default(capture: Path) -> None:
    for position in range(8):
        write(gpu_folder(capture, position) / "numa_node", "-1\n")
    (capture / "nvidia-smi" / "topo-m.txt").unlink()
    assert [gpu["numa_nodes"] for gpu in read_capture(str(capture))["gpus"]] == [[]] * 8


def test_several_printed_nodes_are_kept_as_ambiguous(capture: Path) -> None:
    write(gpu_folder(capture) / "numa_node", "-1\n")
    replace_in(capture / "nvidia-smi/topo-m.txt", "0-63,128-191\t0\t\tN/A", "0-255\t0-1\t\tN/A")
    topology = read_capture(str(capture))
    assert topology["gpus"][0]["numa_nodes"] == [0, 1]
    assert "numa_ambiguous" in codes(topology)


def test_a_memory_only_node_is_no_place_for_a_gpu(capture: Path) -> None:
    write(capture / "sys/devices/system/node/node2/cpulist", "\n")
    write(gpu_folder(capture) / "numa_node", "2\n")
    topology = read_capture(str(capture))
    assert [node["id"] for node in topology["numa_nodes"]] == [0, 1]
    assert topology["gpus"][0]["numa_nodes"] == [0]  # from nvidia-smi


def test_cpus_are_online_allowed_and_not_isolated(capture: Path) -> None:
    write(capture / "sys/devices/system/cpu/isolated", "2-3\n")
    write(capture / "sys/devices/system/cpu/nohz_full", "(null)\n")
    write(capture / "proc/self/status", "Cpus_allowed_list:\t0-9,64-69\nMems_allowed_list:\t0\n")
    topology = read_capture(str(capture))
    assert [(node["cpus"], node["bindable"]) for node in topology["numa_nodes"]] == [
        ("0-1,4-9", True),
        ("64-69", False),
    ]
    assert topology["cpus"] == {"online": "0-238,240-255", "isolated": "2-3", "allowed": "0-9,64-69"}


def test_links_follow_bus_order_when_nvidia_smi_counts_differently(capture: Path) -> None:
    """Swap the first and the last GPU in both outputs of nvidia-smi: 0-7 and 0-1 must swap with them."""
    report = capture / "nvidia-smi" / "q-x.xml"
    head, *records = report.read_text(encoding="utf-8").split("\t<gpu ")
    records[-1], tail = records[-1].split("</nvidia_smi_log>")
    records[0], records[7] = records[7], records[0]
    write(report, head + "".join("\t<gpu " + record for record in records) + "</nvidia_smi_log>" + tail)
    topology = read_capture(str(capture))
    assert [gpu["index"] for gpu in topology["gpus"]] == [7, 1, 2, 3, 4, 5, 6, 0]
    # nvidia-smi's GPU 0 now is the last on the bus, and its row says NODE to 1, 2, 3.
    assert topology["links"]["1-7"] == "NODE"
    assert topology["links"]["0-1"] == "SYS"
    assert "numa_disagreement" in codes(topology)  # sysfs still knows better


def test_a_pci_domain_of_its_own_joins(capture: Path) -> None:
    folder = gpu_folder(capture)
    folder.rename(folder.parent / "000f:01:00.0")
    devices = capture / "sys/bus/pci/devices"
    (devices / "0000:01:00.0").unlink()
    (devices / "000f:01:00.0").symlink_to("../../../devices/pci0000:00/0000:00:01.1/000f:01:00.0")
    text = (capture / "nvidia-smi/q-x.xml").read_text(encoding="utf-8")
    write(capture / "nvidia-smi/q-x.xml", text.replace("00000000:01:00.0", "0000000F:01:00.0"))
    gpus = read_capture(str(capture))["gpus"]
    assert len(gpus) == 8
    assert (gpus[-1]["pci_bus_id"], gpus[-1]["index"], gpus[-1]["numa_nodes"]) == ("000f:01:00.0", 0, [0])


def test_unified_memory_is_the_hosts(capture: Path) -> None:
    replace_in(capture / "nvidia-smi/q-x.xml", "<total>97887 MiB", "<total>N/A")
    write(capture / "proc/meminfo", "MemTotal:       125829120 kB\n")
    gpu = read_capture(str(capture))["gpus"][0]
    assert gpu["unified_memory"] is True
    assert gpu["memory_total_mib"] == 122880


def test_holders_have_user_and_unit(capture: Path) -> None:
    process = "<process_info><pid>411</pid><type>C</type><used_memory>300 MiB</used_memory></process_info>"
    gone = process.replace("411", "412")
    replace_in(capture / "nvidia-smi/q-x.xml", "<processes>", f"<processes>{process}{gone}")
    write(capture / "proc/411/status", f"Name:\tvllm\nUid:\t{os.getuid()}\t0\t0\t0\n")
    write(capture / "proc/411/cgroup", "0::/system.slice/vllm-minimax-m2-5-0.service\n")

    assert read_capture(str(capture))["gpus"][0]["holders"] == [
        {
            "pid": 411,
            "user": pwd.getpwuid(os.getuid()).pw_name,
            "unit": "vllm-minimax-m2-5-0.service",
            "memory_mib": 300,
        },
        {"pid": 412, "user": None, "unit": None, "memory_mib": 300},
    ]


def test_saved_checks_are_passed_on(capture: Path) -> None:
    verdict = {"verdict": "broken", "detail": "GPU 0 to 4 returned other bytes"}
    write(capture / "checks.json", json.dumps({"p2p": verdict, "disk_read_mib_s": 2900}))
    checks = read_capture(str(capture))["checks"]
    assert checks["p2p"] == verdict
    assert checks["disk_read_mib_s"] == 2900
    assert checks["kernel_build"]["verdict"] == "untested"


def test_switches_above_a_gpu_make_pix_and_pxb(capture: Path) -> None:
    """Two GPUs below one switch, a third below a second switch of the same root port; nvidia-smi says nothing."""
    shutil.rmtree(capture / "nvidia-smi")
    devices = capture / "sys/bus/pci/devices"
    for link in devices.iterdir():
        link.unlink()
    below = {
        "0000:04:00.0": "0000:02:00.0/0000:03:00.0",
        "0000:05:00.0": "0000:02:00.0/0000:03:01.0",
        "0000:08:00.0": "0000:02:00.0/0000:03:02.0/0000:06:00.0/0000:07:00.0",
    }
    for bus_id, bridges in below.items():
        path = f"devices/pci0000:00/0000:00:01.0/{bridges}/{bus_id}"
        for name, value in {"vendor": "0x10de", "device": "0x2bb5", "class": "0x030200", "numa_node": "0"}.items():
            write(capture / "sys" / path / name, f"{value}\n")
        (devices / bus_id).symlink_to(f"../../../{path}")
    topology = read_capture(str(capture))
    assert topology["links"] == {"0-1": "PIX", "0-2": "PXB", "1-2": "PXB"}
    assert topology["gpus"][0]["pcie"]["switches"] == ["0000:02:00.0"]
    assert topology["gpus"][2]["pcie"]["switches"] == ["0000:02:00.0", "0000:06:00.0"]


# --- the driver's state ---------------------------------------------------------------------------------------------


_NO_CONTACT = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
_MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.144"


@pytest.mark.parametrize(
    ("output", "state", "code"),
    [
        (SmiOutput("", None, "missing"), "missing", "driver_missing"),
        (SmiOutput("", None, "timeout"), "unreachable", "nvidia_smi_timeout"),
        (SmiOutput(_NO_CONTACT, 9), "unreachable", "driver_unreachable"),
        (SmiOutput(_MISMATCH, 18), "mismatch", "driver_mismatch"),
        (SmiOutput("Failed to initialize NVML: Unknown Error", 255), "unreachable", "driver_unreachable"),
        (SmiOutput("Failed to initialize NVML: No supported GPUs were found", 255), "ok", "no_devices"),
        (SmiOutput("Failed to initialize NVML: Unknown Error", 0), "unreachable", "driver_unreachable"),
        (SmiOutput("rubbish \x00 \ufffd", 0), "unreachable", "unrecognised_output"),
        (SmiOutput("", 0), "unreachable", "empty_output"),
    ],
)
def test_a_driver_that_does_not_answer(output: SmiOutput, state: str, code: str) -> None:
    host = _CAPTURES / "rtxpro6000-8x-2nodes"
    calls: list[Sequence[str]] = []

    def run_smi(arguments: Sequence[str]) -> SmiOutput:
        calls.append(arguments)
        return output

    topology = read_host(f"{host}/sys", f"{host}/proc", run_smi, "", {}, deadline="60 s")
    assert topology["driver"]["state"] == state
    assert code in codes(topology)
    assert len(topology["gpus"]) == 8  # sysfs has them all the same
    assert calls == [["-q", "-x"]]  # a dead driver is asked once
    # The kernel module answers for itself: name, UUID and minor number are still known.
    assert topology["gpus"][0]["minor"] == 2


def test_the_library_version_of_a_mismatch() -> None:
    host = _CAPTURES / "rtxpro6000-8x-2nodes"
    driver = read_host(f"{host}/sys", f"{host}/proc", lambda _: SmiOutput(_MISMATCH, 18), "")["driver"]
    assert (driver["version"], driver["module_version"]) == ("550.144", "595.58.03")


def test_two_calls_are_enough() -> None:
    host = _CAPTURES / "rtxpro6000-8x-2nodes"
    calls: list[list[str]] = []

    def run_smi(arguments: Sequence[str]) -> SmiOutput:
        calls.append(list(arguments))
        name = "q-x.xml" if arguments[0] == "-q" else "topo-m.txt"
        return SmiOutput((host / "nvidia-smi" / name).read_text(encoding="utf-8"), 0)

    read_host(f"{host}/sys", f"{host}/proc", run_smi, "")
    assert calls == [["-q", "-x"], ["topo", "-m"]]


def test_a_hung_nvidia_smi_is_left_behind(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    write(program, "#!/bin/sh\nsleep 60\n")
    program.chmod(0o755)
    assert smi_runner(str(program), 0.2)(["-q"]) == SmiOutput("", None, "timeout")
    assert smi_runner(str(tmp_path / "absent"), 1)(["-q"]).failure == "missing"


def test_the_kernel_log_of_a_file(tmp_path: Path) -> None:
    assert read_kernel_log(str(tmp_path / "absent"), 1) is None
    write(tmp_path / "log", "NVRM: hello\n")
    assert read_kernel_log(str(tmp_path / "log"), 1) == "NVRM: hello\n"


# --- damage ---------------------------------------------------------------------------------------------------------


def test_nothing_there_is_told_not_raised(tmp_path: Path) -> None:
    topology = read_capture(str(tmp_path / "absent"))
    assert "no_capture" in codes(topology)
    assert topology["gpus"] == []


def test_any_missing_file_is_survived(tmp_path: Path) -> None:
    capture = Path(shutil.copytree(_CAPTURES / "rtxpro6000-2x", tmp_path / "host", symlinks=True))
    for path in [path for path in capture.rglob("*") if path.is_symlink() or path.is_file()]:
        path.unlink()
        read_capture(str(capture))
    assert "no_gpu" in codes(read_capture(str(capture)))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_files_never_raise_nor_invent_a_node(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damage") / "host"
    shutil.copytree(_CAPTURES / "rtxpro6000-2x", folder, symlinks=True)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=4, unique=True)):
        content = path.read_bytes()
        start = data.draw(st.integers(0, len(content)))
        path.write_bytes(
            content[:start] + data.draw(st.binary(max_size=6)) + content[start + data.draw(st.integers(0, 50)) :]
        )
    topology = read_capture(str(folder))
    existing = {node["id"] for node in topology["numa_nodes"]}
    for gpu in topology["gpus"]:
        assert set(gpu["numa_nodes"]) <= (existing or {0})
    shutil.rmtree(folder)


# --- a generated host -----------------------------------------------------------------------------------------------


@st.composite
def generated_hosts(draw: st.DrawFn) -> dict[str, Any]:
    """Nodes with gaps in their numbers, CPU lists with holes, GPUs anywhere, some CPUs offline, isolated, forbidden."""
    nodes = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=5)))
    cpus = draw(st.lists(st.integers(0, 200), min_size=len(nodes) + 1, max_size=60, unique=True))
    some_cpus = st.sets(st.sampled_from(cpus[1:]), max_size=5)  # the first stays usable: no kernel runs without
    of_node = {node: set(cpus[position :: len(nodes)]) for position, node in enumerate(nodes)}
    buses = sorted(draw(st.sets(st.integers(1, 250), min_size=1, max_size=9)))
    gpus = [{"bus": bus, "node": draw(st.sampled_from([*nodes, -1]))} for bus in buses]
    return {
        "nodes": of_node,
        "memory_only": draw(st.sets(st.integers(41, 60), max_size=4)),
        "offline": draw(some_cpus),
        "isolated": draw(some_cpus),
        "forbidden": draw(some_cpus),
        "gpus": gpus,
        "order": draw(st.permutations(range(len(gpus)))),  # in which nvidia-smi counts them
        "links": {
            pair: draw(st.sampled_from(["PIX", "PXB", "NODE", "SYS", "NV18"]))
            for pair in combinations(range(len(gpus)), 2)
        },
    }


def render(host: dict[str, Any], folder: Path) -> None:
    cpus = set().union(*host["nodes"].values())
    for node, own in host["nodes"].items():
        write(folder / f"sys/devices/system/node/node{node}/cpulist", format_ranges(own) + "\n")
        write(folder / f"sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal:  1048576 kB\n")
    for node in host["memory_only"]:
        write(folder / f"sys/devices/system/node/node{node}/cpulist", "\n")
    write(folder / "sys/devices/system/cpu/online", format_ranges(cpus - host["offline"]) + "\n")
    write(folder / "sys/devices/system/cpu/isolated", format_ranges(host["isolated"]) + "\n")
    allowed = format_ranges(cpus - host["forbidden"])
    write(folder / "proc/self/status", f"Cpus_allowed_list:\t{allowed}\nMems_allowed_list:\t{min(host['nodes'])}\n")
    (folder / "sys/bus/pci/devices").mkdir(parents=True)
    for gpu in host["gpus"]:
        path = f"devices/pci0000:00/0000:00:01.0/0000:{gpu['bus']:02x}:00.0"
        for name, value in {
            "vendor": "0x10de",
            "device": "0x2330",
            "class": "0x030200",
            "numa_node": gpu["node"],
        }.items():
            write(folder / "sys" / path / name, f"{value}\n")
        (folder / "sys/bus/pci/devices" / Path(path).name).symlink_to(f"../../../{path}")
    counted = [host["gpus"][place] for place in host["order"]]
    records = "".join(
        f'<gpu id="00000000:{gpu["bus"]:02X}:00.0"><product_name>X</product_name><uuid>GPU-{gpu["bus"]}</uuid></gpu>'
        for gpu in counted
    )
    write(
        folder / "nvidia-smi/q-x.xml",
        f"<nvidia_smi_log><attached_gpus>{len(counted)}</attached_gpus>{records}</nvidia_smi_log>",
    )
    lines = [
        "\t" + "\t".join(f"GPU{index}" for index in range(len(counted))) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"
    ]
    for index, place in enumerate(host["order"]):
        row = [" X " if place == peer else host["links"][min(place, peer), max(place, peer)] for peer in host["order"]]
        node = host["gpus"][place]["node"]
        lines.append("\t".join([f"GPU{index}", *row, "0-1", "\tN/A" if node < 0 else str(node), "\tN/A"]))
    write(folder / "nvidia-smi/topo-m.txt", "\n".join(lines) + "\n")
    write(folder / "kernel.log", "")


@given(generated_hosts())
@settings(max_examples=60, deadline=None)
def test_a_generated_host_reads_back(tmp_path_factory: pytest.TempPathFactory, host: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("generated") / "host"
    render(host, folder)
    topology = read_capture(str(folder))
    shutil.rmtree(folder)
    assert [(gpu["pci_bus_id"], gpu["uuid"], gpu["numa_nodes"]) for gpu in topology["gpus"]] == [
        (f"0000:{gpu['bus']:02x}:00.0", f"GPU-{gpu['bus']}", [gpu["node"]] if gpu["node"] >= 0 else [])
        for gpu in host["gpus"]
    ]
    assert [gpu["index"] for gpu in topology["gpus"]] == [
        host["order"].index(place) for place in range(len(host["gpus"]))
    ]
    assert topology["links"] == {f"{first}-{second}": link for (first, second), link in host["links"].items()}
    unusable = host["offline"] | host["isolated"] | host["forbidden"]
    assert {node["id"]: node["cpus"] for node in topology["numa_nodes"]} == {
        node: format_ranges(own - unusable) for node, own in host["nodes"].items()
    }
    assert [node["id"] for node in topology["numa_nodes"] if node["bindable"]] == [min(host["nodes"])]
