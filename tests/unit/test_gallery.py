"""docs/layouts.md is what the planner says, and the engine accepts every command line on it."""

import functools
import json
import os
import subprocess
from pathlib import Path

import pytest

from vllm_fleet import catalog, gallery, whatif
from vllm_fleet.plan import make_plan

ROOT = Path(__file__).resolve().parents[2]
# The Python of an environment with the pinned engine; its CPU build has the same command line.
ENGINE_PYTHON = os.environ.get("VLLM_ENGINE_PYTHON")


@functools.cache
def shown() -> tuple[gallery.Shown, ...]:
    return tuple(gallery.plans())


def test_the_page_is_what_the_planner_says() -> None:
    page = (ROOT / "docs" / "layouts.md").read_text(encoding="utf-8")
    assert page == gallery.render(list(shown())), (
        "python -m vllm_fleet.gallery > docs/layouts.md, and review the change"
    )


def test_the_page_holds_plans_of_many_kinds() -> None:
    """What the parser test below is worth: every kind of flag is on some command line."""
    flags = {argument for entry in shown() if entry.plan for argument in entry.plan["replicas"][0]["args"]}
    assert {
        "--decode-context-parallel-size", "--speculative-config", "--enable-expert-parallel", "--kv-cache-dtype",
        "--moe-backend", "--disable-custom-all-reduce", "--language-model-only", "--reasoning-parser",
    } <= flags  # fmt: skip


def test_no_plan_is_refused_for_want_of_a_reason() -> None:
    assert all(len(entry.why_not or "") > 80 for entry in shown() if entry.plan is None)


@pytest.mark.skipif(ENGINE_PYTHON is None, reason="VLLM_ENGINE_PYTHON names no Python with the engine")
def test_the_engine_accepts_every_command_line() -> None:
    plans = [entry.plan for entry in shown() if entry.plan]
    # Two kinds of split that no cell of the page has: data parallel attention, and stages.
    many = {"expected_concurrency": 256}
    plans.append(make_plan(whatif.host("8x H200"), catalog.read_card("deepseek_v3_2"), many).to_dict())
    plans.append(make_plan(whatif.host("3x RTX PRO 6000"), catalog.read_card("minimax_m2_5"), {}).to_dict())
    lists = {tuple(replica["args"]) for plan in plans for replica in plan["replicas"]}
    assert {"--data-parallel-size", "--pipeline-parallel-size"} <= {argument for each in lists for argument in each}
    answer = subprocess.run(
        [str(ENGINE_PYTHON), ROOT / "tests" / "engine" / "accepts_arguments.py"],
        input=json.dumps(sorted(lists)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(answer.stdout.splitlines()[-1]) == []
