"""A plan as one self-contained HTML page: the host and its memory as SVG, the reasons as text; light and dark."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from vllm_fleet import explain
from vllm_fleet.target.gpu_topology import format_ranges
from vllm_fleet.topology import Topology

_CELL, _GAP, _BAR_HEIGHT, _TEXT_HEIGHT = 108, 12, 150, 16  # pixels
_NAME_LENGTH = 15  # what fits under a bar
_LEGEND_CELL = 110
_PART_CLASSES = {"weights": "weights", "overhead": "overhead", "KV cache": "cache", "left out": "left"}

_STYLE = """
:root { color-scheme: light dark;
  --ground: #fbfbf8; --ink: #1c2321; --quiet: #5d6866; --line: #d5dad6; --card: #ffffff;
  --weights: #2f5d8a; --overhead: #b8862d; --cache: #3f8f6b; --left: #e3e7e3; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #14191a; --ink: #e4e9e6; --quiet: #98a5a1; --line: #323c3c; --card: #1c2324;
  --weights: #6d9fd0; --overhead: #d9ab55; --cache: #62b78f; --left: #2a3334; } }
body { background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 0; }
main { max-width: 68rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p.lead { color: var(--quiet); margin: 0 0 1.5rem; }
.figures { display: flex; flex-wrap: wrap; gap: .75rem; padding: 0; margin: 0 0 1.5rem; list-style: none; }
.figures li { background: var(--card); border: 1px solid var(--line); border-radius: .4rem; padding: .6rem .9rem; }
.figures b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.figures span { color: var(--quiet); font-size: .85rem; }
.scroll { overflow-x: auto; } svg { display: block; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .quiet { fill: var(--quiet); } svg .node { fill: none; stroke: var(--line); } svg .idle { opacity: .35; }
.weights { fill: var(--weights); } .overhead { fill: var(--overhead); } .cache { fill: var(--cache); }
.left { fill: var(--left); }
svg .on-weights, svg .on-overhead, svg .on-cache { fill: var(--ground); } svg .name { font-size: 11px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; } th, td { text-align: left; padding: .35rem .6rem;
  border-bottom: 1px solid var(--line); vertical-align: top; } th { color: var(--quiet); font-weight: 600; }
td:first-child { white-space: nowrap; } ul { padding-left: 1.1rem; } li { margin: .3rem 0; }
code { font: .85em/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
details pre { background: var(--card); border: 1px solid var(--line); padding: .75rem; overflow-x: auto; }
"""


def render(plan: Mapping[str, Any], host: Topology) -> str:
    """The page.

    Args:
        plan: A plan as plain data.
        host: What it was made for.
    """
    replicas = plan["replicas"]
    layout = plan["layout"]
    title = f"{plan['model']['id']} on {explain.describe_gpus(host)}"
    lead = f"vLLM {plan['vllm_version']}, for {plan['objective']}, on {explain.describe_gpus(host)}."
    body = [
        f"<h1>{escape(plan['model']['id'])}</h1>",
        f'<p class="lead">{escape(lead)}</p>',
        _figures(plan),
        "<h2>GPUs, their NUMA nodes, and the memory of each</h2>",
        f'<div class="scroll">{_host(plan, host)}</div>',
        "<h2>Replicas</h2>",
        _table(
            ("replica", "GPUs", "NUMA", "CPUs", "memory", "port", "context"),
            (
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
            ),
        ),
        _list("Warnings", plan["warnings"]),
        _list("Why", plan["explanation"]),
        "<h2>Not taken</h2>",
        _table(("layout", "rule", "reason"), explain.refusals(plan["rejected"])),
        "<h2>Command lines</h2>",
        *(_command(replica) for replica in replicas),
    ]
    count = layout["replicas"]
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="description" content="{count} replica(s) of {escape(title)}">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n<main>\n" + "\n".join(body) + "\n</main>\n</html>\n"
    )


def _figures(plan: Mapping[str, Any]) -> str:
    """What the plan will serve, at a glance."""
    replicas = plan["replicas"]
    expected = [replica["expected"] for replica in replicas]
    figures = [
        (explain.layout_text(plan["layout"]), "layout"),
        (f"{replicas[0]['max_model_len']:,}", "tokens of context"),
        (f"{sum(e['full_length_requests'] for e in expected):.1f}", "full-length requests at once"),
        (f"{sum(e['kv_cache_tokens'] for e in expected):,}", "tokens of KV cache"),
    ]
    estimates = [e["decode_tokens_per_second"] for e in expected]
    if all(estimates):
        error = f"estimate, median error {estimates[0]['error_pct']} %"
        figures += [
            (f"{min(e['single'] for e in estimates):,.0f}", f"tokens/s for one request ({error})"),
            (f"{sum(e['at_concurrency'] for e in estimates):,.0f}", f"tokens/s at the expected concurrency ({error})"),
        ]
    items = "".join(f"<li><b>{escape(figure)}</b><span>{escape(what)}</span></li>" for figure, what in figures)
    return f'<ul class="figures">{items}</ul>'


def _host(plan: Mapping[str, Any], host: Topology) -> str:
    """GPUs by NUMA node, each with a bar of its memory; those without a replica are pale."""
    owner = {index: replica for replica in plan["replicas"] for index in replica["gpu_indices"]}
    nodes: dict[str, list[int]] = {}
    for position, gpu in enumerate(host.gpus):
        name = "NUMA node unknown" if gpu.numa_node is None else f"NUMA node {gpu.numa_node}"
        nodes.setdefault(name, []).append(position)
    height = _BAR_HEIGHT + 100
    parts, left = [], 0
    for name, members in nodes.items():
        width = len(members) * _CELL + _GAP
        parts.append(f'<rect class="node" x="{left + 1}" y="24" width="{width - 2}" height="{height - 26}" rx="6"/>')
        parts.append(f'<text class="quiet" x="{left + 4}" y="16">{escape(name)}</text>')
        for column, position in enumerate(members):
            gpu = host.gpus[position]
            x = left + _GAP + column * _CELL
            parts.append(_gpu(x, gpu.index, owner.get(gpu.index)))
        left += width + _GAP
    legend = "".join(
        f'<rect class="{css}" x="{i * _LEGEND_CELL}" y="{height + 12}" width="12" height="12" rx="2"/>'
        f'<text x="{i * _LEGEND_CELL + 18}" y="{height + 22}">{escape(name)}</text>'
        for i, (name, css) in enumerate(_PART_CLASSES.items())
    )
    full = max(left, _LEGEND_CELL * len(_PART_CLASSES))
    label = f"{len(host.gpus)} GPUs on {len(nodes)} NUMA node(s), with the memory of each"
    return (
        f'<svg role="img" aria-label="{escape(label)}" width="{full}" height="{height + 32}" '
        f'viewBox="0 0 {full} {height + 32}">{"".join(parts)}{legend}</svg>'
    )


def _gpu(x: int, index: int, replica: Mapping[str, Any] | None) -> str:
    top, width = 58, _CELL - _GAP
    head = f'<text x="{x}" y="48">GPU {index}</text>'
    if replica is None:
        return (
            f'<g class="idle">{head}<rect class="left" x="{x}" y="{top}" width="{width}" height="{_BAR_HEIGHT}"/>'
            f'<text class="quiet" x="{x}" y="{top + _BAR_HEIGHT + 18}">not used</text></g>'
        )
    found = explain.memory_parts(replica)
    total = sum(part.gib for part in found)
    bars, y = [], float(top)
    # From the top: what is left out, then the cache, overhead and weights.
    for part in reversed(found):
        size = _BAR_HEIGHT * part.gib / total
        css = _PART_CLASSES[part.name]
        bars.append(
            f'<rect class="{css}" x="{x}" y="{y:.1f}" width="{width}" height="{size:.1f}">'
            f"<title>{escape(part.name)}: {part.gib:.1f} GiB</title></rect>"
        )
        if size > _TEXT_HEIGHT:
            bars.append(f'<text class="on-{css}" x="{x + 6}" y="{y + size / 2 + 4:.1f}">{part.gib:.1f} GiB</text>')
        y += size
    name = escape(replica["name"])
    short = name if len(name) <= _NAME_LENGTH else "…" + name[1 - _NAME_LENGTH :]
    return f'{head}{"".join(bars)}<text class="quiet name" x="{x}" y="{top + _BAR_HEIGHT + 18}">{short}</text>'


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _list(heading: str, items: Iterable[str]) -> str:
    rows = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<h2>{escape(heading)}</h2><ul>{rows}</ul>" if rows else ""


def _command(replica: Mapping[str, Any]) -> str:
    environment = "".join(f"{key}={value}\n" for key, value in replica["env"].items())
    command = escape(environment + "vllm serve MODEL " + " ".join(replica["args"]))
    return f"<details><summary>{escape(replica['name'])}</summary><pre><code>{command}</code></pre></details>"
