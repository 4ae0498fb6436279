"""The units that the service role writes: rendered by Ansible for the reference host, read as systemd reads them."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from rendering import ROOT, reference_plan, render, settings

from vllm_fleet.serving import SHUTDOWN_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

REPLICA_UNIT = render("replica.service.j2")
HEALTH_UNIT = render("vllm-health.service.j2")
REPLICA = settings(REPLICA_UNIT)
HEALTH = settings(HEALTH_UNIT)
PLAN = reference_plan()["replicas"][0]


def test_gpus_stay_usable() -> None:
    for name in ("PrivateDevices", "MemoryDenyWriteExecute", "ProcSubset", "PrivateNetwork"):
        assert name not in REPLICA, name
    assert not any("@resources" in value for value in REPLICA["SystemCallFilter"])
    allowed = {value.split()[0] for value in REPLICA["DeviceAllow"]}
    assert allowed >= {f"char-{name}" for name in ("nvidia", "nvidiactl", "nvidia-uvm", "nvidia-caps")}
    assert REPLICA["LimitMEMLOCK"] == ["infinity"]


def test_the_engine_may_do_nothing_else() -> None:
    assert REPLICA["CapabilityBoundingSet"] == [""]
    assert REPLICA["DevicePolicy"] == ["closed"]
    assert REPLICA["ProtectSystem"] == ["strict"]
    assert REPLICA["NoNewPrivileges"] == ["yes"]
    assert REPLICA["User"] == ["vllm"]


def test_what_fails_does_not_start_for_ever() -> None:
    assert REPLICA["Restart"] == ["always"]  # an engine that ends with success has ended all the same
    assert REPLICA["RestartPreventExitStatus"] == ["78"]
    longest = PLAN["start_deadline_seconds"] + int(REPLICA["RestartSec"][0])
    assert int(REPLICA["StartLimitIntervalSec"][0]) > int(REPLICA["StartLimitBurst"][0]) * longest


def test_deadlines_are_nested() -> None:
    ready = int(PLAN["env"]["VLLM_ENGINE_READY_TIMEOUT_S"])
    assert ready < PLAN["start_deadline_seconds"] < int(REPLICA["TimeoutStartSec"][0])
    assert int(REPLICA["TimeoutStopSec"][0]) > SHUTDOWN_TIMEOUT_SECONDS


def test_nothing_outlives_the_unit() -> None:
    assert REPLICA["KillMode"] == ["mixed"]
    assert REPLICA["SendSIGKILL"] == ["yes"]
    assert REPLICA["OOMPolicy"] == ["kill"]


def test_the_unit_alone_places_a_replica_on_its_node() -> None:
    assert REPLICA["CPUAffinity"] == REPLICA["AllowedCPUs"] == [PLAN["cpus"]]
    assert (REPLICA["NUMAPolicy"], REPLICA["NUMAMask"]) == (["bind"], ["0"])
    assert "--numa-bind" not in REPLICA["ExecStart"][0]


@pytest.mark.parametrize("unit", [REPLICA_UNIT, HEALTH_UNIT], ids=["replica", "health"])
def test_no_unit_holds_the_key(unit: str) -> None:
    assert "canary" not in unit
    assert "LoadCredential=engine.key:/etc/vllm-fleet/engine.key" in unit


def test_the_gate_sees_what_the_engine_will_use() -> None:
    gate, engine = REPLICA["ExecStartPre"][0], REPLICA["ExecStart"][0]
    assert gate.startswith("+/")  # as root, for the kernel log and other users' processes
    verdict = re.search(r"--verdict (\S+)", gate)
    assert verdict
    assert engine.split()[1] == verdict[1]
    weights = re.search(r"vllm serve (\S+)", engine)
    assert weights
    assert f"--weights {weights[1]} " in gate
    accepting = settings(render("replica.service.j2", vllm_service_gate_accepts=["xid", "ecc_uncorrected"]))
    assert accepting["ExecStartPre"][0].endswith("--accept xid --accept ecc_uncorrected")


@pytest.mark.parametrize(
    ("weights", "home"), [("/home/data/m", "read-only"), ("/var/lib/m", "yes"), ("/srv/home/m", "yes")]
)
def test_weights_in_a_home_can_be_read(weights: str, home: str) -> None:
    assert settings(render("replica.service.j2", vllm_service_weights=weights))["ProtectHome"] == [home]


def test_words_with_blanks_and_signs_reach_the_engine_as_they_are() -> None:
    weights = "/srv/my $weights 100%"
    unit = settings(render("replica.service.j2", vllm_service_weights=weights))
    assert '"/srv/my $$weights 100%%"' in unit["ExecStart"][0]
    assert '--weights "/srv/my $$weights 100%%"' in unit["ExecStartPre"][0]


def test_a_release_changes_neither_the_agents_unit_nor_the_other_replicas() -> None:
    plan = reference_plan()
    fewer = plan | {"replicas": plan["replicas"][:1]}
    assert render("replica.service.j2", vllm_service_plan=fewer) == REPLICA_UNIT
    assert render("vllm-health.service.j2", vllm_service_plan=fewer) == HEALTH_UNIT


def environment(unit: str) -> dict[str, str]:
    return dict(value.split("=", 1) for value in settings(unit)["Environment"])


def test_builds_at_the_first_start_find_the_compiler() -> None:
    """CUDA_HOME, and a PATH in which every part is a folder and none is empty."""
    found = environment(render("replica.service.j2", vllm_service_cuda_home="/opt/vllm-fleet/runtimes/r/cuda"))
    assert found["CUDA_HOME"] == "/opt/vllm-fleet/runtimes/r/cuda"
    folders = found["PATH"].split(":")
    assert folders[1] == "/opt/vllm-fleet/runtimes/r/cuda/bin"
    assert all(folder.startswith("/") for folder in folders)


def test_without_a_compiler_there_is_no_trace_of_one() -> None:
    found = environment(render("replica.service.j2", vllm_service_cuda_home=""))
    assert "CUDA_HOME" not in found
    folders = found["PATH"].split(":")
    assert all(folder.startswith("/") for folder in folders)
    assert folders.count("/bin") == 1


def test_locked_memory_has_no_limit_and_all_memory_has_one() -> None:
    """systemd ignores limits.conf."""
    assert REPLICA["LimitMEMLOCK"] == ["infinity"]
    assert re.fullmatch(r"\d\d%", REPLICA["MemoryMax"][0])


def test_a_replica_starts_after_the_hosts_settings() -> None:
    """What a boot forgets is set again before the first transfer."""
    assert any("vllm-fleet-tuning.service" in value.split() for value in REPLICA["After"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine")
@pytest.mark.parametrize("unit", [REPLICA_UNIT, HEALTH_UNIT], ids=["replica", "health"])
def test_systemd_scores_the_exposure_at_most_2_5(tmp_path: Path, unit: str) -> None:
    (tmp_path / "vllm-m-0.service").write_text(unit)
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=25", "--no-pager"]
    scored = subprocess.run([*command, tmp_path / "vllm-m-0.service"], check=False, capture_output=True, text=True)
    assert scored.returncode == 0, scored.stdout + scored.stderr


def test_the_operations_page_explains_the_whole_unit() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page.split("## A replica's unit, line by line")[1].split("\n## ")[0]
    shown = "\n".join(re.findall(r"```ini\n(.*?)\n```", section, re.DOTALL))
    strip = lambda text: [line for line in text.splitlines() if line]  # noqa: E731
    assert strip(shown) == strip(REPLICA_UNIT), "the template changed: change the page with it"
