"""Draws a host: nodes, CPUs, GPUs and links, as text for a terminal and as a picture for a ticket.

All functions take the fact `gpu_topology` as `topology.read` returns it, checked by `Topology.from_dict`.
"""

import html
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_fleet.target.gpu_topology import parse_ranges
from vllm_fleet.topology import Topology

WIDTH = 100
Facts = Mapping[str, Any]

# What a link class means, the nearest first (the legend of `nvidia-smi topo -m`).
_MEANINGS = {
    "NV": "NVLink, with the number of links",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's PCIe host bridge",
    "NODE": "several host bridges of one NUMA node",
    "SYS": "the interconnect between NUMA nodes",
    "?": "unknown",
}


def _class(link: str) -> str:
    return "NV" if link.startswith("NV") else link if link in _MEANINGS else "?"


@dataclass(frozen=True)
class _Place:
    """A NUMA node and the GPUs on it (positions in `gpus`); the last place may hold those of no known node."""

    name: str
    cpus: str
    memory: str
    gpus: tuple[int, ...]


def _places(facts: Facts) -> list[_Place]:
    nodes = {node["id"]: node for node in facts["numa_nodes"]}
    homes = [gpu["numa_nodes"][0] if len(gpu["numa_nodes"]) == 1 else None for gpu in facts["gpus"]]
    places = [
        _Place(
            f"NUMA node {number}",
            node["cpus"] or "none usable",
            "memory unknown" if node.get("memory_total_mib") is None else f"{node['memory_total_mib'] / 1024:.0f} GiB",
            tuple(position for position, home in enumerate(homes) if home == number),
        )
        for number, node in nodes.items()
    ]
    homeless = tuple(position for position, home in enumerate(homes) if home not in nodes)
    return [*places, _Place("NUMA node unknown or several", "", "", homeless)] if homeless else places


def _links(facts: Facts) -> list[list[str]]:
    """The matrix of link classes, by position; the diagonal is empty."""
    count = range(len(facts["gpus"]))
    return [["" if a == b else facts["links"].get(f"{min(a, b)}-{max(a, b)}") or "?" for b in count] for a in count]


def _number(facts: Facts, position: int) -> str:
    index = facts["gpus"][position]["index"]
    return f"#{position}" if index is None else str(index)  # the number that nvidia-smi gives, where it gives one


def _short_name(gpu: Facts) -> str:
    name = str(gpu["name"] or f"PCI device {gpu['pci_device']}")
    for brand in ("NVIDIA ", "GeForce "):
        name = name.removeprefix(brand)
    return name


def _has_error(gpu: Facts) -> bool:
    return any(problem["severity"] == "error" for problem in gpu.get("problems") or [])


def _memory(gpu: Facts) -> str:
    total = gpu.get("memory_total_mib")
    return "memory unknown" if total is None else f"{total / 1024:.1f} GiB"


def _pcie(gpu: Facts) -> str:
    """The link that the card can have, with its width if that is less."""
    pcie = gpu.get("pcie") or {}
    generation, full, width = (pcie.get(key) for key in ("max_generation", "max_width", "width"))
    if generation is None or full is None:
        return "PCIe unknown"
    return f"PCIe {generation}.0 x{width} of x{full}" if width and width < full else f"PCIe {generation}.0 x{full}"


def _switch(gpu: Facts) -> str:
    """The PCIe switches above a GPU, the outermost first."""
    switches = (gpu.get("pcie") or {}).get("switches") or []
    return " > ".join(str(switch).removeprefix("0000:") for switch in switches)


def _groups(facts: Facts, place: _Place) -> Iterator[tuple[str, list[int]]]:
    """GPUs of a place by the PCIe switches above them, in bus order."""
    switch = ""
    group: list[int] = []
    for position in place.gpus:
        above = _switch(facts["gpus"][position])
        if group and above != switch:
            yield switch, group
            group = []
        switch = above
        group.append(position)
    if group:
        yield switch, group


