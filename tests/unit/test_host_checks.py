"""Verdicts that earlier tests left on a host: when they still hold, and what a check is run as."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_fleet.target.gpu_topology import Problem
from vllm_fleet.target.host_checks import circumstances, command, due, hold_against, summary, usable
from vllm_fleet.target.host_probe import read_capture

CAPTURE = Path(__file__).parents[1] / "fixtures" / "captures" / "rtxpro6000-8x-2nodes"
TOPOLOGY = read_capture(str(CAPTURE))
NOW = circumstances(TOPOLOGY, "boot-1", "vllm-0.32.0-cuda")


def saved(verdict: str, **changes: Any) -> dict[str, Any]:
    result = {"verdict": verdict, "detail": "28 pairs moved data rightly", "measured_under": {**NOW, **changes}}
    return {"p2p": result, "kernel_build": copy.deepcopy(result), "disk_read_mib_s": 2900.0}


def codes(problems: list[Problem]) -> list[str]:
    return [str(entry["code"]) for entry in problems]


def test_a_verdict_holds_under_the_circumstances_it_was_measured_under() -> None:
    held, problems = hold_against(saved("ok"), NOW)
    assert (held["p2p"]["verdict"], held["kernel_build"]["verdict"], held["disk_read_mib_s"]) == ("ok", "ok", 2900.0)
    assert problems == []


@pytest.mark.parametrize(
    "change",
    [
        {"gpus": NOW["gpus"][:-1]},
        {"driver": "580.65.06"},
        {"iommu": "translated"},
        {"acs_redirect": ["0000:00:01.1"]},
        {"acs_redirect": None, "boot_id": "boot-0"},
    ],
    ids=["gpus", "driver", "iommu", "acs", "acs-unknown-at-another-boot"],
)
def test_a_transfer_under_other_circumstances_counts_as_untested(change: dict[str, Any]) -> None:
    """T59: what worked before a boot that turned ACS on proves nothing after it."""
    held, problems = hold_against(saved("ok", **change), NOW)
    assert held["p2p"]["verdict"] == "untested"
    assert held["p2p"]["detail"].startswith("ok when it was last tested, but")
    assert "check_outdated" in codes(problems)
    assert due("p2p", saved("ok", **change), NOW)


def test_a_boot_alone_changes_nothing_for_what_worked() -> None:
    assert hold_against(saved("ok", boot_id="boot-0"), NOW)[0]["p2p"]["verdict"] == "ok"
    assert not due("p2p", saved("ok", boot_id="boot-0"), NOW)


def test_what_was_broken_is_tried_again_after_a_boot() -> None:
    assert not due("p2p", saved("broken"), NOW)
    assert due("p2p", saved("broken", boot_id="boot-0"), NOW)


def test_an_iommu_mode_says_nothing_of_builds_and_another_environment_does() -> None:
    assert hold_against(saved("ok", iommu="translated"), NOW)[0]["kernel_build"]["verdict"] == "ok"
    assert due("kernel_build", saved("ok", runtime="vllm-0.31.0-cuda"), NOW)
    whoever_does_not_know = circumstances(TOPOLOGY, "boot-1")
    assert hold_against(saved("ok"), whoever_does_not_know)[0]["kernel_build"]["verdict"] == "ok"


def test_broken_verdicts_are_problems_with_a_remedy() -> None:
    checks = saved("broken")
    checks["p2p"]["fallback"] = {"verdict": "broken", "detail": "an NCCL all-reduce hung"}
    problems = hold_against(checks, NOW)[1]
    assert codes(problems) == ["p2p_broken", "p2p_fallback_broken", "kernel_build_broken"]
    assert [entry["severity"] for entry in problems] == ["warning", "error", "error"]
    assert all(entry["remedy"] for entry in problems)


@pytest.mark.parametrize("damaged", [{}, {"p2p": None, "kernel_build": "ok"}, {"p2p": {"detail": "no verdict"}}])
def test_a_damaged_file_is_untested(damaged: dict[str, Any]) -> None:
    held, problems = hold_against(damaged, NOW)
    assert held["p2p"] == held["kernel_build"] == {"verdict": "untested", "detail": None}
    assert problems == []
    assert due("p2p", damaged, NOW)


def test_a_saved_host_is_held_against_its_own_circumstances(tmp_path: Path) -> None:
    """The probe does it, also for a capture, whose boot nobody knows."""
    capture = tmp_path / "host"
    capture.mkdir()
    for entry in CAPTURE.iterdir():
        (capture / entry.name).symlink_to(entry)
    (capture / "checks.json").write_text(json.dumps(saved("ok")))
    assert read_capture(str(capture))["checks"]["p2p"]["verdict"] == "ok"
    (capture / "checks.json").write_text(json.dumps(saved("ok", driver="575.57.08")))
    topology = read_capture(str(capture))
    assert topology["checks"]["p2p"]["verdict"] == "untested"
    assert "check_outdated" in codes(topology["problems"])


# Running them

GIVEN = {
    "environment": "/opt/e",
    "cuda_home": "/opt/e/cuda",
    "script": "/opt/bin/gpu_checks.py",
    "user": "vllm",
    "step_seconds": 30,
    "total_seconds": 600,
}


def test_a_check_runs_as_the_engine_does_and_ends_in_any_case() -> None:
    words = command("kernel_build", TOPOLOGY["gpus"][:2], GIVEN)
    assert "--setenv=CUDA_HOME=/opt/e/cuda" in words
    path = next(word for word in words if word.startswith("--setenv=PATH="))
    assert path.startswith("--setenv=PATH=/opt/e/venv/bin:/opt/e/cuda/bin:/usr")
    assert "::" not in path
    assert "--property=User=vllm" in words
    assert "--property=DynamicUser=yes" in words
    assert any(word.startswith("--property=RuntimeMaxSec=") for word in words)
    assert words[words.index("/opt/e/venv/bin/python") :][:3] == [
        "/opt/e/venv/bin/python",
        "/opt/bin/gpu_checks.py",
        "kernel-build",
    ]
    assert words[-1] == "--capability=12.0"


def test_gpus_are_named_by_uuid_and_called_by_address() -> None:
    words = command("p2p", TOPOLOGY["gpus"][:2], GIVEN)
    first, second = TOPOLOGY["gpus"][:2]
    assert f"--setenv=CUDA_VISIBLE_DEVICES={first['uuid']},{second['uuid']}" in words
    assert "--setenv=CUDA_DEVICE_ORDER=PCI_BUS_ID" in words
    assert [word for word in words if word.startswith("--device=")] == ["--device=cuda:0", "--device=cuda:1"]
    assert f"--name=GPU {second['pci_bus_id']}" in words


def test_lost_and_divided_gpus_are_not_tried() -> None:
    """T58: a GPU that has fallen off the bus would only make CUDA fail for all."""
    gpus = copy.deepcopy(TOPOLOGY["gpus"][:4])
    gpus[0]["problems"] = [{"severity": "error", "code": "gpu_not_seen_by_driver", "message": "", "remedy": ""}]
    gpus[1]["mig"]["enabled"] = True
    gpus[2]["uuid"] = None
    assert usable(gpus) == [gpus[3]]


def test_the_summary_is_a_line_for_each() -> None:
    checks = saved("ok")
    checks["p2p"]["fallback"] = {"verdict": "ok", "detail": "28 pairs moved data rightly"}
    checks["disk_read"] = {"folder": "/w", "detail": "4096 MiB of /w in 1.4 s, direct"}
    assert summary(checks) == [
        "peer-to-peer transfers: ok: 28 pairs moved data rightly",
        "transfers through host memory: ok: 28 pairs moved data rightly",
        "building kernels: ok: 28 pairs moved data rightly",
        "reading weights: 2900.0 MiB/s: 4096 MiB of /w in 1.4 s, direct",
    ]
    assert summary({}) == []
