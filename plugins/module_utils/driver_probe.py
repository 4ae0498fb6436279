"""Reads what a driver change depends on: packages, holds, locks, timers, kernels, GPUs. Never decides, changes nothing.

Standard library only, Python 3.9: this runs on target hosts.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import subprocess
import time
from pathlib import Path
from typing import Any, Optional, Sequence

from .host_probe import pci_gpus
from .kernel_modules import MISSING_PROGRAM, Run, probe_kernels
from .listeners import unit_from_cgroup

__all__ = [
    "APT_TIMERS",
    "dpkg_state",
    "is_driver_package",
    "lock_holders",
    "policy_origins",
    "read_driver_host",
    "read_repositories",
    "run_patiently",
    "upstream_version",
    "wait_for_locks",
]

APT_TIMERS = ("apt-daily.timer", "apt-daily-upgrade.timer")
_LOCKS = (
    "var/lib/dpkg/lock-frontend",
    "var/lib/dpkg/lock",
    "var/lib/apt/lists/lock",
    "var/cache/apt/archives/lock",
)

# Names of the driver's packages in NVIDIA's repositories, Debian and Ubuntu.
_FAMILY = re.compile(
    r"(?:lib)?nvidia-.+|libcuda1|libcudadebugger1|libnvcuvid1|libnvoptix1|libnvsdm|firmware-nvidia-.+"
    r"|cuda-drivers(?:-.+)?|linux-(?:modules|objects|signatures)-nvidia-.+|xserver-xorg-video-nvidia(?:-.+)?"
)
# Not of the driver, although the names say so: container and CUDA tools, and helpers with versions of their own.
_STRANGERS = re.compile(
    r"(?:lib)?nvidia-container-.+|libnvidia-(?:egl|ml-dev).*|nvidia-(?:docker|cuda|cudnn|fs|gds|nsight|cg|texture|imex"
    r"|profiler|visual-profiler|detect|modprobe|settings|xconfig"
    r"|driver-pinning|vaapi|primus|openjdk|mig-manager|peermem-loader)(?:-.+)?"
)
_DRIVER_VERSION = re.compile(r"(?:\d+:)?(\d{3}\.\d+(?:\.\d+)?)(?![\d.])")
_KERNEL_PACKAGE = re.compile(
    r"linux-(?:image|headers|modules|modules-extra)-.+|linux-(?:generic|aws|azure|gcp|oracle).*"
)
_SNAPSHOT = "var/lib/vllm-fleet/gpu_driver/previous/manifest.json"
_TOOLS = ("dkms", "mokutil", "openssl")
_REPLICA = re.compile(r"vllm-.+-\d+\.service")


def upstream_version(version: str) -> Optional[str]:
    """The driver's version in a package's: `580.126.09-1ubuntu1` gives `580.126.09`; None when it is none."""
    match = _DRIVER_VERSION.match(version)
    return match[1] if match else None


def is_driver_package(name: str, version: str) -> bool:
    """Whether a package belongs to a driver and moves with its version."""
    if not _FAMILY.fullmatch(name) or _STRANGERS.fullmatch(name):
        return False
    # Prebuilt modules carry the driver's branch in the name and the kernel's number as version.
    return name.startswith("linux-") or upstream_version(version) is not None


def run_patiently(argv: Sequence[str]) -> tuple[int, str, str]:
    """Run a program of this host in the C locale without a deadline: installing a driver compiles for minutes.

    Returns:
        Exit status (127 where there is no such program), standard output, standard error.
    """
    environment = {**os.environ, "LC_ALL": "C", "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
    try:
        done = subprocess.run(
            list(argv), capture_output=True, check=False, env=environment, stdin=subprocess.DEVNULL
        )  # fmt: skip
    except OSError as error:
        return MISSING_PROGRAM, "", str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


# --- dpkg and apt ---------------------------------------------------------------------------------------------------


def dpkg_state(run: Run) -> dict[str, Any]:
    """What dpkg knows of the driver's and the kernels' packages.

    Returns:
        `packages`: the driver's, each with name, version, architecture, held. `kernel_packages`: installed kernels'
        names with held. `tools`: what of a build's tools is installed. `broken`: packages of any kind that dpkg left
        unfinished, as `name: state`.
    """
    fields = "${Package}\t${Version}\t${Architecture}\t${db:Status-Want}\t${db:Status-Status}\t${db:Status-Eflag}\n"
    _, output, _ = run(["dpkg-query", "--show", f"--showformat={fields}"])
    packages, kernels, tools, broken = [], [], [], []
    for line in output.splitlines():
        name, version, architecture, want, status, flag = (line.split("\t") + [""] * 6)[:6]
        if status in ("not-installed", "config-files") or not status:
            continue
        if status != "installed" or flag not in ("ok", ""):
            broken.append(f"{name}: {status}{'' if flag in ('ok', '') else ', ' + flag}")
        record = {"name": name, "version": version, "architecture": architecture, "held": want == "hold"}
        if is_driver_package(name, version):
            packages.append(record)
        elif _KERNEL_PACKAGE.fullmatch(name):
            kernels.append({"name": name, "held": want == "hold"})
        elif name in _TOOLS:
            tools.append(name)
    return {"packages": packages, "kernel_packages": kernels, "tools": tools, "broken": broken}


def policy_origins(output: str) -> dict[str, Optional[str]]:
    """From what repository each installed package came, by `apt-cache policy`; None: no repository has that version."""
    origins: dict[str, Optional[str]] = {}
    name, installed = "", False
    for line in output.splitlines():
        if re.match(r"\S+:$", line):
            name, installed = line[:-1], False
        elif re.match(r" \*\*\* ", line):
            installed = True
            origins[name] = None
        elif re.match(r"     \S", line):
            installed = False
        elif installed and name and origins.get(name) is None:
            source = re.match(r"\s+-?\d+ (\S+://\S+ .*?) Packages$", line)
            origins[name] = source[1] if source else None
    return origins


def lock_holders(root: str = "/", procfs_root: str = "/proc") -> list[dict[str, Any]]:
    """Who holds a lock of dpkg or apt: pid, program, unit and the lock. Needs root to open the locks."""
    holders: dict[int, dict[str, Any]] = {}
    for name in _LOCKS:
        path = Path(root) / name
        try:
            descriptor = os.open(str(path), os.O_RDWR)
        except OSError:
            continue
        try:
            # struct flock of 64-bit Linux: type, whence, start, length, pid.
            wanted = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack("hhqqi", fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))
        except OSError:
            continue
        finally:
            os.close(descriptor)
        if kind == fcntl.F_UNLCK:
            continue
        process = Path(procfs_root) / str(pid)
        program = _text(process / "comm") or "unknown"
        unit = unit_from_cgroup(_text(process / "cgroup") or "")
        said = f"{program} (pid {pid}, unit {unit or 'none'}) holds /{name}"
        holders.setdefault(pid, {"pid": pid, "program": program, "unit": unit, "lock": f"/{name}", "said": said})
    return list(holders.values())


def wait_for_locks(seconds: float, root: str = "/", procfs_root: str = "/proc") -> list[dict[str, Any]]:
    """Wait until nobody holds a lock; returns who still does when the time is over."""
    deadline = time.monotonic() + seconds
    holders = lock_holders(root, procfs_root)
    while holders and time.monotonic() < deadline:
        time.sleep(1)
        holders = lock_holders(root, procfs_root)
    return holders


# --- the rest of the host -------------------------------------------------------------------------------------------


def _text(path: Path) -> Optional[str]:
    try:
        return path.read_bytes().decode("utf-8", "replace").strip()
    except OSError:
        return None


def _distribution(root: Path, run: Run) -> dict[str, Any]:
    pairs = (line.partition("=") for line in (_text(root / "etc/os-release") or "").splitlines())
    release = {name: value.strip("\"'") for name, _, value in pairs}
    _, architecture, _ = run(["dpkg", "--print-architecture"])
    return {
        "id": release.get("ID", ""),
        "version": release.get("VERSION_ID", ""),
        "codename": release.get("VERSION_CODENAME", ""),
        "architecture": architecture.strip(),
    }


def _library(root: Path, run: Run) -> dict[str, Any]:
    """Version of NVIDIA's management library on disk, and whether a package owns it."""
    found = sorted(
        path
        for folder in ("usr/lib/*-linux-gnu", "usr/lib/*-linux-gnu/nvidia/current", "usr/lib64", "usr/lib")
        for path in root.glob(f"{folder}/libnvidia-ml.so.*")
        if re.fullmatch(r"libnvidia-ml\.so\.\d{3}\.[\d.]+", path.name)
    )
    if not found:
        return {"version": None, "packaged": None}
    code, _, _ = run(["dpkg-query", "--search", "/" + str(found[-1].relative_to(root))])
    return {"version": found[-1].name.partition(".so.")[2], "packaged": code == 0}


