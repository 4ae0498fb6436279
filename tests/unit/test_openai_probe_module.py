"""The module through real Ansible, in a playbook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai_server import KEY, MODEL, OpenAIServer

from vllm_fleet.target.openai_client import CHECKS

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
UNIT = "vllm-tiny-0.service"


def run_module(folder: Path, arguments: dict[str, Any], *options: str) -> dict[str, Any]:
    """Result of one task, run at the verbosity where Ansible shows what modules were called with, but not the key."""
    config, playbook = folder / "ansible.cfg", folder / "playbook.yml"
    config.touch()  # Ansible's defaults, whatever this machine's configuration says
    key = "{{ lookup('ansible.builtin.env', 'PROBED_KEY') }}"
    task = {"name": "Probe", "openai_probe": {"model": MODEL, "api_key": key, **arguments}}
    playbook.write_text(json.dumps([{"name": "Probe", "hosts": "all", "gather_facts": False, "tasks": [task]}]))
    environment = {
        **os.environ,
        "ANSIBLE_LIBRARY": str(PLUGINS / "modules"),
        "ANSIBLE_MODULE_UTILS": str(PLUGINS / "module_utils"),
        "ANSIBLE_CONFIG": str(config),
        "ANSIBLE_NOCOLOR": "1",
        "PROBED_KEY": KEY,
    }
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "localhost,", "-c", "local", "-vvv"]
    command += ["-e", f"ansible_python_interpreter={sys.executable}", *options, str(playbook)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    output = done.stdout + done.stderr
    assert "=> {" in done.stdout, output
    assert KEY not in output
    result = json.JSONDecoder().raw_decode(done.stdout.partition("=> ")[2])[0]
    return {**result, "failed": done.returncode != 0}


def test_a_served_model_passes_in_check_mode_too_and_changes_nothing(tmp_path: Path) -> None:
    with OpenAIServer() as server:
        contract = {"reasoning": True, "tools": True, "json_schema": True}
        result = run_module(tmp_path, {"url": server.url, "contract": contract}, "--check")
    assert (result["ok"], result["changed"], result["not_checked"]) == (True, False, [])
    assert [row["check"] for row in result["checks"]] == list(CHECKS)
    assert all(row["ok"] for row in result["checks"])
    assert "/v1/completions" in server.requests  # check mode sends the requests all the same


def test_a_server_that_only_looks_healthy_fails_with_one_paragraph(tmp_path: Path) -> None:
    with OpenAIServer("engine_dead") as server:
        checks = ["models", "completion", "chat"]
        result = run_module(tmp_path, {"url": server.url, "unit": UNIT, "retries": 3, "checks": checks})
    assert result["failed"]
    assert not result["ok"]
    assert [row["ok"] for row in result["checks"]] == [True, False, False]
    message = result["msg"]
    assert message.startswith(f"{server.url} does not serve 'tiny'")
    assert "completion, chat: " in message
    assert f"journalctl -u {UNIT}" in message
    assert "\n" not in message


def test_what_cannot_be_checked_is_in_the_result(tmp_path: Path) -> None:
    with OpenAIServer() as server:
        contract = {"reasoning": True, "tools": "forced", "json_schema": True}
        result = run_module(tmp_path, {"url": server.url, "contract": contract})
    assert (result["ok"], result["not_checked"]) == (True, ["tool_call", "tool_call_stream"])
    assert {row["check"]: row["ok"] for row in result["checks"]}["tool_call"] is None


def test_a_broken_contract_fails_the_task(tmp_path: Path) -> None:
    with OpenAIServer("leaks_tags") as server:
        contract = {"reasoning": True, "tools": True, "json_schema": True}
        result = run_module(tmp_path, {"url": server.url, "contract": contract})
    assert result["failed"]
    assert "chat, chat_stream: " in result["msg"]
    assert "left </think> in `content`" in result["msg"]


def test_a_server_that_echoes_the_key_does_not_get_it_into_the_log(tmp_path: Path) -> None:
    with OpenAIServer("leak") as server:
        result = run_module(tmp_path, {"url": server.url})
    assert "answered 400: cannot use Bearer [key]" in result["msg"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"api_key": ""}, "api_key"),
        ({"contract": {"reasoning": True, "tools": "at times", "json_schema": True}}, "contract"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"checks": []}, "checks"),
    ],
)
def test_bad_input_is_refused_before_any_request(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    with OpenAIServer() as server:
        result = run_module(tmp_path, {"url": server.url, **changes})
    assert result["failed"]
    assert result["msg"].startswith(f"{word}: ")
    assert server.requests == []


def test_the_documentation_lists_the_registered_checks() -> None:
    text = (PLUGINS / "modules" / "openai_probe.py").read_text(encoding="utf-8")
    option = yaml.safe_load(text.split('DOCUMENTATION = r"""')[1].split('"""')[0])["options"]["checks"]
    assert option["choices"] == option["default"] == list(CHECKS)