def _state(facts: Facts) -> str:
    """Driver, IOMMU and the like in one line."""
    driver, pcie = facts["driver"], facts.get("pcie") or {}
    redirects = pcie.get("acs_redirect")
    acs = "unknown" if redirects is None else f"redirects at {len(redirects)} bridges" if redirects else "no redirect"
    verdict = ((facts.get("checks") or {}).get("p2p") or {}).get("verdict") or "untested"
    parts = [
        f"driver {driver.get('version') or 'unknown'} ({driver['state']})",
        f"CUDA {driver.get('cuda_version') or 'unknown'}",
        f"IOMMU {pcie.get('iommu') or 'unknown'}",
        f"ACS {acs}",
        f"peer-to-peer {verdict}",
    ]
    return " · ".join([*parts, "NVSwitch"] if facts.get("nvswitch") else parts)


def _title(facts: Facts) -> str:
    host = Topology.from_dict(facts)
    models = sorted({gpu.name for gpu in host.gpus})
    counts = [f"{sum(gpu.name == model for gpu in host.gpus)} x {model}" for model in models]
    nodes = len(facts["numa_nodes"])
    spread = [str(len(place.gpus)) for place in _places(facts)]
    spread[nodes:] = [f"{count} unknown" for count in spread[nodes:]]
    where = "one NUMA node" if nodes == 1 == len(spread) else f"{nodes} NUMA nodes ({' + '.join(spread)})"
    return f"{', '.join(counts) or 'No GPU'} on {where}"


def _link_summary(facts: Facts) -> list[str]:
    """The classes that occur, the nearest first, each with what it crosses and how many pairs have it."""
    pairs = [link for a, row in enumerate(_links(facts)) for link in row[a + 1 :]]
    kinds = sorted(set(pairs), key=lambda link: (list(_MEANINGS).index(_class(link)), link))
    return [f"{kind}: {_MEANINGS[_class(kind)]} ({pairs.count(kind)} of {len(pairs)} pairs)" for kind in kinds]


# --- text -----------------------------------------------------------------------------------------------------------


def text(facts: Facts) -> str:
    """Draw a host for a terminal of 100 columns; eight GPUs fit one screen."""
    lines = [*textwrap.wrap(_title(facts), WIDTH), *textwrap.wrap(_state(facts), WIDTH), ""]
    for number, place in enumerate(_places(facts)):
        head = f"{place.name}: CPUs {place.cpus}, {place.memory}" if place.cpus else place.name
        lines += [
            f"{'├' if number else '┌'}─ {textwrap.shorten(head, WIDTH - 6, placeholder=' …')} ".ljust(WIDTH - 1, "─")
            + ("┤" if number else "┐")
        ]
        for switch, group in _groups(facts, place):
            if switch:
                lines.append(_boxed(f"switch {switch}"))
            lines += [_boxed(_gpu_line(facts, position, inner=bool(switch))) for position in group]
        if not place.gpus:
            lines.append(_boxed("no GPU"))
    lines.append("└" + "─" * (WIDTH - 2) + "┘")
    if len(facts["gpus"]) > 1:
        numbers = [_number(facts, position) for position in range(len(facts["gpus"]))]
        rows = [
            ["GPU", *numbers],
            *([numbers[a], *(link or "-" for link in row)] for a, row in enumerate(_links(facts))),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["", *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows), ""]
        lines += [f"  {line}" for line in _link_summary(facts)]
    problems = facts.get("problems") or []
    if problems:
        lines.append("")
    for problem in problems:
        start = f"  {problem['severity']}: "
        lines += textwrap.wrap(start + problem["message"], WIDTH, subsequent_indent=" " * len(start))
    return "\n".join(lines)


def _boxed(line: str) -> str:
    room = WIDTH - 6
    return f"│  {line if len(line) <= room else line[: room - 1] + '…'}".ljust(WIDTH - 1) + "│"


