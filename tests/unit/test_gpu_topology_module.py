"""The module as Ansible runs it, on saved hosts, and the lab's nvidia-smi with it."""

import ast
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_fleet.target.gpu_topology import parse_smi
from vllm_fleet.target.host_probe import read_capture

_REPOSITORY = Path(__file__).parent.parent.parent
_LAB = _REPOSITORY / "lab" / "gpu_host"
_REFERENCE = _REPOSITORY / "tests" / "fixtures" / "captures" / "rtxpro6000-8x-2nodes"
_PLUGINS = _REPOSITORY / "plugins"
_EMPTY_CONFIG = Path(tempfile.mkdtemp()) / "ansible.cfg"  # whatever configuration this machine has stays out of it


@pytest.fixture(scope="module", autouse=True)
def _empty_configuration() -> Iterator[None]:
    _EMPTY_CONFIG.write_text("", encoding="utf-8")
    yield
    shutil.rmtree(_EMPTY_CONFIG.parent)


def old_python() -> str | None:
    """The oldest Python that target hosts may have, if this machine has it."""
    candidates = ["python3.9", *map(str, (Path.home() / ".pyenv" / "versions").glob("3.9.*/bin/python"))]
    for candidate in filter(None, map(shutil.which, candidates)):  # a pyenv shim may be found and yet not run
        if subprocess.run([candidate, "--version"], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def run_module(python: str = sys.executable, *, check: bool = False, **parameters: str) -> dict[str, Any]:
    command = [str(Path(sys.executable).with_name("ansible")), "localhost", "-i", "localhost,", "-c", "local"]
    command += ["-m", "gpu_topology", "-e", f"ansible_python_interpreter={python}"]
    command += ["-a", json.dumps(parameters)] * bool(parameters)
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(_EMPTY_CONFIG),
        "ANSIBLE_LIBRARY": str(_PLUGINS / "modules"),
        "ANSIBLE_MODULE_UTILS": str(_PLUGINS / "module_utils"),
        "ANSIBLE_NOCOLOR": "1",
    }
    done = subprocess.run(
        command + ["--check"] * check, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    status, _, result = done.stdout.partition("=>")
    assert "SUCCESS" in status, done.stdout + done.stderr
    loaded: dict[str, Any] = json.loads(result)
    assert loaded["changed"] is False
    facts: dict[str, Any] = loaded["ansible_facts"]["gpu_topology"]
    return facts


def replaying_smi(folder: Path, capture: Path) -> str:
    """An nvidia-smi that prints what a capture holds."""
    program = folder / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\ncd "{capture}/nvidia-smi" || exit 9\ncase "$1" in -q) cat q-x.xml ;; *) cat topo-m.txt ;; esac\n',
        encoding="utf-8",
    )
    program.chmod(0o755)
    return str(program)


def on_capture(folder: Path, capture: Path) -> dict[str, str]:
    return {
        "sysfs_root": f"{capture}/sys",
        "procfs_root": f"{capture}/proc",
        "kernel_log": f"{capture}/kernel.log",
        "nvidia_smi": replaying_smi(folder, capture),
        "checks_file": str(folder / "checks.json"),
    }


@pytest.mark.parametrize("check", [False, True], ids=["run", "check mode"])
def test_the_module_reads_what_the_package_reads(tmp_path: Path, *, check: bool) -> None:
    assert run_module(check=check, **on_capture(tmp_path, _REFERENCE)) == read_capture(str(_REFERENCE))


def test_the_module_runs_on_the_oldest_python_of_a_target(tmp_path: Path) -> None:
    python = old_python()
    if python is None:
        pytest.skip("no Python 3.9 on this machine; the syntax is checked all the same")
    assert run_module(python, **on_capture(tmp_path, _REFERENCE)) == read_capture(str(_REFERENCE))


def test_saved_checks_are_read(tmp_path: Path) -> None:
    (tmp_path / "checks.json").write_text('{"p2p": {"verdict": "ok", "detail": "56 pairs"}}', encoding="utf-8")
    assert run_module(**on_capture(tmp_path, _REFERENCE))["checks"]["p2p"]["verdict"] == "ok"


def test_a_host_without_nvidia_smi_is_a_fact_not_a_failure(tmp_path: Path) -> None:
    parameters = {**on_capture(tmp_path, _REFERENCE), "nvidia_smi": str(tmp_path / "absent")}
    topology = run_module(**parameters)
    assert topology["driver"]["state"] == "missing"
    assert len(topology["gpus"]) == 8


def test_a_hung_nvidia_smi_costs_its_deadline(tmp_path: Path) -> None:
    parameters = on_capture(tmp_path, _REFERENCE)
    Path(parameters["nvidia_smi"]).write_text("#!/bin/sh\nexec sleep 600\n", encoding="utf-8")
    topology = run_module(**parameters, timeout_seconds="1")
    (entry,) = [entry for entry in topology["problems"] if entry["code"] == "nvidia_smi_timeout"]
    assert "within 1 s" in entry["message"]


def test_this_machine_can_be_read() -> None:
    topology = run_module()
    assert topology["schema"] == 1
    assert topology["cpus"]["online"] == Path("/sys/devices/system/cpu/online").read_text(encoding="utf-8").strip()
    assert topology["architecture"] == os.uname().machine