def _active(run: Run, *patterns: str) -> list[str]:
    """Units that run, start, stop or wait."""
    states = "--state=active,activating,reloading,deactivating"
    _, output, _ = run(["systemctl", "list-units", "--all", "--plain", "--no-legend", states, *patterns])
    return sorted(line.split()[0] for line in output.splitlines() if line.split())


def read_repositories(root: str = "/") -> list[dict[str, Any]]:
    """Source files of apt, with the addresses that they name."""
    folder = Path(root) / "etc/apt"
    files = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]
    found = []
    for path in files:
        lines = [line for line in (_text(path) or "").splitlines() if not line.lstrip().startswith("#")]
        uris = re.findall(r"(?:https?|file|copy)://?\S+", "\n".join(lines))
        if path.suffix in (".list", ".sources") and uris:
            found.append({"file": "/" + str(path.relative_to(root)), "uris": [uri.rstrip("/") for uri in uris]})
    return found


def read_driver_host(
    run: Run,
    *,
    root: str = "/",
    sysfs_root: str = "/sys",
    procfs_root: str = "/proc",
    files: Sequence[str] = (),
) -> dict[str, Any]:
    """Read one host.

    Args:
        run: Runs a command, returns exit code, output and error text.
        root: Where the file system is.
        sysfs_root: Where sysfs is.
        procfs_root: Where procfs is.
        files: Absolute paths whose content is wanted.

    Returns:
        The facts of `driver_facts`; plain JSON types only.
    """
    base = Path(root)
    state = dpkg_state(run)
    names = [package["name"] for package in state["packages"]]
    origins = policy_origins(run(["apt-cache", "policy", *names])[1]) if names else {}
    for package in state["packages"]:
        package["origin"] = origins.get(package["name"])
    version_line = (_text(Path(procfs_root) / "driver/nvidia/version") or "").partition("\n")[0]
    loaded = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", version_line)
    running = _active(run, "vllm-*.service", *APT_TIMERS)
    return {
        "schema": 1,
        "distribution": _distribution(base, run),
        **pci_gpus(sysfs_root),
        **state,
        "kernels": probe_kernels(run, root),
        "loaded_version": loaded[1] if loaded else None,
        "library": _library(base, run),
        "lock_holders": lock_holders(root),
        "timers": [unit for unit in running if unit in APT_TIMERS],
        "serving": [unit for unit in running if _REPLICA.fullmatch(unit)],
        "repositories": read_repositories(root),
        "snapshot": _snapshot(base),
        "boot_id": _text(Path(procfs_root) / "sys/kernel/random/boot_id"),
        "files": {path: _text_exact(base / path.lstrip("/")) for path in files},
    }


def _snapshot(root: Path) -> Optional[dict[str, Any]]:
    """What an unfinished change has kept of the host as it was: whether the driver worked then."""
    try:
        kept = json.loads((root / _SNAPSHOT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return {"worked": bool(kept.get("worked"))}


def _text_exact(path: Path) -> Optional[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
