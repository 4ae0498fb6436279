"""The filters as Ansible's templating calls them, found where ansible.cfg says they are."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleError
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import filter_loader
from ansible.template import Templar, trust_as_template
from hosts import FIXTURES

REPOSITORY = Path(__file__).resolve().parents[2]
REFERENCE = str(FIXTURES / "captures" / "rtxpro6000-8x-2nodes")
TOO_SMALL = str(FIXTURES / "captures" / "rtxpro6000-2x")


@pytest.fixture(scope="module", autouse=True)
def _filters() -> None:
    filter_loader.add_directory(str(REPOSITORY / "plugins" / "filter"))


def template(expression: str, **variables: Any) -> Any:
    return Templar(loader=DataLoader(), variables=variables).template(trust_as_template(f"{{{{ {expression} }}}}"))


def test_a_capture_becomes_a_plan() -> None:
    plan = template(
        "path | vllm_topology | vllm_plan('minimax_m2_5' | vllm_card, {'first_port': 9001, 'min_context': none})",
        path=REFERENCE,
    )
    assert [(r["gpu_indices"], r["port"]) for r in plan["replicas"]] == [([0, 1, 2, 3], 9001), ([4, 5, 6, 7], 9002)]
    json.dumps(plan)


def test_options_may_be_left_out() -> None:
    assert template("path | vllm_topology | vllm_plan('minimax_m2_5' | vllm_card)", path=REFERENCE)["schema"] == 1


def test_cards_come_from_another_folder(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "models" / "llama_3_3_70b.yml", tmp_path / "mine.yml")
    card = template("'mine' | vllm_card(folder)", folder=str(tmp_path))
    assert (card["name"], card["id"]) == ("mine", "meta-llama/Llama-3.3-70B-Instruct")


def test_a_plan_is_laid_out_in_lines() -> None:
    lines = template("path | vllm_topology | vllm_plan('minimax_m2_5' | vllm_card) | vllm_explain", path=REFERENCE)
    assert lines[0].startswith("MiniMaxAI/MiniMax-M2.5 with vLLM")
    assert any("minimax-m2-5-1" in line for line in lines)
    assert "\n" not in "".join(lines)


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("path | vllm_topology | vllm_plan('minimax_m2_5' | vllm_card)", "What would fit: 4 x NVIDIA RTX PRO 6000"),
        ("'gpt9' | vllm_card", "Known cards"),
        ("'/nowhere' | vllm_topology", "no such file or folder"),
        ("path | vllm_topology | vllm_plan('minimax_m2_5' | vllm_card, {'objectiv': 'x'})", "Unknown plan option"),
    ],
)
def test_errors_are_the_planners_paragraph(expression: str, told: str) -> None:
    with pytest.raises(AnsibleError, match=told):
        template(expression, path=TOO_SMALL)


def test_a_missing_package_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """None in sys.modules is how Python marks a module that cannot be imported."""
    monkeypatch.setitem(sys.modules, "vllm_fleet", None)
    spec = importlib.util.spec_from_file_location("filters", REPOSITORY / "plugins" / "filter" / "vllm_plan.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(AnsibleError, match=r"cannot import the package vllm_fleet .*pip install -e \."):
        module.FilterModule().filters()["vllm_card"]("minimax_m2_5")


@pytest.mark.parametrize("name", ["vllm_plan", "vllm_card", "vllm_topology", "vllm_explain", "fleet_findings"])
def test_every_filter_is_documented(name: str) -> None:
    run = subprocess.run(
        [Path(sys.executable).parent / "ansible-doc", "--json", "-t", "filter", name],
        cwd=REPOSITORY,
        env=os.environ | {"ANSIBLE_FILTER_PLUGINS": str(REPOSITORY / "plugins" / "filter")},
        capture_output=True,
        text=True,
        check=True,
    )
    document = json.loads(run.stdout)[name]
    assert document["doc"]["short_description"]
    assert document["examples"]
    assert document["return"]


def test_an_error_can_be_reported_instead_of_raised() -> None:
    report = template("path | vllm_topology | vllm_plan('minimax_m2_5', on_error='report')", path=TOO_SMALL)
    assert report["error"].startswith("MiniMaxAI/MiniMax-M2.5 does not fit this host")
    assert "minimax_m2_5" in template("{} | vllm_plan('nobody', on_error='report')")["error"]
