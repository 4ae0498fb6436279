"""Which model suits a host: every card planned on it, side by side."""

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_fleet import explain, memory, speed
from vllm_fleet.catalog import Card
from vllm_fleet.errors import NoFeasibleLayoutError
from vllm_fleet.layout import Layout
from vllm_fleet.placement import farthest_link
from vllm_fleet.plan import make_plan
from vllm_fleet.topology import Topology


def compare(
    topology: Mapping[str, Any], cards: Iterable[Mapping[str, Any]], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Plan every card.

    Returns:
        For each card what distinguishes it: `model`, `attention`, `quantization`, `weights_gib`, and under `plan`
        either null with `why_not`, or the layout, GPUs used, context, full-length requests, bytes per token of KV cache
        and of all-reduces, estimated speeds, and `risks`.

    Raises:
        BadInputError: A card, the topology or an option is wrong.
    """
    host = Topology.from_dict(topology)
    return [_entry(host, topology, card, options) for card in cards]


def _entry(
    host: Topology, topology: Mapping[str, Any], data: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    card = Card.from_dict(data)
    entry: dict[str, Any] = {
        "card": card.name,
        "model": card.id,
        "attention": card.attention,
        "quantization": card.quantization.method,
        "weights_gib": round(memory.weights_gib(card, Layout()), 1),
        "all_reduces_per_token": 2 * card.shape.num_hidden_layers,
        "all_reduce_bytes_per_token": speed.all_reduce_bytes_per_token(card),
        "plan": None,
        "why_not": None,
    }
    try:
        plan = make_plan(topology, data, options).to_dict()
    except NoFeasibleLayoutError as error:
        return entry | {"why_not": str(error)}
    replica, layout = plan["replicas"][0], plan["layout"]
    expected, chosen = replica["expected"], Layout(**{k: v for k, v in layout.items() if k != "replicas"})
    estimates = [r["expected"]["decode_tokens_per_second"] for r in plan["replicas"]]
    known = [e for e in estimates if e]
    entry["plan"] = {
        "layout": f"{layout['replicas']} x {chosen}",
        "gpus": sum(len(r["gpus"]) for r in plan["replicas"]),
        "replicas": layout["replicas"],
        "ranks": chosen.ranks,
        "max_model_len": replica["max_model_len"],
        "full_length_requests": round(sum(r["expected"]["full_length_requests"] for r in plan["replicas"]), 2),
        "kv_cache_dtype": replica["kv_cache_dtype"],
        "kv_bytes_per_token": memory.kv_bytes_per_token(card, chosen, replica["kv_cache_dtype"]),
        "kv_cache_tokens": expected["kv_cache_tokens"] * layout["replicas"],
        "tokens_per_second_single": min((e["single"] for e in known), default=None),
        "tokens_per_second_together": round(sum(e["at_concurrency"] for e in known), 1) if known else None,
        "prefill_tokens_per_second": _prefill(host, card, chosen, replica["gpu_indices"]),
        "risks": _risks(plan["warnings"]),
    }
    return entry


def _prefill(host: Topology, card: Card, layout: Layout, indices: list[int]) -> float | None:
    members = [position for position, gpu in enumerate(host.gpus) if gpu.index in indices]
    rates = host.gpus[members[0]].rates
    if rates is None:
        return None
    place = speed.place_of(rates, farthest_link(host, members))
    return round(speed.prefill_tokens_per_second(card, layout, place))


def _risks(warnings: Iterable[str]) -> list[str]:
    """The plan's warnings that are about this model, not about the host."""
    host_wide = ("Peer-to-peer", "nvidia-smi did not report", "The driver is", "GPU ")
    return [warning for warning in warnings if not warning.startswith(host_wide)]


def render(host: Topology, entries: list[dict[str, Any]], concurrency: int) -> str:
    """Lay the comparison out for a terminal."""
    header = (
        "model", "attention", "weights", "layout", "GPUs", "context", "full-length", "KV B/token", "reduce B/token",
        "tok/s 1", f"tok/s {concurrency}", "prefill",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [header]
    for entry in entries:
        plan = entry["plan"]
        start = (entry["card"], entry["attention"], f"{entry['weights_gib']:.0f} {entry['quantization']}")
        if plan is None:
            rows.append((*start, "does not fit", *[""] * (len(header) - len(start) - 1)))
            continue
        reduced = entry["all_reduce_bytes_per_token"] if plan["ranks"] > 1 else 0
        rows.append(
            (
                *start,
                plan["layout"],
                str(plan["gpus"]),
                f"{plan['max_model_len']:,}",
                f"{plan['full_length_requests']:.1f}",
                f"{plan['kv_bytes_per_token']:,}",
                f"{reduced:,}",
                _figure(plan["tokens_per_second_single"]),
                _figure(plan["tokens_per_second_together"]),
                _figure(plan["prefill_tokens_per_second"]),
            )
        )
    reduces = (
        "Grouped-query and latent attention shrink the KV cache; they do not remove all-reduces: every layer reduces "
        "twice among the ranks, whatever its attention. Fewer ranks per replica make each one shorter, and one rank "
        "needs none."
    )
    speeds = (
        f"Speeds are a roofline's, with a median error of {speed.ERROR_PCT} % on known reports and nine of ten within "
        f"{speed.ERROR_P90_PCT} %: good for ranking, not for promises."
    )
    lines = [explain.describe_gpus(host), "", *explain.columns(rows), "", *explain.bullets((reduces, speeds))]
    for entry in entries:
        reasons = entry["plan"]["risks"] if entry["plan"] else [entry["why_not"]]
        lines += explain.bullets(f"{entry['card']}: {reason}" for reason in reasons)
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}"
