"""The start gate: what it refuses, what it clears away, and what it never touches."""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fleet.target import start_gate
from vllm_fleet.target.gpu_topology import parse_smi
from vllm_fleet.target.start_gate import (
    Process,
    Processes,
    end,
    gpu_findings,
    main,
    memory_findings,
    port_findings,
    space_findings,
    stale_segments,
    weights_findings,
    xid_findings,
)

ROOT = Path(__file__).parents[2]
REPORT = (ROOT / "lab" / "gpu_host" / "nvidia-smi" / "q-x.xml").read_text()
SMI = parse_smi(REPORT)
FIRST, SECOND = (gpu["uuid"] for gpu in SMI["gpus"])
UNIT = "vllm-m-0.service"
REPLICA: dict[str, Any] = {
    "name": "m-0",
    "unit": UNIT,
    "gpus": [FIRST],
    "port": 8001,
    "gpu_memory_utilization": 0.9,
    "expected": {"weights_gib": 10.0, "overhead_gib": 2.0, "kv_cache_gib": 8.0},
}


def smi(used_mib: int, *holders: tuple[int, int | None], **changed: Any) -> dict[str, Any]:
    """The report of two GPUs, of which the first has so much memory in use, by these processes."""
    report = parse_smi(REPORT)
    gpu = report["gpus"][0]
    gpu |= {"memory_total_mib": 97887, "memory_reserved_mib": 887, "memory_used_mib": used_mib} | changed
    gpu["holders"] = [{"pid": pid, "user": None, "unit": None, "memory_mib": mib} for pid, mib in holders]
    return report


def held_by(**processes: Process) -> Any:
    return lambda pid: processes.get(f"p{pid}")


# --- GPUs ------------------------------------------------------------------------------------------------------------


def test_planned_gpus_that_are_there_and_well_are_no_finding() -> None:
    assert gpu_findings(REPLICA | {"gpus": [FIRST, SECOND]}, SMI) == []


def test_a_missing_gpu_is_named_with_what_the_driver_says() -> None:
    report = parse_smi(REPORT.replace(FIRST, "GPU-00000000-0000-0000-0000-000000000000"))
    (finding,) = gpu_findings(REPLICA, report)
    assert (finding.code, finding.passing) == ("gpu_missing", True)
    assert f"lists 2 GPUs, and not {FIRST}" in finding.message
    (silent,) = gpu_findings(
        REPLICA, parse_smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    )
    assert "couldn't communicate with the NVIDIA driver" in silent.message


def test_only_errors_of_its_own_gpus_stop_a_replica() -> None:
    report = parse_smi(REPORT)
    report["gpus"][0]["problems"] = [
        {"severity": "error", "code": "recovery_needed", "message": "It asks for a reset.", "remedy": "Reset it."},
        {"severity": "warning", "code": "hot", "message": "It is hot.", "remedy": "Cool it."},
    ]
    (finding,) = gpu_findings(REPLICA, report)
    assert (finding.code, finding.message) == ("recovery_needed", "It asks for a reset. Reset it.")
    assert gpu_findings(REPLICA | {"gpus": [SECOND]}, report) == []


@pytest.mark.parametrize(
    ("xid", "place", "codes"), [(79, 0, ["xid"]), (79, 1, []), (31, 0, [])], ids=["lost", "another GPU", "application"]
)
def test_an_xid_of_failing_hardware_stops_the_replica_of_that_gpu(xid: int, place: int, codes: list[str]) -> None:
    bus_id = SMI["gpus"][place]["pci_bus_id"]
    log = f"Dec 01 03:00:00 gpu-a kernel: NVRM: Xid (PCI:{bus_id[:-2]}): {xid}, pid=411, name=python3, GPU has gone.\n"
    assert [finding.code for finding in xid_findings(REPLICA, SMI, log)] == codes


def test_an_unreadable_kernel_log_is_no_reason_to_refuse() -> None:
    assert xid_findings(REPLICA, SMI, None) == []


# --- memory ----------------------------------------------------------------------------------------------------------


def test_an_empty_gpu_is_free() -> None:
    assert memory_findings(REPLICA, smi(4), held_by()) == []


