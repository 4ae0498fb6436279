"""The check of an engine, in a process of its own as the module runs it, against packages in the shape of vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from vllm_fleet.target import engine_check

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
MANAGER = "class {0}:\n    @classmethod\n    def list_registered(cls):\n        return {1!r}\n"
FLASHINFER = """
import os, pathlib
class Module:
    def build(self, verbose):
        seen = os.environ['FLASHINFER_CUDA_ARCH_LIST'] + os.environ['CUDA_VISIBLE_DEVICES']
        pathlib.Path(os.environ['HOME'], 'built').write_text(seen)
def gen_sampling_module():
    return Module()
"""


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    """An environment's folder whose Python finds an engine, with its parsers where 0.13 and later have them."""
    folder = tmp_path / "runtime"
    packages = folder / "packages"
    (packages / "vllm").mkdir(parents=True)
    (packages / "vllm" / "__init__.py").write_text("__version__ = '9.9.0'\n")
    (packages / "vllm" / "tool_parsers.py").write_text(MANAGER.format("ToolParserManager", ["hermes", "minimax_m2"]))
    (packages / "vllm" / "reasoning.py").write_text(MANAGER.format("ReasoningParserManager", ["qwen3", "minimax_m2"]))
    (packages / "flashinfer" / "jit").mkdir(parents=True)
    (packages / "flashinfer" / "__init__.py").touch()
    (packages / "flashinfer" / "jit" / "__init__.py").touch()
    (packages / "flashinfer" / "jit" / "sampling.py").write_text(FLASHINFER)
    (folder / "venv" / "bin").mkdir(parents=True)
    python = folder / "venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return folder


def preflight(folder: Path, runtime: Path, *options: str, **arguments: Any) -> dict[str, Any]:
    """Result of the module through real Ansible, as the user who runs the tests."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    user = subprocess.run(["id", "-un"], check=True, capture_output=True, text=True).stdout.strip()
    given = {"runtime": str(runtime), "user": user, "environment": {"HOME": str(home), "PATH": os.environ["PATH"]}}
    playbook, config = folder / "playbook.yml", folder / "ansible.cfg"
    config.touch()
    task = {"name": "Check", "engine_preflight": {**given, **arguments}}
    playbook.write_text(json.dumps([{"name": "Check", "hosts": "all", "gather_facts": False, "tasks": [task]}]))
    environment = {
        **os.environ,
        "ANSIBLE_LIBRARY": str(PLUGINS / "modules"),
        "ANSIBLE_MODULE_UTILS": str(PLUGINS / "module_utils"),
        "ANSIBLE_CONFIG": str(config),
        "ANSIBLE_NOCOLOR": "1",
    }
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "localhost,", "-c", "local", "-v"]
    command += ["-e", f"ansible_python_interpreter={sys.executable}", *options, str(playbook)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert "=> {" in done.stdout, done.stdout + done.stderr
    return dict(json.JSONDecoder().raw_decode(done.stdout.partition("=> ")[2])[0])


MINIMAX = ["--tool-call-parser", "minimax_m2", "--reasoning-parser", "minimax_m2"]


def test_the_engine_is_asked_once_and_its_parsers_are_compared_each_time(tmp_path: Path, runtime: Path) -> None:
    first = preflight(tmp_path, runtime, arguments=[MINIMAX])
    assert first["changed"] is True
    assert first["found"] == {
        "version": "9.9.0",
        "tool_parsers": ["hermes", "minimax_m2"],
        "reasoning_parsers": ["minimax_m2", "qwen3"],
        "built": [],
        "problems": [],
    }
    (runtime / "packages" / "vllm" / "__init__.py").write_text("raise SystemExit('asked again')\n")
    second = preflight(tmp_path, runtime, "--check", arguments=[MINIMAX])
    assert (second["changed"], second["found"]) == (False, first["found"])
    wrong = preflight(tmp_path, runtime, arguments=[MINIMAX, ["--tool-call-parser", "kimi"]])
    assert wrong["msg"].startswith(
        "vLLM 9.9.0 has no tool-call-parser named kimi. It has: hermes, minimax_m2. Set engine.tool_parser"
    )


def test_what_every_engine_compiles_is_compiled_once_without_a_gpu(tmp_path: Path, runtime: Path) -> None:
    result = preflight(tmp_path, runtime, build_for=["12.0"])
    assert [entry["capability"] for entry in result["found"]["built"]] == ["12.0"]
    assert (tmp_path / "home" / "built").read_text() == "12.0"  # and no visible device


def test_an_engine_that_does_not_import_fails_with_what_it_said(tmp_path: Path, runtime: Path) -> None:
    (runtime / "packages" / "vllm" / "__init__.py").write_text("raise ImportError('libcudart.so.13: not found')\n")
    result = preflight(tmp_path, runtime)
    assert "does not come up" in result["msg"]
    assert "libcudart.so.13: not found" in result["msg"]
    assert not (runtime / "preflight").exists()
    checked = preflight(tmp_path, runtime, "--check")
    assert (checked["changed"], checked["found"]) == (True, {})


def test_parsers_are_found_where_older_engines_have_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "vllm" / "entrypoints" / "openai"
    old.mkdir(parents=True)
    for folder in (old, old.parent, old.parent.parent):
        (folder / "__init__.py").touch()
    (old / "tool_parsers.py").write_text(MANAGER.format("ToolParserManager", ["hermes"]))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    assert engine_check.registered(engine_check.TOOL_PARSERS) == ["hermes"]
    assert engine_check.registered(engine_check.REASONING_PARSERS) is None


def test_caches_and_headers_that_are_not_there_are_problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "triton"))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "made"))
    assert engine_check.unwritable() == [
        f"TRITON_CACHE_DIR={tmp_path}/file/triton cannot be written to: Not a directory"
    ]
    assert (tmp_path / "made").is_dir()
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    (problem,) = engine_check.missing_headers()
    assert f"there is no {tmp_path}/Python.h" in problem
    assert f"install python{sys.version_info.major}.{sys.version_info.minor}-dev" in problem