@pytest.mark.parametrize(
    "name",
    [
        "module_utils/cross_check.py",
        "module_utils/gpu_topology.py",
        "module_utils/host_capture.py",
        "module_utils/host_probe.py",
        "modules/gpu_topology.py",
        "modules/host_capture.py",
    ],
)
def test_target_code_is_python_3_9_and_needs_only_the_standard_library(name: str) -> None:
    tree = ast.parse((_PLUGINS / name).read_text(encoding="utf-8"), feature_version=(3, 9))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0}
    foreign = {module.split(".")[0] for module in imported} - set(sys.stdlib_module_names)
    assert foreign <= ({"ansible"} if name.startswith("modules/") else set())


@pytest.mark.parametrize("name", ["gpu_topology", "host_capture"])
def test_the_documented_options_are_the_real_ones(name: str) -> None:
    source = (_PLUGINS / "modules" / f"{name}.py").read_text(encoding="utf-8")
    constants = {
        node.targets[0].id: node.value.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    documented = yaml.safe_load(constants["DOCUMENTATION"])["options"]
    call = next(
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.keyword) and node.arg == "argument_spec"
    )
    spec = ast.literal_eval(call.value)
    assert {name: option.get("default") for name, option in documented.items()} == {
        name: option.get("default") for name, option in spec.items()
    }
    if name == "gpu_topology":
        documented_keys = yaml.safe_load(constants["RETURN"])["ansible_facts"]["contains"]["gpu_topology"]["contains"]
        assert list(documented_keys) == list(read_capture(str(_REFERENCE)))


# --- the lab's nvidia-smi -------------------------------------------------------------------------------------------


def lab_smi(*arguments: str, host: Path = _LAB) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(_REPOSITORY / "lab" / "nvidia-smi"), *arguments],
        env={**os.environ, "GPU_HOST": str(host)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_lab_prints_what_was_recorded() -> None:
    assert os.access(_REPOSITORY / "lab" / "nvidia-smi", os.X_OK)
    recorded = parse_smi((_LAB / "nvidia-smi" / "q-x.xml").read_text(encoding="utf-8"))
    printed = parse_smi(lab_smi("-q", "-x").stdout)
    assert [gpu["uuid"] for gpu in printed["gpus"]] == [gpu["uuid"] for gpu in recorded["gpus"]]
    assert [gpu["memory_total_mib"] for gpu in printed["gpus"]] == [97887, 97887]
    assert lab_smi("topo", "-m").stdout == (_LAB / "nvidia-smi" / "topo-m.txt").read_text(encoding="utf-8")
    assert [gpu["uuid"] for gpu in parse_smi(lab_smi("-L").stdout)["gpus"]] == [gpu["uuid"] for gpu in printed["gpus"]]


def test_the_lab_answers_queries() -> None:
    fields = "index,uuid,memory.total,driver_version,pcie.link.width.max"
    with_units = lab_smi(f"--query-gpu={fields}", "--format=csv").stdout.splitlines()
    assert with_units[0] == "index, uuid, memory.total [MiB], driver_version, pcie.link.width.max"
    assert with_units[1].endswith(", 97887 MiB, 595.58.03, 16")
    bare = lab_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits").stdout.splitlines()
    assert [row.split(", ")[2] for row in bare] == ["97887", "97887"]
    unknown = lab_smi("--query-gpu=nonsense", "--format=csv")
    assert unknown.returncode == 2
    assert "nonsense" in unknown.stdout


def test_the_lab_without_its_host_is_a_driver_that_does_not_answer(tmp_path: Path) -> None:
    done = lab_smi("-q", "-x", host=tmp_path)
    assert done.returncode == 9
    assert parse_smi(done.stdout)["problems"][0]["code"] == "driver_unreachable"


def test_a_units_memory_is_used_memory(tmp_path: Path) -> None:
    """Two processes of one unit, of which one names the GPU: both count, 100 MiB and 28 MiB resident."""
    uuids = [gpu["uuid"] for gpu in parse_smi(lab_smi("-q", "-x").stdout)["gpus"]]
    page = os.sysconf("SC_PAGE_SIZE")
    processes = {
        "411": ("vllm-a.service", f"HOME=/\0CUDA_VISIBLE_DEVICES={uuids[1]}\0", 100),
        "412": ("vllm-a.service", "", 28),
        "500": ("ssh.service", "", 900),
        "501": ("user.slice", f"CUDA_VISIBLE_DEVICES={uuids[0]}\0", 900),  # no unit of ours
    }
    for pid, (unit, environment, resident_mib) in processes.items():
        folder = tmp_path / pid
        folder.mkdir()
        (folder / "cgroup").write_text(f"0::/system.slice/{unit}\n", encoding="utf-8")
        (folder / "environ").write_text(environment, encoding="utf-8")
        (folder / "statm").write_text(f"999999 {resident_mib * 1024 * 1024 // page} 1 1 0 1 0\n", encoding="utf-8")
        (folder / "comm").write_text("VLLM::Worker\n", encoding="utf-8")
    program = tmp_path / "nvidia-smi"
    source = (_REPOSITORY / "lab" / "nvidia-smi").read_text(encoding="utf-8")
    assert 'PROC = Path("/proc")' in source
    program.write_text(source.replace('PROC = Path("/proc")', f'PROC = Path("{tmp_path}")'), encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    done = subprocess.run(
        [sys.executable, str(program), "-q", "-x"],
        env={**os.environ, "GPU_HOST": str(_LAB)},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = parse_smi(done.stdout)["gpus"]
    assert (first["memory_used_mib"], first["holders"]) == (0, [])
    assert second["memory_used_mib"] == 128
    assert [(holder["pid"], holder["memory_mib"]) for holder in second["holders"]] == [(411, 100), (412, 28)]