def test_memory_of_our_own_unit_counts_as_free() -> None:
    assert memory_findings(REPLICA, smi(90_000, (11, 60_000), (12, 30_000)), held_by()) == []


def test_a_foreign_holder_is_named_with_process_user_unit_and_size() -> None:
    bob = Process(12, "python3", "bob", "session-4.scope")
    (finding,) = memory_findings(REPLICA, smi(70_000, (11, 30_000), (12, 40_000)), held_by(p12=bob))
    assert (finding.code, finding.passing) == ("memory_held", True)
    assert f"GPU {FIRST} has 57000 MiB free, and this replica claims 87300 of 97000." in finding.message
    assert "Held by process 12 (python3) of bob, session-4.scope: 40000 MiB." in finding.message


def test_a_small_foreign_holder_that_leaves_enough_is_let_be() -> None:
    bob = Process(12, "python3", "bob", None)
    assert memory_findings(REPLICA, smi(9_000, (12, 9_000)), held_by(p12=bob)) == []


def test_memory_that_nobody_is_seen_to_hold_is_still_not_free() -> None:
    (finding,) = memory_findings(REPLICA, smi(50_000), held_by())
    assert "nobody that nvidia-smi shows" in finding.message


def test_without_a_fraction_what_the_plan_expects_is_claimed() -> None:
    cpu = REPLICA | {"gpu_memory_utilization": None}
    bob = Process(12, "python3", "bob", None)
    assert memory_findings(cpu, smi(97_000 - 20 * 1024, (12, 1)), held_by(p12=bob)) == []
    assert len(memory_findings(cpu, smi(97_001 - 20 * 1024, (12, 1)), held_by(p12=bob))) == 1


def test_memory_that_is_not_a_gpus_own_is_not_judged() -> None:
    assert memory_findings(REPLICA, smi(0, memory_total_mib=None), held_by()) == []
    report = smi(97_000)
    report["gpus"][0]["mig"] = {
        "enabled": True,
        "instances": [{"index": 0, "uuid": "MIG-1", "memory_total_mib": 24_000}],
    }
    sliced = REPLICA | {"gpus": ["MIG-1"]}
    assert gpu_findings(sliced, report) == memory_findings(sliced, report, held_by()) == []


# --- processes -------------------------------------------------------------------------------------------------------


def procfs(folder: Path, pid: int, user: str, cgroup: str, state: str = "S (sleeping)") -> None:
    uid = pwd.getpwnam(user).pw_uid
    (folder / str(pid)).mkdir()
    (folder / str(pid) / "status").write_text(f"Name:\tvllm\nState:\t{state}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
    (folder / str(pid) / "cgroup").write_text(f"0::{cgroup}\n")


def test_orphans_are_the_engines_users_processes_without_a_live_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {"vllm-dead-0.service": "failed", "vllm-gone-0.service": "inactive", "vllm-odd-0.service": None}
    monkeypatch.setattr(start_gate, "unit_state", lambda unit: states.get(unit, "active"))
    procfs(tmp_path, 10, "nobody", f"/system.slice/{UNIT}")  # left in the unit that is about to start
    procfs(tmp_path, 11, "nobody", "/system.slice/vllm-dead-0.service")
    procfs(tmp_path, 12, "nobody", "/system.slice/vllm-gone-0.service")
    procfs(tmp_path, 13, "nobody", "/")
    procfs(tmp_path, os.getpid(), "root", f"/system.slice/{UNIT}")  # the gate itself, started by the unit
    procfs(tmp_path, 21, "nobody", "/system.slice/vllm-m-1.service")  # the other replica
    procfs(tmp_path, 22, "nobody", "/system.slice/vllm-health.service")
    procfs(tmp_path, 23, "nobody", "/user.slice/user-1000.slice/session-4.scope")  # somebody's shell
    procfs(tmp_path, 24, "daemon", "/system.slice/vllm-dead-0.service")  # another user's
    procfs(tmp_path, 25, "nobody", "/system.slice/vllm-odd-0.service")  # systemd does not say
    procfs(tmp_path, 26, "nobody", "/system.slice/vllm-dead-0.service", state="Z (zombie)")
    (tmp_path / "self").mkdir()
    found = Processes("nobody", UNIT, procfs_root=str(tmp_path)).orphans()
    assert [process.pid for process in found] == [10, 11, 12, 13]


def test_run_by_hand_the_gate_leaves_a_running_replica_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_gate, "unit_state", lambda _: "active")
    procfs(tmp_path, 10, "nobody", f"/system.slice/{UNIT}")
    procfs(tmp_path, os.getpid(), "root", "/user.slice/user-0.slice/session-4.scope")
    assert Processes("nobody", UNIT, procfs_root=str(tmp_path)).orphans() == []


