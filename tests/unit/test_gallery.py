"""docs/layouts.md is what the planner says, and the engine accepts every command line on it."""

import functools
from pathlib import Path

from vllm_fleet import gallery

ROOT = Path(__file__).resolve().parents[2]


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


def test_data_parallel_attention_and_stages_are_among_the_command_lines() -> None:
    flags = {argument for arguments in gallery.command_lines(shown()) for argument in arguments}
    assert {"--data-parallel-size", "--pipeline-parallel-size"} <= flags