def _gpu_line(facts: Facts, position: int, *, inner: bool) -> str:
    gpu = facts["gpus"][position]
    name = ("  " if inner else "") + f"GPU {_number(facts, position)}"
    parts = [name.ljust(8), (gpu["pci_bus_id"] or "no address").ljust(13), _memory(gpu).rjust(10), _pcie(gpu).ljust(12)]
    parts += ["ERROR"] * _has_error(gpu)
    return "  ".join([*parts, _short_name(gpu)])


# --- picture --------------------------------------------------------------------------------------------------------

_PICTURE_WIDTH = 1000
_MARGIN = 24
_TILE_WIDTH, _TILE_HEIGHT, _GAP = 104, 70, 10

# Colours of light and dark: background, panel, line, text, faint text, error; then one for each link class.
_STYLE = """
  svg { --back: #ffffff; --panel: #f4f6f8; --line: #c9d1d9; --ink: #1f2328; --faint: #59636e; --bad: #cf222e;
    --tile: #ffffff; --nv: #8fd19e; --pix: #9ecbff; --pxb: #c2dcff; --phb: #ffe08a; --node: #ffd0a1; --sys: #ffb3ad;
    --unknown: #d8dee4; }
  @media (prefers-color-scheme: dark) { svg { --back: #0d1117; --panel: #161b22; --line: #3d444d; --ink: #e6edf3;
    --faint: #9198a1; --bad: #ff7b72; --tile: #21262d; --nv: #1a6b34; --pix: #1f4f8f; --pxb: #2a3f66; --phb: #6b5300;
    --node: #70431a; --sys: #7d2b27; --unknown: #373e47; } }
  text { font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink); }
  .title { font-size: 19px; font-weight: 600; } .head { font-size: 14px; font-weight: 600; } .small { font-size: 12px; }
  .faint { fill: var(--faint); } .bad { fill: var(--bad); font-weight: 600; }
  .mono { font-family: ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; font-size: 11px; }
  .back { fill: var(--back); } .panel { fill: var(--panel); stroke: var(--line); }
  .tile { fill: var(--tile); stroke: var(--line); } .sick { stroke: var(--bad); stroke-width: 2; }
  .bracket { fill: none; stroke: var(--faint); }
  .NV { fill: var(--nv); } .PIX { fill: var(--pix); } .PXB { fill: var(--pxb); } .PHB { fill: var(--phb); }
  .NODE { fill: var(--node); } .SYS { fill: var(--sys); } .unknown { fill: var(--unknown); }
"""


def _fit(line: str, width_px: float, letter_px: float) -> str:
    """Cut a line to a width; the letters of the fonts above are about that wide."""
    letters = int(width_px / letter_px)
    return line if len(line) <= letters else line[: max(letters - 1, 1)] + "…"