def test_orphans_are_killed_and_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        processes = Processes("nobody", UNIT)
        orphan = processes.read(child.pid)
        assert orphan is not None
        lines: list[str] = []
        end(processes, [orphan], lines.append)
        assert processes.read(child.pid) is None  # a zombie holds nothing
        assert child.wait(5) == -signal.SIGKILL
    assert lines == [f"ending {orphan}: a dead unit left it behind"]


def test_only_old_shared_memory_that_nobody_uses_is_stale(tmp_path: Path) -> None:
    for name in ("stale", "young", "open"):
        (tmp_path / name).write_bytes(b"x")
        if name != "young":
            os.utime(tmp_path / name, (time.time() - 3600, time.time() - 3600))
    uid = os.getuid()
    with (tmp_path / "open").open("rb"):
        assert [path.name for path in stale_segments(uid, shm=str(tmp_path))] == ["stale"]
    assert stale_segments(uid + 1, shm=str(tmp_path)) == []


# --- disk, weights, port ---------------------------------------------------------------------------------------------


def test_room_in_shared_memory_and_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"/shm": 300, str(tmp_path): 300}
    monkeypatch.setattr(start_gate.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder] << 20))
    assert space_findings(1, str(tmp_path), shm="/shm") == []
    assert [finding.code for finding in space_findings(4, str(tmp_path), shm="/shm")] == ["shm_full"]
    free[str(tmp_path)] = 10
    (finding,) = space_findings(1, str(tmp_path), shm="/shm")
    assert (finding.code, f"{tmp_path} has 10 MiB free" in finding.message) == ("cache_full", True)


def model(folder: Path, **files: str) -> str:
    folder.mkdir(exist_ok=True)
    for name, text in {"config.json": "{}", "model-1.safetensors": "weights", **files}.items():
        (folder / name).write_text(text)
    return str(folder)


def manifest(folder: Path) -> str:
    files = {
        path.name: {"size": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns, "sha256": "0" * 64}
        for path in folder.iterdir()
    }
    path = folder / ".manifest.json"
    path.write_text(json.dumps({"schema": 1, "files": files}))
    return str(path)


def test_weights_as_they_were_verified(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    assert weights_findings(folder, manifest(tmp_path / "m")) == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda path: path.unlink(), "model-1.safetensors: No such file or directory"),
        (lambda path: path.write_text("w"), "model-1.safetensors has 1 bytes instead of 7"),
        (lambda path: os.utime(path, ns=(1, 1)), "model-1.safetensors was changed after it was verified"),
    ],
    ids=["removed", "cut", "touched"],
)
def test_weights_that_changed_since(tmp_path: Path, fault: Any, said: str) -> None:
    folder = model(tmp_path / "m")
    verified = manifest(tmp_path / "m")
    fault(tmp_path / "m" / "model-1.safetensors")
    (finding,) = weights_findings(folder, verified)
    assert (finding.code, finding.passing) == ("weights_invalid", False)
    assert said in finding.message


