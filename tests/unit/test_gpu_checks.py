"""The checks with real child processes, on a torch whose GPUs break in every way that people reported."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_fleet.target.gpu_checks import Limits, check_disk, supervise

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "plugins" / "module_utils" / "gpu_checks.py"
FAKE_TORCH = Path(__file__).parent / "fake_torch"


def run(*arguments: str, **environment: str) -> tuple[dict[str, Any], int]:
    """The script as a host runs it: what it printed last, and its exit code."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "PYTHONPATH": str(FAKE_TORCH), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout.strip().rpartition("\n")[2]), done.returncode


def p2p(gpus: int, fault: str = "", **environment: str) -> dict[str, Any]:
    names = [f"--name=GPU 0000:0{index}:00.0" for index in range(gpus)]
    result, code = run(
        "p2p", "--mib=1", "--rounds=1", "--step-seconds=3", *names, FAKE_GPUS=str(gpus), FAKE_FAULT=fault, **environment
    )
    assert code == (result["verdict"] == "broken")
    return result


def test_every_pair_is_tried() -> None:
    result = p2p(4)
    assert (result["verdict"], result["pairs"]) == ("ok", 6)
    assert result["fallback"] == {"verdict": "ok", "detail": "6 pairs moved data rightly"}


@pytest.mark.parametrize("gpus", [0, 1])
def test_without_a_pair_nothing_is_tested(gpus: int) -> None:
    result = p2p(gpus)
    assert (result["verdict"], result["fallback"]) == ("untested", None)


def test_a_copy_that_hangs_is_killed_and_named() -> None:
    """T35: peer access is advertised, and a copy never ends, not even when asked to."""
    started = time.monotonic()
    result = p2p(3, "hang copy 1 2")
    assert result["verdict"] == "broken"
    assert "a copy between GPU 0000:01:00.0 and GPU 0000:02:00.0 hung and was killed" in result["detail"]
    assert "reset" in result["detail"]
    assert result["pairs"] == 2  # those tried before it
    assert time.monotonic() - started < 40
    assert result["fallback"]["verdict"] == "ok"


def test_an_all_reduce_that_hangs_is_named_though_copies_work() -> None:
    """T33, T34, T59: the first all-reduce of two ranks hangs; through host memory it works."""
    result = p2p(2, "hang all_reduce 0 1")
    assert "an NCCL all-reduce between" in result["detail"]
    assert (result["verdict"], result["fallback"]["verdict"]) == ("broken", "ok")


@pytest.mark.parametrize("where", ["copy", "all_reduce"])
def test_data_that_changes_on_its_way_is_seen(where: str) -> None:
    """Nothing moves and nobody complains; the other pairs are still tried."""
    result = p2p(3, f"corrupt {where} 0 2")
    assert result["verdict"] == "broken"
    assert "data changed between GPU 0000:00:00.0 and GPU 0000:02:00.0" in result["detail"]
    assert result["pairs"] == 2


def test_a_child_that_dies_is_a_verdict_too() -> None:
    result = p2p(2, "die copy 0 1")
    assert result["verdict"] == "broken"
    assert "SIGBUS" in result["detail"]
    assert "a copy between" in result["detail"]


def test_full_gpus_prove_nothing() -> None:
    assert p2p(2, "oom copy 0 1")["verdict"] == "untested"


def test_broken_host_memory_is_not_blamed_on_peers() -> None:
    result = p2p(2, "corrupt host 1 -")
    assert (result["verdict"], result["fallback"]) == ("broken", None)
    assert "between host memory and GPU 0000:01:00.0" in result["detail"]


def test_pairs_without_access_are_left_out() -> None:
    some = p2p(3, FAKE_NO_ACCESS="02 12")
    assert (some["verdict"], some["pairs"]) == ("ok", 1)
    assert "no peer access between GPU 0000:00:00.0 and GPU 0000:02:00.0" in some["detail"]
    none = p2p(2, FAKE_NO_ACCESS="01")
    assert (none["verdict"], none["fallback"]) == ("untested", None)


def test_a_torch_that_does_not_come_up_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    result, code = run("p2p", PYTHONPATH=str(tmp_path))
    assert (result["verdict"], code) == ("untested", 0)
    assert "libcudart.so.13" in result["detail"]


