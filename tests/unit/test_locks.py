"""The locks: complete hashes, no address of any machine or index, and the versions that belong together."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE_LOCKS = sorted((ROOT / "roles/vllm_runtime/files/locks").glob("vllm-*.txt"))
LOCKS = [ROOT / "requirements.lock", ROOT / "roles/vllm_runtime/files/locks/uv.txt", *ENGINE_LOCKS]
CUDA_LOCKS = [lock for lock in ENGINE_LOCKS if "-cuda-" in lock.name]
CPU_LOCK = ROOT / "roles/vllm_runtime/files/locks/vllm-0.32.0-cpu-cp311-x86_64.txt"

# PyTorch's own index publishes torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl under this SHA-256.
PUBLISHED_TORCH_CPU_SHA256 = "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"


def requirements(lock: Path) -> dict[str, tuple[str, list[str]]]:
    """Return name -> (version, SHA-256 digests) of a lock."""
    joined = re.sub(r"\\\n\s*", "", lock.read_text(encoding="utf-8"))
    found = {}
    for line in joined.splitlines():
        if line and not line.lstrip().startswith("#"):
            exact = re.match(r"([a-z0-9.-]+)==([^\s;]+)", line)
            assert exact, f"not NAME==VERSION: {line}"
            found[exact[1]] = (exact[2], re.findall(r"--hash=sha256:([0-9a-f]{64})(?=\s|--|$)", line))
    return found


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_requirement_is_exact_and_hashed(lock: Path) -> None:
    found = requirements(lock)
    assert found
    assert [name for name, (_, digests) in found.items() if not digests] == []


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_no_address_or_local_path(lock: Path) -> None:
    text = lock.read_text(encoding="utf-8")
    assert re.findall(r"\w+://\S+|--(?:index|extra-index|find-links)\S*|(?<![\w.])/\w+/\S+", text) == []


@pytest.mark.parametrize("lock", ENGINE_LOCKS, ids=lambda lock: lock.name)
def test_the_file_name_tells_the_version(lock: Path) -> None:
    _, version, accelerator, *_ = lock.name.split("-")
    expected = {"cuda": version, "cpu": f"{version}+cpu"}[accelerator]
    assert requirements(lock)["vllm"][0] == expected


@pytest.mark.parametrize("lock", CUDA_LOCKS, ids=lambda lock: lock.name)
def test_the_cuda_compiler_is_of_the_runtimes_minor(lock: Path) -> None:
    """Kernels are compiled on the host at first start: nvcc of another CUDA minor than the runtime breaks them."""
    found = requirements(lock)
    runtime = found["nvidia-cuda-runtime"][0].rsplit(".", 1)[0]
    compilers = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvrtc")
    assert {name: found[name][0].rsplit(".", 1)[0] for name in compilers} == dict.fromkeys(compilers, runtime)


def test_the_tests_talk_to_the_hub_as_hosts_do() -> None:
    """The tests' `hf` client is of a version that an engine's environment brings."""
    brought = {requirements(lock)["huggingface-hub"][0] for lock in ENGINE_LOCKS}
    assert requirements(ROOT / "requirements.lock")["huggingface-hub"][0] in brought


def test_the_cpu_lock_takes_the_published_torch_and_no_cuda() -> None:
    found = requirements(CPU_LOCK)
    assert found["torch"] == ("2.13.0+cpu", [PUBLISHED_TORCH_CPU_SHA256])
    assert [name for name in found if name.startswith(("nvidia-", "cuda-", "torchaudio", "torchvision"))] == []


def test_the_shim_wheel_has_the_locked_hash_wherever_it_is_built(tmp_path: Path) -> None:
    """Two builds in two processes are the same bytes, and those that the lock names."""
    digests = set()
    for folder in (tmp_path / "first", tmp_path / "second"):
        command = [sys.executable, str(ROOT / "lab/make_vllm_shim.py"), "0.32.0", str(folder)]
        subprocess.run(command, check=True, capture_output=True)
        (wheel,) = folder.iterdir()
        digests.add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert digests == set(requirements(CPU_LOCK)["vllm"][1])