def test_a_manifest_that_cannot_be_read_refuses(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    for text in ("", "[]", '{"files": {"a": 1}}'):
        (tmp_path / "manifest").write_text(text)
        assert "cannot be read" in weights_findings(folder, str(tmp_path / "manifest"))[0].message


def test_without_a_manifest_every_file_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    folder = model(tmp_path / "m", **{"model.safetensors.index.json": index, "model-2.safetensors": ""})
    assert "model-2.safetensors is empty" in weights_findings(folder, "/nowhere")[0].message
    (tmp_path / "m" / "model-2.safetensors").write_text("weights")
    assert weights_findings(folder, "/nowhere") == []
    assert "config.json" in weights_findings(str(tmp_path), "/nowhere")[0].message


def test_a_taken_port_names_its_holder() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        assert port_findings(REPLICA | {"port": port}) == []
        listening.listen()
        (finding,) = port_findings(REPLICA | {"port": port})
    assert (finding.code, finding.passing) == ("port_taken", True)
    assert f"Port {port} is taken by" in finding.message
    assert f"process {os.getpid()}" in finding.message


# --- the program -----------------------------------------------------------------------------------------------------


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments that pass, with the lab's nvidia-smi and a user that has no process."""
    monkeypatch.setenv("GPU_HOST", str(ROOT / "lab" / "gpu_host"))
    monkeypatch.setattr(start_gate, "read_kernel_log", lambda *_, **__: None)
    monkeypatch.setattr(start_gate, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(start_gate.Processes, "orphans", lambda _: [])
    monkeypatch.setattr(start_gate, "SHM_MIB", 0)
    plan = {"accelerator": "cpu", "replicas": [REPLICA | {"port": 1}]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    return [
        *("--plan", str(tmp_path / "plan.json"), "--replica", "m-0", "--verdict", str(tmp_path / "run" / "m-0")),
        *("--user", "nobody", "--weights", model(tmp_path / "m"), "--manifest", "/nowhere", "--cache", str(tmp_path)),
        *("--nvidia-smi", str(ROOT / "lab" / "nvidia-smi"), "--wait-seconds", "0.2"),
    ]


def test_the_verdict_is_a_file_that_the_engine_can_read_whatever_the_units_umask(
    tmp_path: Path, arguments: list[str]
) -> None:
    before = os.umask(0o077)
    try:
        assert main(arguments) == 0
    finally:
        os.umask(before)
    assert (tmp_path / "run" / "m-0").read_text() == "passed\n"
    assert (tmp_path / "run" / "m-0").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o755


def test_a_refusal_is_written_with_its_reasons_and_said_with_its_code(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m" / "config.json").unlink()
    assert main(arguments) == 0
    assert "config.json" in (tmp_path / "run" / "m-0").read_text()
    assert "start gate: refused (weights_invalid): The weights in" in capsys.readouterr().out
    assert main([*arguments, "--accept", "weights_invalid"]) == 0
    assert (tmp_path / "run" / "m-0").read_text() == "passed\n"


def test_what_may_pass_is_waited_for(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter([[start_gate.Finding("port_taken", "Taken.", passing=True)], []])
    monkeypatch.setattr(start_gate, "port_findings", lambda _: next(looks))
    assert main([*arguments, "--wait-seconds", "60"]) == 0
    assert "s: Taken." in capsys.readouterr().out
    assert (tmp_path / "run" / "m-0").read_text() == "passed\n"


def test_a_former_verdict_does_not_outlive_a_broken_plan(tmp_path: Path, arguments: list[str]) -> None:
    main(arguments)
    (tmp_path / "plan.json").write_text('{"replicas": []}')
    assert main(arguments) == 2
    assert not (tmp_path / "run" / "m-0").exists()


START_ENGINE = ROOT / "roles" / "vllm_service" / "files" / "start-engine"


@pytest.mark.parametrize(("verdict", "status"), [("passed\n", 0), ("GPU 0 is held.\n", 78), (None, 78)])
def test_the_engine_starts_only_past_its_gate(tmp_path: Path, verdict: str | None, status: int) -> None:
    if verdict is not None:
        (tmp_path / "verdict").write_text(verdict)
    (tmp_path / "engine.key").write_text("canary")
    ended = subprocess.run(
        ["/bin/sh", START_ENGINE, tmp_path / "verdict", "/bin/sh", "-c", 'echo "$VLLM_API_KEY"'],
        check=False,
        capture_output=True,
        text=True,
        env={"CREDENTIALS_DIRECTORY": str(tmp_path), "PATH": os.environ["PATH"]},
    )
    assert (ended.returncode, ended.stdout) == (status, "canary\n" if status == 0 else "")
    assert status == 0 or "Not started: " in ended.stderr
