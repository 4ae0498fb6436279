"""Saving a host and reading it back: the same topology, and nothing that names a machine or a person."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_host_probe import generated_hosts, render

from vllm_fleet.target.host_capture import save_host
from vllm_fleet.target.host_probe import SmiOutput, read_capture, read_kernel_log, read_lstopo, smi_runner

_REPOSITORY = Path(__file__).parent.parent.parent
_CAPTURES = _REPOSITORY / "tests" / "fixtures" / "captures"
_REFERENCE = _CAPTURES / "rtxpro6000-8x-2nodes"


def smi_of(folder: Path, exit_code: int = 0) -> Any:
    def run(arguments: Sequence[str]) -> SmiOutput:
        path = folder / "nvidia-smi" / {"-q": "q-x.xml", "topo": "topo-m.txt"}[arguments[0]]
        if not path.exists():
            return SmiOutput("", None, "missing")
        return SmiOutput(path.read_text(encoding="utf-8"), exit_code)

    return run


def save(folder: Path, archive: Path, run_smi: Any = None, **options: Any) -> dict[str, Any]:
    return save_host(
        str(archive),
        f"{folder}/sys",
        f"{folder}/proc",
        run_smi or smi_of(folder),
        kernel_log=options.pop("kernel_log", read_kernel_log(f"{folder}/kernel.log", 0)),
        checks_file=f"{folder}/checks.json",
        **options,
    )


def unpacked(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="tar")
    return folder


def without_paths(topology: dict[str, Any], *paths: Path) -> dict[str, Any]:
    text = json.dumps(topology)
    for path in paths:
        text = text.replace(str(path), "HOST")
    return dict(json.loads(text))


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A copy of the reference host that a test may change."""
    return Path(shutil.copytree(_REFERENCE, tmp_path / "host", symlinks=True))


@pytest.mark.parametrize("name", sorted(path.name for path in _CAPTURES.iterdir()))
def test_what_was_saved_reads_as_the_host_did(name: str, tmp_path: Path) -> None:
    archive, original = tmp_path / "capture.tar.gz", _CAPTURES / name
    save(original, archive)
    folder = unpacked(archive, tmp_path / "capture")
    truth = without_paths(read_capture(str(original)), original)
    assert without_paths(read_capture(str(archive)), archive) == truth
    assert without_paths(read_capture(str(folder)), folder) == truth
    assert archive.stat().st_size < 10_000


def test_a_sick_host_reads_back_sick(host: Path, tmp_path: Path) -> None:
    gpu = min(host.glob("sys/devices/pci0000:*/*/0000:*:00.0"))
    (gpu / "current_link_width").write_text("8\n", encoding="utf-8")
    (gpu / "resource").write_text("0x00 0x00 0x0\n0xe0000000 0xefffffff 0x14220c\n", encoding="utf-8")
    (host / "proc/self/status").unlink()
    (host / "kernel.log").write_text("NVRM: Xid (PCI:0000:81:00): 79, GPU has fallen off the bus.\n", encoding="utf-8")
    (host / "checks.json").write_text('{"p2p": {"verdict": "broken", "detail": "0 to 4"}}', encoding="utf-8")
    archive = tmp_path / "capture.tar.gz"
    live = save(host, archive, smi_of(host, exit_code=14))
    codes = {entry["code"] for entry in live["problems"]}
    assert codes >= {"pcie_width_below_max", "xid", "allowed_cpus_unknown", "nvidia_smi_exit_code"}
    assert without_paths(read_capture(str(archive)), archive) == without_paths(live, host)


def test_a_hung_nvidia_smi_is_saved_as_that(host: Path, tmp_path: Path) -> None:
    def hangs(arguments: Sequence[str]) -> SmiOutput:
        return SmiOutput("", None, "timeout") if arguments[0] == "topo" else smi_of(host)(arguments)

    archive = tmp_path / "capture.tar.gz"
    save(host, archive, hangs)
    (entry,) = [entry for entry in read_capture(str(archive))["problems"] if entry["code"] == "nvidia_smi_timeout"]
    assert "nvidia-smi topo -m did not answer" in entry["message"]


def test_links_and_files_as_a_live_kernel_has_them(tmp_path: Path) -> None:
    """/proc/self is a link to a process, a device's iommu_group one to another folder: both are kept as links."""
    host = Path(shutil.copytree(_CAPTURES / "rtxpro6000-2x", tmp_path / "host", symlinks=True))
    (host / "proc/self").rename(host / "proc/4242")
    (host / "proc/self").symlink_to("4242")
    for position, gpu in enumerate(sorted(host.glob("sys/devices/pci0000:*/*/0000:*:00.0"))):
        group = host / "sys/kernel/iommu_groups" / str(position)
        group.parent.mkdir(parents=True, exist_ok=True)
        (gpu / "iommu_group").rename(group)
        (gpu / "iommu_group").symlink_to(f"../../../../kernel/iommu_groups/{position}")
    archive = tmp_path / "capture.tar.gz"
    live = save(host, archive)
    assert live["pcie"]["iommu"] == "passthrough"
    assert read_capture(str(archive)) == live
    folder = unpacked(archive, tmp_path / "capture")
    assert (folder / "proc/self").readlink() == Path("4242")
    assert [path.name for path in (folder / "sys/kernel/iommu_groups").iterdir()] != []


