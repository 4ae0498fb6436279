"""Copies files from one folder to another under partial names first: `copy_files.py FROM TO NAME...`.

A process of its own, so that a watchdog can end it where a mount hangs. Standard library, Python 3.9.
"""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_AT_A_TIME = 4


def copy(source: Path, destination: Path) -> None:
    """Copy one file; under its own name it is whole."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.with_name(f"{destination.name}.incomplete")
    shutil.copyfile(source, partial)
    partial.replace(destination)


def main(arguments: list[str]) -> None:
    """Copy what is named."""
    source, destination, *names = arguments
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        for done in [pool.submit(copy, Path(source) / name, Path(destination) / name) for name in names]:
            done.result()


if __name__ == "__main__":
    main(sys.argv[1:])