def _text(x: float, y: float, line: str, style: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{html.escape(line)}</text>'


def _rectangle(x: float, y: float, width: float, height: float, style: str, *, radius: float = 6) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class="{style}"/>'


def _tile(facts: Facts, position: int, x: float, y: float) -> list[str]:
    gpu = facts["gpus"][position]
    alike = len({_short_name(other) for other in facts["gpus"]}) == 1
    bad = _has_error(gpu)
    address = (gpu["pci_bus_id"] or "no address").removeprefix("0000:")
    room = _TILE_WIDTH - 14
    link = _pcie(gpu).removeprefix("PCIe ") if " of " in _pcie(gpu) else _pcie(gpu)
    lines = [
        _rectangle(x, y, _TILE_WIDTH, _TILE_HEIGHT, "tile sick" if bad else "tile"),
        _text(x + 8, y + 19, f"GPU {_number(facts, position)}", "head bad" if bad else "head"),
        _text(x + 8, y + 34, _fit(address, room, 6.7), "mono faint"),
        _text(x + 8, y + 48, _fit(_memory(gpu) if alike else _short_name(gpu), room, 6.4), "small"),
        _text(x + 8, y + 62, _fit(link if alike else _memory(gpu), room, 6.2), "small faint"),
    ]
    return [
        f"<g><title>{html.escape(f'{gpu["name"]}, {gpu["uuid"] or "no UUID"}, {_pcie(gpu)}')}</title>",
        *lines,
        "</g>",
    ]


def _panel(facts: Facts, place: _Place, x: float, y: float, width: float) -> tuple[list[str], float]:
    """Draw a node and its GPUs; returns the drawing and how high the content is."""
    across = max(int((width - 2 * 12 + _GAP) / (_TILE_WIDTH + _GAP)), 1)
    count = len(parse_ranges(place.cpus) or [])
    drawn = [
        _text(x + 14, y + 24, place.name, "head"),
        _text(x + width - 14, y + 24, place.memory, "small", anchor="end"),
    ]
    if place.cpus:
        cpus = f"{count} CPUs: {place.cpus}"
        drawn.append(_text(x + 14, y + 42, _fit(cpus, width - 28, 6.7), "mono faint"))
    top = y + 56
    groups = list(_groups(facts, place))
    switched = any(switch for switch, _ in groups)
    column, row_height = 0, _TILE_HEIGHT + _GAP + (16 if switched else 0)
    for switch, group in groups:
        for start in range(0, len(group), across):
            part = group[start : start + across]
            if column and column + len(part) > across:
                column, top = 0, top + row_height
            left = x + 12 + column * (_TILE_WIDTH + _GAP)
            if switch:
                end = left + len(part) * (_TILE_WIDTH + _GAP) - _GAP
                drawn.append(f'<path d="M{left:g} {top + 14:g} v-6 H{end:g} v6" class="bracket"/>')
                label = _fit(f"switch {switch}", end - left, 6.7)
                drawn.append(_text((left + end) / 2, top + 4, label, "mono faint", anchor="middle"))
            for offset, position in enumerate(part):
                drawn += _tile(facts, position, left + offset * (_TILE_WIDTH + _GAP), top + (16 if switched else 0))
            column += len(part)
    if not groups:
        drawn.append(_text(x + 14, top + 16, "no GPU", "small faint"))
        row_height = 26
    return drawn, top + row_height + 4 - y


def _panels(facts: Facts, y: float) -> tuple[list[str], float]:
    """Draw all nodes in rows; returns the drawing and where it ends."""
    places = _places(facts)
    columns = 1 if len(places) == 1 else 4 if len(places) > 4 else 2  # noqa: PLR2004  (SNC and NPS hosts have 8 nodes)
    width = (_PICTURE_WIDTH - 2 * _MARGIN - (columns - 1) * _GAP) / columns
    drawn: list[str] = []
    for start in range(0, len(places), columns):
        row = [
            (_MARGIN + column * (width + _GAP), place) for column, place in enumerate(places[start : start + columns])
        ]
        inner = [_panel(facts, place, x, y, width) for x, place in row]
        height = max(content_height for _, content_height in inner)
        drawn += [_rectangle(x, y, width, height, "panel", radius=10) for x, _ in row]
        drawn += [line for lines, _ in inner for line in lines]
        y += height + _GAP
    return drawn, y


def _matrix(facts: Facts, y: float) -> tuple[list[str], float, float]:
    """Draw the links between GPUs; returns the drawing, where it ends, and its right edge."""
    links = _links(facts)
    size = 46 if len(links) <= 10 else 34  # noqa: PLR2004  (16 GPUs must fit beside the legend)
    left, top = _MARGIN + 58, y + 24
    drawn = [_text(_MARGIN, y + 16, "GPU", "small faint")]
    for a, row in enumerate(links):
        centre = left + a * size + size / 2
        drawn.append(_text(centre, y + 16, _number(facts, a), "small", anchor="middle"))
        drawn.append(_text(_MARGIN, top + a * 26 + 18, f"GPU {_number(facts, a)}", "small"))
        for b, link in enumerate(row):
            x, cell = left + b * size, top + a * 26
            if a == b:
                continue
            style = _class(link).replace("?", "unknown")
            drawn.append(_rectangle(x + 1, cell + 1, size - 2, 24, style, radius=3))
            drawn.append(_text(x + size / 2, cell + 17, link, "mono", anchor="middle"))
    return drawn, top + len(links) * 26, left + len(links) * size


def svg(facts: Facts, name: str = "") -> str:
    """Draw a host as a picture that follows the reader's light or dark setting.

    Args:
        facts: The fact `gpu_topology`.
        name: What to call the host; nothing where that is nobody's business.
    """
    title = f"{name}: {_title(facts)}" if name else _title(facts)
    room = _PICTURE_WIDTH - 2 * _MARGIN
    drawn = [_text(_MARGIN, 40, _fit(name or title, room, 11.4), "title")]
    y = 62.0
    if name:
        drawn.append(_text(_MARGIN, y, _fit(_title(facts), room, 8.6), "head"))
        y += 20
    drawn.append(_text(_MARGIN, y, _fit(_state(facts), room, 6.4), "small faint"))
    panels, y = _panels(facts, y + 18)
    drawn += panels
    problems = facts.get("problems") or []
    beside, end = float(_MARGIN), y + 4
    if len(facts["gpus"]) > 1:
        matrix, end, right = _matrix(facts, y + 8)
        drawn += matrix
        beside, y = right + 28, y + 12
        for number, line in enumerate(_link_summary(facts)):
            style = _class(line.partition(":")[0]).replace("?", "unknown")
            top = y + 12 + number * 22
            drawn.append(_rectangle(beside, top, 14, 14, style, radius=3))
            drawn.append(_text(beside + 22, top + 12, _fit(line, _PICTURE_WIDTH - _MARGIN - beside - 22, 6.3), "small"))
        y += 12 + 22 * len(_link_summary(facts)) + 6
    for problem in problems:
        style = "small bad" if problem["severity"] == "error" else "small faint"
        letters = int((_PICTURE_WIDTH - _MARGIN - beside) / (7.1 if "bad" in style else 6.3))
        for line in textwrap.wrap(f"{problem['severity']}: {problem['message']}", letters):
            y += 16
            drawn.append(_text(beside, y, line, style))
        y += 4
    height = max(end, y) + _MARGIN
    size = f'viewBox="0 0 {_PICTURE_WIDTH} {height:g}" width="{_PICTURE_WIDTH}" height="{height:g}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{html.escape(title)}">',
            f"<style>{_STYLE}</style>",
            f'<rect width="{_PICTURE_WIDTH}" height="{height:g}" class="back"/>',
            *drawn,
            "</svg>",
            "",
        ]
    )


