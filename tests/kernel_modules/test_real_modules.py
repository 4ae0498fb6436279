"""NVIDIA's open modules as Debian 13 really builds them, by dkms, for two real kernels; no running kernel is needed.

lab/build_nvidia_modules makes the root folder, with everything installed by its packages' own scripts. Each test
leaves it as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_fleet.target.kernel_modules import probe_kernels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

REPOSITORY = Path(__file__).resolve().parent.parent.parent
ROOT = REPOSITORY / ".cache" / "lab" / "nvidia_modules" / "root"
MODULE = "nvidia-current-open"
NEWER = "999.99"


def run(argv: Sequence[str]) -> tuple[int, str, str]:
    done = subprocess.run([REPOSITORY / "lab" / "in_root", ROOT, *argv], check=False, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def probe() -> dict[str, Any]:
    return probe_kernels(run, str(ROOT))


def kernels() -> dict[str, dict[str, Any]]:
    """The two kernels by flavour."""
    bootable = [kernel for kernel in probe()["kernels"] if kernel["bootable"]]
    return {"cloud" if kernel["release"].endswith("-cloud-amd64") else "standard": kernel for kernel in bootable}


def module_of(kernel: dict[str, Any]) -> Path:
    return ROOT / kernel["nvidia"]["path"].lstrip("/")


def version() -> str:
    (source,) = (ROOT / "usr" / "src").glob(f"{MODULE}-[0-8]*")
    return source.name.removeprefix(f"{MODULE}-")


@contextlib.contextmanager
def moved_away(path: Path) -> Iterator[None]:
    away = path.with_name(path.name + ".away")
    path.rename(away)
    try:
        yield
    finally:
        away.rename(path)


@pytest.fixture
def newer_source() -> Iterator[None]:
    """The same source as a newer version, so that a build of it is an upgrade."""
    sources = ROOT / "usr" / "src"
    newer = sources / f"{MODULE}-{NEWER}"
    shutil.copytree(sources / f"{MODULE}-{version()}", newer, copy_function=os.link)
    settings = newer / "dkms.conf"
    text = settings.read_text().replace(f'PACKAGE_VERSION="{version()}"', f'PACKAGE_VERSION="{NEWER}"')
    settings.unlink()  # the hard link, not the file
    settings.write_text(text)
    try:
        yield
    finally:
        run(["dkms", "remove", f"{MODULE}/{NEWER}", "--all"])
        shutil.rmtree(newer)


def test_both_kernels_have_a_proven_module() -> None:
    found = probe()
    assert [entry for entry in found["problems"] if entry["severity"] == "error"] == []
    assert set(kernels()) == {"standard", "cloud"}
    for kernel in kernels().values():
        release = kernel["release"]
        module = kernel["nvidia"]
        assert module == {
            "version": version(),
            "licence": "Dual MIT/GPL",
            "signer": "DKMS module signing key",
            "path": f"/lib/modules/{release}/updates/dkms/{MODULE}.ko.xz",
            "vermagic": f"{release} SMP preempt mod_unload modversions",
            "open": True,
        }
        assert kernel["dkms"] == [{"module": MODULE, "version": version(), "state": "installed"}]
        assert kernel["headers"] == "installed"
        assert kernel["image_package"] == f"linux-image-{release}"
    assert found["mok"]["certificate"] == "/var/lib/dkms/mok.pub"
    # Debian's package brings a blacklist line, which alone is no block.
    assert found["blocked"] == {"nouveau": False, "nova_core": False, "nova_drm": False}


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("usr/src/linux-headers-{release}/include/generated/autoconf.h", "autoconf.h"),
        ("usr/bin/x86_64-linux-gnu-gcc-14", "gcc-14"),
    ],
)
@pytest.mark.usefixtures("newer_source")
def test_a_failed_build_leaves_the_former_module_and_is_broken(missing: str, said: str) -> None:
    before = kernels()
    release = before["cloud"]["release"]
    contents = {flavour: hashlib.sha256(module_of(kernel).read_bytes()) for flavour, kernel in before.items()}
    with moved_away(ROOT / missing.format(release=release)):
        status, output, error = run(["dkms", "install", f"{MODULE}/{NEWER}", "-k", release])
        assert status != 0, output + error
    after = kernels()
    for flavour, kernel in after.items():
        assert kernel["nvidia"] == before[flavour]["nvidia"]
        assert hashlib.sha256(module_of(kernel).read_bytes()).digest() == contents[flavour].digest()
        assert {"module": MODULE, "version": version(), "state": "installed"} in kernel["dkms"]
    assert {"module": MODULE, "version": NEWER, "state": "broken"} in after["cloud"]["dkms"]
    assert {"module": MODULE, "version": NEWER, "state": "added"} in after["standard"]["dkms"]
    (problem,) = [entry for entry in probe()["problems"] if entry["severity"] == "error"]
    assert problem["code"] == "dkms_broken"
    assert release in problem["message"]
    assert said in problem["message"]


def test_headers_that_are_gone_are_missing_or_available() -> None:
    release = kernels()["cloud"]["release"]
    with moved_away(ROOT / f"usr/src/linux-headers-{release}"):
        # The package is installed as far as apt knows, so what helps is to install it again.
        assert kernels()["cloud"]["headers"] == "missing"
    assert kernels()["cloud"]["headers"] == "installed"


def test_an_installed_module_that_was_replaced_is_broken() -> None:
    found = kernels()
    module = module_of(found["cloud"])
    with moved_away(module):
        shutil.copy(module_of(found["standard"]), module)
        assert [entry["state"] for entry in kernels()["cloud"]["dkms"]] == ["broken"]
        assert {entry["code"] for entry in probe()["problems"]} >= {"dkms_broken", "module_of_other_kernel"}
        module.unlink()
    assert [entry["state"] for entry in kernels()["cloud"]["dkms"]] == ["installed"]
