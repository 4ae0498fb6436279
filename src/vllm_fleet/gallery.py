"""docs/layouts.md: what the planner chooses for every model on the usual hosts.

`python -m vllm_fleet.gallery` writes it; it is reviewed by hand, so that every change of a rule shows as a difference.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from vllm_fleet import catalog, explain, whatif
from vllm_fleet.errors import NoFeasibleLayoutError
from vllm_fleet.options import DEFAULT_VLLM_VERSION, OBJECTIVES, Options
from vllm_fleet.plan import make_plan

HOSTS = (
    "8x RTX PRO 6000 Blackwell Server",
    "4x RTX PRO 6000 Blackwell Server",
    "2x RTX PRO 6000 Blackwell Server",
    "8x B200",
    "8x H200",
    "8x H100",
    "4x H100",
    "8x A100",
    "8x L40S",
)


INTRODUCTION = f"""# Layouts

What the planner chooses with vLLM {DEFAULT_VLLM_VERSION} for {Options.expected_concurrency} requests at once, every
other option at its default, on hosts that nobody has probed: up to four GPUs on one NUMA node, eight on two; NVLink
among all H100, H200, B200 and A100, PCIe among the others. Each cell is layout, context in tokens, and estimated tokens
per second for one request / for all of them.

TP is tensor, PP pipeline and DP data parallel; EP keeps experts whole; DCP spreads the tokens of the KV cache over so
many ranks. `python -m vllm_fleet.gallery > docs/layouts.md` writes this page, and a test compares, so that a changed
rule shows as a difference to review.
"""


class Shown(NamedTuple):
    """One plan of the page, or why there is none."""

    host: str
    card: str
    objective: str
    plan: dict[str, Any] | None
    why_not: str | None


def plans() -> Iterator[Shown]:
    """Every model on every host for every objective."""
    cards = [card for name in catalog.known_cards() if not (card := catalog.read_card(name)).get("lab")]
    for host in HOSTS:
        facts = whatif.host(host)
        for card in cards:
            for objective in OBJECTIVES:
                try:
                    plan = make_plan(facts, card, {"objective": objective}).to_dict()
                    yield Shown(host, card["name"], objective, plan, None)
                except NoFeasibleLayoutError as error:
                    yield Shown(host, card["name"], objective, None, str(error))


def command_lines(shown: Iterable[Shown]) -> list[list[str]]:
    """Every argument list that these plans hold, and those of two kinds of split that no cell of the page has."""
    made = [entry.plan for entry in shown if entry.plan]
    many = {"expected_concurrency": 256}
    made.append(make_plan(whatif.host("8x H200"), catalog.read_card("deepseek_v3_2"), many).to_dict())
    made.append(make_plan(whatif.host("3x RTX PRO 6000"), catalog.read_card("minimax_m2_5"), {}).to_dict())
    return [list(args) for args in sorted({tuple(replica["args"]) for plan in made for replica in plan["replicas"]})]


def render(shown: list[Shown]) -> str:
    """The page."""
    lines = [INTRODUCTION]
    for host in HOSTS:
        lines += [f"## {host}", "", f"| model | {' | '.join(OBJECTIVES)} |", f"|---|{'---|' * len(OBJECTIVES)}"]
        by_card: dict[str, list[str]] = {}
        for entry in shown:
            if entry.host == host:
                by_card.setdefault(entry.card, []).append(_cell(entry))
        for card, cells in by_card.items():
            row = [cells[0], *("same" if cell == cells[0] else cell for cell in cells[1:])]
            lines.append(f"| {card} | {' | '.join(row)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(entry: Shown) -> str:
    if entry.plan is None:
        return f"no: {_needs(entry.why_not or '')}"
    replica = entry.plan["replicas"][0]
    estimates = [r["expected"]["decode_tokens_per_second"] for r in entry.plan["replicas"]]
    speed = f"{min(e['single'] for e in estimates):,.0f} / {sum(e['at_concurrency'] for e in estimates):,.0f}"
    return f"**{explain.layout_text(entry.plan['layout'])}**, {replica['max_model_len']:,}, {speed}"


def _needs(reason: str) -> str:
    """A refusal in a few words: what would fit, or what no number of such GPUs changes."""
    _, fits, rest = reason.partition("What would fit: ")
    if fits:
        return rest.partition(", with")[0]
    _, unusable, rest = reason.partition("is left out: ")
    return rest.partition(". GPU")[0].rstrip(".") if unusable else "no number of them would do"


if __name__ == "__main__":
    sys.stdout.write(render(list(plans())))