def test_nothing_in_it_names_a_machine_or_a_person(host: Path, tmp_path: Path) -> None:
    secrets = {
        "host name": "gpu-7.example.org",
        "short name": "gpu-7",
        "serial": "1653924120276",
        "pdi": "0xf64d99d1976c199",
        "process": "/home/alice/secret_model.py",
        "MAC": "b8:ce:f6:12:34:56",
        "disk": "root=UUID=1f0e",
        "board": "S3CR3T",
        "switch serial": "deadbeefcafe",
    }
    report = host / "nvidia-smi/q-x.xml"
    text = report.read_text(encoding="utf-8")
    text = text.replace("<serial>0000000000000<", f"<serial>{secrets['serial']}</serial><pdi>{secrets['pdi']}</pdi><x>")
    process = (
        f"<process_info><pid>411</pid><process_name>{secrets['process']}</process_name>"
        "<used_memory>300 MiB</used_memory></process_info>"
    )
    report.write_text(text.replace("<processes>", f"<processes>{process}", 1), encoding="utf-8")
    log = (
        f"Dec 01 gpu-7 kernel: NVRM: Xid (PCI:0000:81:00): 13, pid=411, name={secrets['process']}, Graphics Exception\n"
        f"Dec 01 gpu-7 kernel: mlx5_core: MAC {secrets['MAC']}\nDec 01 gpu-7 kernel: NVRM: on gpu-7.example.org\n"
    )
    (host / "proc/cmdline").write_text(f"BOOT_IMAGE=/vmlinuz {secrets['disk']} iommu=pt\n", encoding="utf-8")
    (host / "proc/411").mkdir()
    (host / "proc/411/status").write_text("Name:\talice-job\nUid:\t1000\t1000\n", encoding="utf-8")
    (host / "proc/411/cgroup").write_text("0::/system.slice/vllm-a.service\n", encoding="utf-8")
    port = min(host.glob("sys/devices/pci0000:*/*/config"))
    space = bytearray(port.read_bytes()) + bytes(32)
    space[0x100:0x104] = (0x1201_0003).to_bytes(4, "little")  # device serial number first, then at 0x120 ACS
    space[0x104:0x10C] = bytes.fromhex(secrets["switch serial"]) + bytes(2)
    space[0x120:0x124], space[0x126] = (0x0001_000D).to_bytes(4, "little"), 0b1100
    port.write_bytes(bytes(space))
    lstopo = (
        '<topology><object type="Machine" nodeset="0x3" cpuset="0x3"><info name="HostName" value="gpu-7"/>'
        '<object type="OSDev" name="eth0"><info name="Address" value="b8:ce:f6:12:34:56"/></object>'
        f'<info name="DMIBoardSerial" value="{secrets["board"]}"/></object></topology>'
    )
    archive = tmp_path / "capture.tar.gz"
    live = save(host, archive, kernel_log=log, lstopo=lstopo, host_names=["gpu-7.example.org", "gpu-7"])
    folder = unpacked(archive, tmp_path / "capture")
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        for what, secret in secrets.items():
            assert secret.encode() not in content, (what, path)
            assert secret not in path.name
        assert b"alice" not in content
        assert bytes.fromhex(secrets["switch serial"]) not in content
    saved = read_capture(str(folder))
    assert live["pcie"]["acs_redirect"] == saved["pcie"]["acs_redirect"] == ["0000:00:01.1"]
    assert saved["gpus"][0]["holders"] == [
        {"pid": 411, "user": "1000", "unit": "vllm-a.service", "memory_mib": 300},  # the number, not a name of ours
    ]
    assert [gpu["uuid"] for gpu in saved["gpus"]] == [gpu["uuid"] for gpu in live["gpus"]]


def test_this_machine(tmp_path: Path) -> None:
    """What a live kernel shows reads back alike, whatever it is; only the wording for a missing program differs."""
    archive = tmp_path / "capture.tar.gz"
    live = save_host(
        str(archive),
        "/sys",
        "/proc",
        smi_runner("nvidia-smi", 30),
        kernel_log="",
        checks_file=str(tmp_path / "checks.json"),
        lstopo=read_lstopo("lstopo-no-graphics", 30),
    )
    saved = read_capture(str(archive))
    same = set(live) - {"driver", "problems"}
    assert {key: saved[key] for key in same} == {key: live[key] for key in same}
    assert saved["driver"]["state"] == live["driver"]["state"]
    assert [entry["code"] for entry in saved["problems"]] == [entry["code"] for entry in live["problems"]]


