"""Small real wheels, and locks of them, for tests that install with the real uv."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def build_wheel(
    folder: Path, name: str, version: str, files: dict[str, str], listed_sizes: dict[str, int] | None = None
) -> Path:
    """Write a pure wheel with these files (path in site-packages: text) and return its path.

    `listed_sizes` are what its RECORD says of some files instead of their size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    members = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    sizes = {path: len(text) for path, text in members.items()} | (listed_sizes or {})
    record = [f"{path},sha256={_digest(text)},{sizes[path]}" for path, text in members.items()]
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in (members | {f"{info}/RECORD": "\n".join([*record, f"{info}/RECORD,,"]) + "\n"}).items():
            archive.writestr(path, text)
    return wheel


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def lock_of(*wheels: Path, header: str = "") -> str:
    """Return a lock that names these wheels with their hashes."""
    lines = []
    for wheel in sorted(wheels):
        name, version, *_ = wheel.name.split("-")
        lines.append(f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    return header + "".join(lines)
