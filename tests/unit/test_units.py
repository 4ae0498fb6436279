"""A replica's unit as Ansible writes it from a plan: what engines must find when they start."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hosts import two_sockets

from vllm_fleet.catalog import read_card
from vllm_fleet.plan import make_plan

ROOT = Path(__file__).parents[2]
ROLE = ROOT / "roles" / "vllm_service"


def unit(folder: Path, cuda_home: str) -> list[str]:
    """The first replica's unit of M2.5 on the reference host, as lines."""
    plan = make_plan(two_sockets(), read_card("minimax_m2_5")).to_dict()
    variables = {
        **yaml.safe_load((ROLE / "defaults" / "main.yml").read_text()),
        **yaml.safe_load((ROLE / "vars" / "main.yml").read_text()),
        "vllm_service_plan": plan,
        "vllm_service_runtime": "/opt/vllm-fleet/runtimes/r",
        "vllm_service_weights": "/var/lib/vllm-fleet/weights/w",
        "vllm_service_cuda_home": cuda_home,
        "vllm_service_engine_key": "k" * 32,
        "role_path": str(ROLE),
        "replica": plan["replicas"][0],
    }
    (folder / "variables.json").write_text(json.dumps(variables))
    command = [str(Path(sys.executable).with_name("ansible")), "localhost", "-c", "local", "-i", "localhost,"]
    command += [
        "-m",
        "template",
        "-e",
        f"@{folder / 'variables.json'}",
        "-e",
        f"ansible_python_interpreter={sys.executable}",
    ]
    command += ["-a", f"src={ROLE / 'templates' / 'replica.service.j2'} dest={folder / 'unit'}"]
    (folder / "ansible.cfg").write_text("")  # whatever configuration this machine has stays out of it
    subprocess.run(
        command, check=True, capture_output=True, env={**os.environ, "ANSIBLE_CONFIG": str(folder / "ansible.cfg")}
    )
    return (folder / "unit").read_text().splitlines()


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return unit(tmp_path_factory.mktemp("cuda"), "/opt/vllm-fleet/runtimes/r/cuda")


def value(lines: list[str], name: str) -> str:
    return next(line.partition("=")[2] for line in lines if line.startswith(f"{name}="))


def environment(lines: list[str]) -> dict[str, str]:
    return dict(line.removeprefix("Environment=").split("=", 1) for line in lines if line.startswith("Environment="))


def test_builds_at_the_first_start_find_the_compiler(lines: list[str]) -> None:
    """T44: CUDA_HOME and a PATH in which every part is a folder, none empty."""
    env = environment(lines)
    assert env["CUDA_HOME"] == "/opt/vllm-fleet/runtimes/r/cuda"
    folders = env["PATH"].split(":")
    assert folders[:2] == ["/opt/vllm-fleet/runtimes/r/venv/bin", "/opt/vllm-fleet/runtimes/r/cuda/bin"]
    assert all(folder.startswith("/") for folder in folders)


def test_without_a_compiler_there_is_no_trace_of_one(tmp_path: Path) -> None:
    env = environment(unit(tmp_path, ""))
    assert "CUDA_HOME" not in env
    folders = env["PATH"].split(":")
    assert all(folder.startswith("/") for folder in folders)
    assert folders.count("/bin") == 1


def test_locked_memory_has_no_limit_and_all_memory_has_one(lines: list[str]) -> None:
    """T48: systemd ignores limits.conf."""
    assert value(lines, "LimitMEMLOCK") == "infinity"
    assert re.fullmatch(r"\d\d%", value(lines, "MemoryMax"))


def test_a_replica_starts_after_the_hosts_settings(lines: list[str]) -> None:
    """T59: what a boot forgets is set again before the first transfer."""
    assert "vllm-fleet-tuning.service" in value(lines, "After").split()


def test_a_lost_gpu_does_not_end_in_a_restart_loop(lines: list[str]) -> None:
    """T58: a few tries in an hour, then the unit stays failed and someone looks."""
    assert int(value(lines, "StartLimitBurst")) <= 5
    assert value(lines, "StartLimitIntervalSec") == "1h"
