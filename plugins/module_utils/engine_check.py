"""Whether an engine comes up in its environment. Standard library and the engine's own packages, Python 3.9.

The module `engine_preflight` gives this file to the environment's Python, as the user and with the variables that the
units have, and reads the JSON object in the last line of its output:

    engine_check.py [--build-for CAPABILITY]

`{"version", "tool_parsers", "reasoning_parsers", "built", "problems"}`. With `--build-for 12.0` it also compiles what
every engine on such a GPU compiles at its first start, into the cache where the engine looks for it. That takes a
compiler and no GPU, so a host may be serving meanwhile.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any, Optional

# Where the names are, newest first: vLLM moved its tool parsers in 0.13.
TOOL_PARSERS = (
    ("vllm.tool_parsers", "ToolParserManager"),
    ("vllm.entrypoints.openai.tool_parsers", "ToolParserManager"),
)
REASONING_PARSERS = (("vllm.reasoning", "ReasoningParserManager"),)
CACHES = ("HOME", "XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def registered(places: tuple[tuple[str, str], ...]) -> Optional[list[str]]:
    """Names that the engine's manager lists, or None where no manager is in any of these places."""
    for module, manager in places:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        return sorted(getattr(found, manager).list_registered())
    return None


def unwritable() -> list[str]:
    """Problems of the folders that the engine writes to."""
    problems = []
    for name in CACHES:
        folder = os.environ.get(name)
        try:
            if folder:
                Path(folder).mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            problems.append(f"{name}={folder} cannot be written to: {error.strerror}")
    return problems


def missing_headers() -> list[str]:
    """Triton compiles a launcher against Python's headers at the engine's first start."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.exists():
        return []
    version = sysconfig.get_python_version()
    return [f"there is no {header}, which Triton compiles with: install python{version}-dev"]


def build(capability: str) -> dict[str, Any]:
    """Compile FlashInfer's sampling kernels for a compute capability ("12.0"); {name, capability, seconds}.

    Every engine on CUDA samples with them. Which attention and expert kernels it takes besides depends on model and
    GPU, and only a start with the GPU knows.
    """
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = capability  # else it asks the driver
    started = time.monotonic()
    sampling = importlib.import_module("flashinfer.jit.sampling")
    sampling.gen_sampling_module().build(verbose=False)
    return {"name": "flashinfer sampling", "capability": capability, "seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    """Print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--build-for")
    options = parser.parse_args()
    problems = unwritable() + missing_headers()
    version = importlib.import_module("vllm").__version__
    result = {
        "version": version,
        "tool_parsers": registered(TOOL_PARSERS),
        "reasoning_parsers": registered(REASONING_PARSERS),
        "built": build(options.build_for) if options.build_for and not problems else None,
        "problems": problems,
    }
    print(json.dumps(result), flush=True)  # noqa: T201  this is how it answers


if __name__ == "__main__":
    main()
