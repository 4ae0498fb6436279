"""Write small packages in the shape of vLLM, and locks of them, for what would take minutes with the real one.

The engine is the stand-in of the scenario numa_vm. Usage: make_small_locks.py FOLDER, which gets `small/` (wheels) and
`locks-first/`, `locks-second/`, `locks-third/`: vllm_runtime_locks_folder at three moments.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

SCENARIO = Path(__file__).resolve().parents[1]
ROOT = SCENARIO.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "unit"))

from wheels import build_wheel, lock_of  # noqa: E402  its folder is on no path

MANAGER = "class {0}:\n    @classmethod\n    def list_registered(cls):\n        return ['minimax_m2']\n"
ENGINE = (SCENARIO.parent / "numa_vm" / "files" / "vllm").read_text().partition("\n")[2]


def vllm(folder: Path, version: str) -> Path:
    """Build an engine's wheel."""
    return build_wheel(
        folder,
        "vllm",
        version,
        {
            "vllm/__init__.py": f"__version__ = {version!r}\n",
            "vllm/tool_parsers.py": MANAGER.format("ToolParserManager"),
            "vllm/reasoning.py": MANAGER.format("ReasoningParserManager"),
            f"vllm-{version}.data/scripts/vllm": f"#!python\n{ENGINE}",
        },
    )


folder = Path(sys.argv[1])
shutil.rmtree(folder / "small", ignore_errors=True)
engines = {version: vllm(folder / "small", f"{version}+cpu") for version in ("0.31.0", "0.32.0")}
for moment, common_version in (("first", "1.0"), ("second", "2.0"), ("third", "3.0")):
    common = build_wheel(folder / "small", "common", common_version, {"common.py": f"VERSION = {common_version!r}\n"})
    locks = folder / f"locks-{moment}"
    locks.mkdir(exist_ok=True)
    shutil.copy(ROOT / "roles/vllm_runtime/files/locks/uv.txt", locks)
    for version, engine in engines.items():
        (locks / f"vllm-{version}-cpu-cp311-x86_64.txt").write_text(lock_of(engine, common))
