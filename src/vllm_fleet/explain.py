"""A plan in words: one sentence per decision, and a picture of it that fits one screen of a terminal."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_fleet import memory
from vllm_fleet.catalog import Card
from vllm_fleet.layout import Layout
from vllm_fleet.objective import Candidate
from vllm_fleet.options import Options
from vllm_fleet.placement import farthest_link
from vllm_fleet.target.gpu_topology import format_ranges
from vllm_fleet.topology import Topology

if TYPE_CHECKING:
    from vllm_fleet.plan import Replica

WIDTH = 100
BAR_WIDTH = 40


def sentences(
    host: Topology,
    card: Card,
    options: Options,
    *,
    chosen: Candidate,
    replicas: "Sequence[Replica]",
    engine_reasons: Sequence[str],
) -> Iterator[str]:
    """Explain a plan, one sentence or two per decision, each with its numbers."""
    yield f"The host has {describe_gpus(host)}."
    yield (
        f"{_count(chosen.replicas, 'replica')} of {_count(chosen.layout.ranks, 'GPU')} as {chosen.layout}, for "
        f"{options.objective} at {options.expected_concurrency} requests at once."
    )
    if chosen.layout.tensor_parallel > 1:
        yield _all_reduce(host, card, chosen)
    yield _cpu_memory(replicas[0]) if options.accelerator == "cpu" else _gpu_memory(host, chosen, replicas[0])
    yield _context(card, replicas[0])
    for replica in replicas:
        nodes = " and ".join(map(str, replica.place.numa_nodes))
        where = f"NUMA node {nodes}, " if nodes else ""
        yield f"{replica.name} takes GPU {format_ranges(list(replica.gpu_indices))}: {where}{replica.place.reason}."
    yield from engine_reasons
    rate = "measured" if host.disk_read_mib_s else "assumed, not measured"
    yield (
        f"A start takes about {replicas[0].start_seconds} s: {card.checkpoint_gib:g} GiB of weights at "
        f"{host.read_mib_s:g} MiB/s ({rate}), then compiling. The first builds kernels, which may take minutes more."
    )
    yield _speed(chosen, replicas[0])


def describe_gpus(host: Topology) -> str:
    """The host's GPUs by kind and NUMA node."""
    text = ", ".join(f"{count} x {name}" for name, count in Counter(gpu.name for gpu in host.gpus).items())
    nodes = Counter(gpu.numa_node for gpu in host.gpus)
    if None in nodes:
        return f"{text}; the NUMA node of {nodes[None]} of them is unknown"
    split = " + ".join(str(nodes[n]) for n in sorted(n for n in nodes if n is not None))
    return f"{text} on {_count(len(nodes), 'NUMA node')} ({split})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _all_reduce(host: Topology, card: Card, chosen: Candidate) -> str:
    link = farthest_link(host, chosen.groups[0][0].members)
    kind = "Grouped-query" if card.attention == "gqa" else "Latent"
    named = {None: "links the host did not tell", "NV": "NVLink", "SYS": "PCIe and the socket link"}
    return (
        f"Each of the {card.shape.num_hidden_layers} layers all-reduces twice, after attention and after its "
        f"{'experts' if card.shape.num_experts else 'feed-forward part'}, among {chosen.layout.tensor_parallel} ranks "
        f"over {named.get(link, f'PCIe ({link})')}. {kind} attention shrinks the KV cache, it does "
        "not remove these."
    )


def _gpu_memory(host: Topology, chosen: Candidate, replica: "Replica") -> str:
    fit, gpu = replica.footprint, host.gpus[chosen.groups[0][0].members[0]]
    total = memory.cuda_total_gib(gpu.memory_total_mib or 0, gpu.memory_reserved_mib)
    return (
        f"CUDA sees {total:.1f} GiB of a GPU. The engine takes {replica.settings.gpu_memory_utilization} of it, "
        f"{fit.budget_gib:.1f} GiB, and leaves {total - fit.budget_gib:.1f} for the CUDA context and NCCL. "
        f"{fit.weights_gib:.1f} GiB of weights and {fit.overhead_gib:.1f} of overhead leave {fit.kv_cache_gib:.1f} GiB "
        f"of KV cache: {fit.kv_cache_tokens:,} tokens at {fit.kv_bytes_per_token:,} bytes per token."
    )


def _speed(chosen: Candidate, replica: "Replica") -> str:
    estimate = replica.estimate
    if estimate is None:
        return "Decode speed is not estimated."
    return (
        f"Estimated by a roofline (median error {estimate['error_pct']} % on known reports, nine of ten within "
        f"{estimate['error_p90_pct']} %): {estimate['single']:,.0f} tokens/s for one request, "
        f"{chosen.together or 0:,.0f} for all replicas with {chosen.requests} each"
        f"{', drafted tokens not counted' if replica.settings.speculative else ''}."
    )


