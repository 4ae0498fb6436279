"""A CUDA_HOME made of links to the CUDA wheels of a Python environment.

The wheels hold a complete compiler, but laid out as run-time builds do not look for it: they link with
`-L$CUDA_HOME/lib64 -lcudart` and `-L$CUDA_HOME/lib64/stubs -lcuda`, while the wheels have `lib`, only versioned library
names, and no driver library (https://github.com/flashinfer-ai/flashinfer/issues/5064).

Standard library only, Python 3.9: this runs on target hosts.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Optional

__all__ = ["driver_library", "installed_links", "set_links", "toolkit_folder", "wanted_links"]


def toolkit_folder(environment: str) -> Optional[Path]:
    """Where an environment's wheels put CUDA: the folder with `bin/nvcc`, the newest where there are several."""
    found = Path(environment).glob("venv/lib/python3*/site-packages/nvidia/cu*/bin/nvcc")
    return max((path.parent.parent for path in found), default=None)


def driver_library(ldconfig: str) -> Optional[str]:
    """The driver's library that programs load, from what `ldconfig -p` prints; None where there is no driver."""
    match = re.search(r"^\s*libcuda\.so\.1 \(libc6,(?:x86-64|AArch64)[^)]*\) => (\S+)", ldconfig, re.MULTILINE)
    return match[1] if match else None


def wanted_links(toolkit: Path, libcuda: Optional[str]) -> dict[str, str]:
    """What a CUDA_HOME consists of: target by path inside it.

    Each library is there under its name in the wheel, and without its version, which is what a linker looks for.
    """
    links = {name: str(toolkit / name) for name in ("bin", "include", "nvvm")}
    links["lib"] = "lib64"
    for library in sorted((toolkit / "lib").iterdir()):
        links[f"lib64/{library.name}"] = str(library)
        unversioned = re.match(r"(lib[^.]+\.so)\.\d", library.name)
        if unversioned:
            links.setdefault(f"lib64/{unversioned[1]}", library.name)
    if libcuda:
        links["lib64/stubs/libcuda.so"] = libcuda
    return links


def installed_links(home: Path) -> dict[str, str]:
    """What is there now, as `wanted_links` would say it; anything else than a link has an empty target."""
    found = {}
    for folder, folders, files in os.walk(home):
        for name in [*folders, *files]:
            path = Path(folder, name)
            if path.is_symlink() or not path.is_dir():
                found[str(path.relative_to(home))] = os.readlink(path) if path.is_symlink() else ""  # noqa: PTH115
    return found


def set_links(home: Path, links: dict[str, str]) -> None:
    """Make a CUDA_HOME have these links and no others."""
    for path in installed_links(home).items() - links.items():
        (home / path[0]).unlink()
    for name, target in links.items() - installed_links(home).items():
        link = home / name
        link.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        link.symlink_to(target)