def test_what_a_hung_child_started_is_killed_with_it(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = (
        "import os, subprocess, time\n"
        f"child = subprocess.Popen(['sleep', '300']); open({str(mark)!r}, 'w').write(str(child.pid))\n"
        'print(\'@check {"step": "waiting"}\', flush=True); time.sleep(300)\n'
    )
    outcome = supervise([sys.executable, "-c", code], Limits(start_seconds=10, step_seconds=1))
    assert (outcome.hung, outcome.stuck) == ("waiting", None)
    grandchild = Path("/proc", mark.read_text())
    deadline = time.monotonic() + 5
    while grandchild.exists() and "Z" not in (grandchild / "stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_total_deadline_holds_though_every_step_is_quick() -> None:
    code = 'import time\nwhile True: print(\'@check {"step": "another"}\', flush=True); time.sleep(0.1)'
    started = time.monotonic()
    assert supervise([sys.executable, "-c", code], Limits(10, 10, total_seconds=1)).hung == "another"
    assert time.monotonic() - started < 10


# Building kernels


def tool(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def cuda_home(tmp_path: Path) -> Path:
    """A compiler that says its release, and the tools beside it."""
    home = tmp_path / "cuda"
    tool(
        home / "bin" / "nvcc", 'test "$1" = --version && echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0'
    )
    for name in ("ninja", "c++", "gcc"):
        tool(tmp_path / "bin" / name, "exit 0")
    return home


def build(home: Path, path: str | None = None, **environment: str) -> dict[str, Any]:
    path = path or f"{home}/bin:{home.parent}/bin"
    result, code = run("kernel-build", f"--cuda-home={home}", "--capability=12.0", PATH=path, **environment)
    assert code == (result["verdict"] == "broken")
    return result


def test_without_a_gpu_a_build_is_compiled_and_not_run(cuda_home: Path) -> None:
    result = build(cuda_home)
    assert result["verdict"] == "untested"
    assert "nvcc 13.0 compiles and links for 12.0" in result["detail"]


@pytest.mark.parametrize("bad", ["", "/nowhere", ":/usr/local/cuda"])
def test_a_cuda_home_that_is_none_is_said(bad: str, cuda_home: Path) -> None:
    """T44: empty, gone, or with the colon that appending to an empty variable leaves."""
    result, code = run("kernel-build", f"--cuda-home={bad}", PATH=f"{cuda_home}/bin:{cuda_home.parent}/bin")
    assert (result["verdict"], code) == ("broken", 1)
    assert repr(bad) in result["detail"]


@pytest.mark.parametrize("missing", ["ninja", "c++", "gcc"])
def test_a_tool_that_is_not_in_path_is_named(missing: str, cuda_home: Path) -> None:
    (cuda_home.parent / "bin" / missing).unlink()
    result = build(cuda_home)
    assert result["verdict"] == "broken"
    assert f"{missing} (" in result["detail"]


def test_nvcc_of_another_cuda_release_than_the_runtime_is_refused(cuda_home: Path) -> None:
    result = build(cuda_home, FAKE_CUDA="13.5")
    assert result["verdict"] == "broken"
    assert "nvcc is of CUDA 13.0, torch's runtime of 13.5" in result["detail"]


def test_what_the_compiler_says_is_in_the_verdict(cuda_home: Path) -> None:
    tool(
        cuda_home / "bin" / "nvcc",
        'test "$1" = --version && echo "release 13.0," && exit 0\n'
        "echo '#$ _HERE_=/x' >&2; echo 'nvcc fatal   : Unsupported gpu architecture compute_120a' >&2; exit 1",
    )
    assert "nvcc failed: nvcc fatal   : Unsupported gpu architecture" in build(cuda_home)["detail"]


def test_a_link_that_fails_is_in_the_verdict(cuda_home: Path) -> None:
    """https://github.com/flashinfer-ai/flashinfer/issues/5064."""
    tool(
        cuda_home.parent / "bin" / "c++",
        "echo '/usr/bin/ld: cannot find -lcudart: No such file or directory' >&2; exit 1",
    )
    assert "c++ failed: /usr/bin/ld: cannot find -lcudart" in build(cuda_home)["detail"]


def test_a_kernel_that_does_not_load_is_broken(cuda_home: Path) -> None:
    """It compiles, there is a GPU, and what came out is no library."""
    result = build(cuda_home, FAKE_GPUS="1")
    assert result["verdict"] == "broken"
    assert "kernel.so" in result["detail"]


# Reading


def test_the_disk_is_read_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"weights")
    result = check_disk(str(tmp_path / "not" / "yet"), seconds=1, most_mib=32)
    assert result["read_mib_s"] > 0
    assert float(f"{result['read_mib_s']:.2g}") == result["read_mib_s"]
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_large_file_is_read_in_place(tmp_path: Path) -> None:
    with (tmp_path / "model-00001-of-00001.safetensors").open("wb") as file:
        file.truncate(1 << 30)
    tmp_path.chmod(0o555)
    assert check_disk(str(tmp_path), seconds=0.2, most_mib=64)["read_mib_s"] > 0


def test_a_disk_that_cannot_be_tried_says_why() -> None:
    result = check_disk("/proc/1", seconds=1, most_mib=1)
    assert result["read_mib_s"] is None
    assert "/proc/1" in result["detail"]