def _cpu_memory(replica: "Replica") -> str:
    fit = replica.footprint
    return (
        f"On CPUs each replica takes about {fit.budget_gib:.1f} GiB of host memory: {fit.weights_gib:.3f} GiB of "
        f"weights, {fit.overhead_gib:.1f} for the engine's processes, {fit.kv_cache_gib:.0f} of KV cache "
        f"({fit.kv_cache_tokens:,} tokens)."
    )


def _context(card: Card, replica: "Replica") -> str:
    full, planned = card.shape.max_position_embeddings, replica.settings.max_model_len
    if planned < full:
        return (
            f"Context is cut from {full:,} to {planned:,} tokens: one request may not be longer than the KV cache of "
            "the smallest replica."
        )
    return (
        f"The full context of {full:,} tokens fits {replica.footprint.kv_cache_tokens / full:.1f} times into a replica."
    )


def render(plan: Mapping[str, Any]) -> str:
    """The plan as text for a terminal.

    Args:
        plan: As `Plan.to_dict()` gives it.
    """
    lines = [
        f"{plan['model']['id']} with vLLM {plan['vllm_version']} ({plan['accelerator']}), for {plan['objective']}",
        "",
        *_table(plan["replicas"]),
        "",
        *_bars(plan["replicas"][0]),
    ]
    for heading, items in (
        ("Why", plan["explanation"]),
        ("Warnings", plan["warnings"]),
        ("Not taken", [f"{layouts} ({rule}): {reason}" for layouts, rule, reason in refusals(plan["rejected"])]),
    ):
        if items:
            lines += ["", heading, *bullets(items)]
    return "\n".join(lines)


def render_error(message: str, reasons: Sequence[str]) -> str:
    """A refusal: its paragraph, and every reason that the paragraph does not hold already."""
    lines = [textwrap.fill(message, WIDTH)]
    rest = [reason for reason in reasons if reason not in message]
    return "\n".join([*lines, *bullets(rest)])


def _table(replicas: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [("replica", "GPUs", "NUMA", "CPUs", "memory", "port", "context")]
    rows += [
        (
            replica["name"],
            format_ranges(replica["gpu_indices"]),
            format_ranges(replica["numa_nodes"]) or "unknown",
            replica["cpus"] or "any",
            replica["memory_policy"],
            str(replica["port"]),
            f"{replica['max_model_len']:,}",
        )
        for replica in replicas
    ]
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


class MemoryPart(NamedTuple):
    """A part of a GPU's memory, and the character that draws it."""

    name: str
    gib: float
    mark: str


def memory_parts(replica: Mapping[str, Any]) -> list[MemoryPart]:
    """How a replica divides each of its GPUs; the last part is left out, where the engine goes by a fraction."""
    expected, fraction = replica["expected"], replica["gpu_memory_utilization"]
    parts = [
        MemoryPart("weights", expected["weights_gib"], "#"),
        MemoryPart("overhead", expected["overhead_gib"], "+"),
        MemoryPart("KV cache", expected["kv_cache_gib"], "="),
    ]
    if fraction:
        budget = sum(part.gib for part in parts)
        parts.append(MemoryPart("left out", budget / fraction - budget, "."))
    return parts


def _bars(replica: Mapping[str, Any]) -> list[str]:
    parts, expected = memory_parts(replica), replica["expected"]
    total = sum(part.gib for part in parts)
    bar = "".join(part.mark * round(BAR_WIDTH * part.gib / total) for part in parts)
    legend = "  ".join(f"{part.mark} {part.name} {part.gib:.1f}" for part in parts)
    return [
        f"  per GPU [{bar}] {total:.1f} GiB",
        f"          {legend}",
        (
            f"  per replica {expected['kv_cache_tokens']:,} tokens of KV cache, "
            f"{expected['full_length_requests']:.2f} requests of full length"
        ),
    ]


def bullets(items: Iterable[str]) -> list[str]:
    """A list of wrapped sentences."""
    return [textwrap.fill(item, WIDTH, initial_indent="  - ", subsequent_indent="    ") for item in items]


def layout_text(layout: Mapping[str, Any]) -> str:
    """A plan's layout as people say it: "2 x TP4"."""
    return f"{layout['replicas']} x {Layout(**{key: value for key, value in layout.items() if key != 'replicas'})}"


def refusals(rejected: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """The layouts a reader would ask about with rule and reason, widest first; those with one reason share a row.

    Pipeline, data and context parallel splits are in the JSON only.
    """
    by_reason: dict[tuple[str, str], list[Layout]] = {}
    for entry in rejected:
        layout = Layout(**entry["layout"])
        if layout.pipeline_parallel == layout.data_parallel == layout.decode_context_parallel == 1:
            by_reason.setdefault((entry["rule"], entry["reason"]), []).append(layout)
    widest = sorted(by_reason.items(), key=lambda item: -item[1][0].tensor_parallel)
    return [(", ".join(map(str, layouts)), rule, reason) for (rule, reason), layouts in widest]
