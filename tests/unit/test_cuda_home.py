"""A CUDA_HOME of links: what builds at run time look for, from what the wheels have."""

from pathlib import Path

import pytest

from vllm_fleet.target.cuda_home import driver_library, installed_links, set_links, toolkit_folder, wanted_links

# Names as in nvidia-cuda-nvcc 13.0.88, nvidia-cuda-runtime 13.0.96, nvidia-cuda-nvrtc 13.0.88 and nvidia-nvvm 13.0.88.
LIBRARIES = [
    "libcudadevrt.a",
    "libcudart.so.13",
    "libcudart_static.a",
    "libnvJitLink.so.13",
    "libnvrtc-builtins.alt.so.13.0",
    "libnvrtc-builtins.so.13.0",
    "libnvrtc.alt.so.13",
    "libnvrtc.so.13",
    "libnvvm.so.4",
]
LDCONFIG = """1234 libs found in cache `/etc/ld.so.cache'
\tlibcudart.so.13 (libc6,x86-64) => /usr/local/cuda/lib64/libcudart.so.13
\tlibcuda.so.1 (libc6) => /lib/i386-linux-gnu/libcuda.so.1
\tlibcuda.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libcuda.so.1
\tlibcuda.so (libc6,x86-64) => /lib/x86_64-linux-gnu/libcuda.so
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    toolkit = tmp_path / "runtime/venv/lib/python3.12/site-packages/nvidia/cu13"
    for name in ["bin/nvcc", "include/cuda_runtime.h", "nvvm/bin/cicc", *(f"lib/{library}" for library in LIBRARIES)]:
        path = toolkit / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "runtime"


def made(environment: Path, libcuda: str | None) -> Path:
    home = environment / "cuda"
    toolkit = toolkit_folder(str(environment))
    assert toolkit is not None
    set_links(home, wanted_links(toolkit, libcuda))
    return home


def test_everything_is_where_builds_look_for_it(environment: Path, tmp_path: Path) -> None:
    """T44, and https://github.com/flashinfer-ai/flashinfer/issues/5064: lib64, unversioned names, the driver."""
    driver = tmp_path / "libcuda.so.1"
    driver.write_text("driver")
    home = made(environment, str(driver))
    for name, content in {
        "bin/nvcc": "bin/nvcc",
        "include/cuda_runtime.h": "include/cuda_runtime.h",
        "nvvm/bin/cicc": "nvvm/bin/cicc",
        "lib64/libcudart.so": "lib/libcudart.so.13",
        "lib64/libcudart.so.13": "lib/libcudart.so.13",
        "lib64/libcudart_static.a": "lib/libcudart_static.a",
        "lib64/libnvrtc.so": "lib/libnvrtc.so.13",
        "lib64/libnvrtc-builtins.so": "lib/libnvrtc-builtins.so.13.0",
        "lib/libnvvm.so": "lib/libnvvm.so.4",
        "lib64/stubs/libcuda.so": "driver",
    }.items():
        assert (home / name).read_text() == content, name


def test_making_it_again_changes_nothing_and_mends_what_is_wrong(environment: Path) -> None:
    home = made(environment, None)
    before = installed_links(home)
    assert "lib64/stubs/libcuda.so" not in before
    assert installed_links(made(environment, None)) == before
    (home / "lib64/libcudart.so").unlink()
    (home / "lib64/libcudart.so").symlink_to("/nowhere")
    (home / "lib64/libold.so.1").write_text("of a former lock")
    assert installed_links(home) != before
    assert installed_links(made(environment, None)) == before


def test_an_environment_without_a_compiler_is_none(tmp_path: Path) -> None:
    (tmp_path / "venv/lib/python3.12/site-packages/nvidia/cu13/lib").mkdir(parents=True)
    assert toolkit_folder(str(tmp_path)) is None


def test_the_drivers_library_is_that_of_this_machine() -> None:
    assert driver_library(LDCONFIG) == "/lib/x86_64-linux-gnu/libcuda.so.1"
    arm = "\tlibcuda.so.1 (libc6,AArch64) => /usr/lib/aarch64-linux-gnu/libcuda.so.1\n"
    assert driver_library(arm) == "/usr/lib/aarch64-linux-gnu/libcuda.so.1"
    assert driver_library("0 libs found") is None