_PAGE_STYLE = """
  :root { color-scheme: light dark; }
  body { font: 14px system-ui, sans-serif; max-width: 1000px; margin: 1rem auto; }
  svg { max-width: 100%; height: auto; }
  table { border-collapse: collapse; width: 100%; margin: 1rem 0; }
  td, th { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid #8884; }
"""


def html_page(facts: Facts, name: str = "") -> str:
    """The picture on a page of its own, with GPUs and problems as tables that can be copied."""
    gpus = [
        (_number(facts, position), gpu["name"], gpu["pci_bus_id"], gpu["uuid"], _memory(gpu), _pcie(gpu))
        for position, gpu in enumerate(facts["gpus"])
    ]
    problems = [
        (entry["severity"], entry["code"], entry["message"], entry["remedy"]) for entry in facts.get("problems") or []
    ]
    title = html.escape(f"{name}: {_title(facts)}" if name else _title(facts))
    return "\n".join(
        [
            f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>',
            f"<style>{_PAGE_STYLE}</style>",
            svg(facts, name),
            *_table(("GPU", "name", "address", "UUID", "memory", "PCIe"), gpus),
            *_table(("severity", "code", "message", "remedy"), problems),
            "</html>",
            "",
        ]
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str | None]]) -> list[str]:
    if not rows:
        return []
    cells = [[f"<td>{html.escape(str(cell or 'unknown'))}</td>" for cell in row] for row in rows]
    top = "".join(f"<th>{name}</th>" for name in head)
    return [f"<table>\n<tr>{top}</tr>", *("<tr>" + "".join(row) + "</tr>" for row in cells), "</table>"]