@given(generated_hosts())
@settings(max_examples=25, deadline=None)
def test_a_generated_host_is_saved_whole(tmp_path_factory: pytest.TempPathFactory, host: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("generated")
    render(host, folder / "host")
    live = save(folder / "host", folder / "capture.tar.gz")
    saved = read_capture(str(folder / "capture.tar.gz"))
    assert without_paths(saved, folder / "capture.tar.gz") == without_paths(live, folder / "host")
    shutil.rmtree(folder)


# --- archives that are not what they should be ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def archive_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    archive = tmp_path_factory.mktemp("saved") / "capture.tar.gz"
    save(_CAPTURES / "rtxpro6000-2x", archive)
    return archive.read_bytes()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_truncated_archive_is_told_and_read_as_far_as_it_goes(
    tmp_path_factory: pytest.TempPathFactory, archive_bytes: bytes, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cut") / "capture.tar.gz"
    path.write_bytes(archive_bytes[: data.draw(st.integers(0, len(archive_bytes)))])
    topology = read_capture(str(path))
    told = [entry["severity"] for entry in topology["problems"] if entry["code"] == "capture_truncated"]
    whole = read_capture(str(_CAPTURES / "rtxpro6000-2x"))
    assert told == ["error"] or topology == whole  # what is cut off behind the last file is nothing but padding
    assert topology["schema"] == 1


def test_an_archive_of_the_folder_itself_is_read_too(tmp_path: Path) -> None:
    """`tar czf capture.tar.gz gpu-7` has everything below one folder."""
    archive = shutil.make_archive(str(tmp_path / "host"), "gztar", _CAPTURES, "rtxpro6000-2x")
    assert len(read_capture(archive)["gpus"]) == 2


def test_an_archive_cannot_write_elsewhere(tmp_path: Path) -> None:
    archive, outside = tmp_path / "host.tar", tmp_path / "outside"
    outside.mkdir()
    with tarfile.open(archive, "w") as opened:
        for name, link in (("sys", str(outside)), ("proc", "../outside"), ("here", "."), ("here/up", "..")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, link
            opened.addfile(member)
        for name in ("sys/a", "proc/b", "../outside/c", str(outside / "d"), "here/up/outside/e"):
            member = tarfile.TarInfo(name)
            member.size = 3
            opened.addfile(member, io.BytesIO(b"bad"))
    assert read_capture(str(archive))["gpus"] == []
    assert list(outside.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["host.tar", "outside"]


def test_a_file_that_is_no_archive_is_told(tmp_path: Path) -> None:
    path = tmp_path / "capture.tar.gz"
    path.write_text("not a tar", encoding="utf-8")
    assert "capture_truncated" in {entry["code"] for entry in read_capture(str(path))["problems"]}


# --- as Ansible runs it ---------------------------------------------------------------------------------------------


def test_the_playbook_saves_a_folder_that_module_and_command_read(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    answers = "case $1 in -q) cat q-x.xml ;; *) cat topo-m.txt ;; esac"
    program.write_text(f'#!/bin/sh\ncd "{_REFERENCE}/nvidia-smi" || exit 9\n{answers}\n', encoding="utf-8")
    program.chmod(0o755)
    variables = {
        "ansible_connection": "local",
        "ansible_become": False,
        "ansible_python_interpreter": sys.executable,
        "vllm_plan_sysfs_root": f"{_REFERENCE}/sys",
        "vllm_plan_procfs_root": f"{_REFERENCE}/proc",
        "vllm_plan_nvidia_smi": str(program),
        "probe_kernel_log": f"{_REFERENCE}/kernel.log",
        "capture_folder": str(tmp_path / "captures"),
    }
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(yaml.safe_dump({"gpu_hosts": {"hosts": {"gpu-7": variables}}}), encoding="utf-8")
    stale = tmp_path / "captures" / "gpu-7" / "nvidia-smi" / "q-x.rc"
    stale.parent.mkdir(parents=True)
    stale.write_text("9\n", encoding="utf-8")
    environment = {**os.environ, "ANSIBLE_CONFIG": str(_REPOSITORY / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    bin_folder = Path(sys.executable).parent
    done = subprocess.run(
        [bin_folder / "ansible-playbook", "-i", inventory, _REPOSITORY / "playbooks" / "capture.yml"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 GPUs, 0 problems" in done.stdout
    folder = tmp_path / "captures" / "gpu-7"
    truth = read_capture(str(_REFERENCE))
    assert read_capture(str(folder)) == truth

    command: list[str | Path] = [bin_folder / "ansible", "localhost", "-i", "localhost,", "-c", "local"]
    command += ["-m", "gpu_topology", "-a", json.dumps({"capture": str(folder)})]
    module = subprocess.run(
        [*command, "-e", f"ansible_python_interpreter={sys.executable}"],
        env={**environment, "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"},
        cwd=_REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    result = json.loads(module.stdout.partition("=>")[2])
    assert result["ansible_facts"]["gpu_topology"] == truth
