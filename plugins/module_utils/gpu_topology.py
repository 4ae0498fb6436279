"""Readers for what `nvidia-smi` prints: the `topo -m` matrix and the GPU records.

Both take text as it comes, from a terminal, a log or a bug report, and never raise: what cannot be read is
left out or null, and `parse_smi` says so in its problems. Nothing is looked up by capture or by machine.

This file imports only the standard library and runs on Python 3.9, because it is copied to target hosts.
"""

from __future__ import annotations

import html
import re
from typing import Any, Callable, NamedTuple, Optional, Union

__all__ = [
    "format_ranges",
    "normalise_bus_id",
    "parse_ranges",
    "parse_smi",
    "parse_topo_matrix",
    "problem",
    "topo_disagreements",
]

Problem = dict[str, Any]

# Linux has at most 1024 NUMA nodes and 8192 CPUs (CONFIG_NODES_SHIFT, CONFIG_NR_CPUS); larger numbers are damage.
_MAX_NODE = 1023
_MAX_CPU = 8191


def problem(severity: str, code: str, message: str, remedy: str) -> Problem:
    """Build one entry of a problems list: severity is `error` or `warning`, code is stable, the rest is prose."""
    return {"severity": severity, "code": code, "message": message, "remedy": remedy}


def parse_ranges(text: str, largest: int = _MAX_CPU) -> Optional[list[int]]:
    """Read a kernel list such as `0-3,8` into sorted numbers.

    Returns:
        The numbers; an empty list for blank text; None when the text is no such list (`N/A`, `5-2`, `-1`).
    """
    numbers: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip(), re.ASCII)
        if not match:
            return None if text.strip() else []
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last > largest:
            return None
        numbers.update(range(first, last + 1))
    return sorted(numbers)


def format_ranges(numbers: Union[set[int], list[int]]) -> str:
    """Write numbers as the kernel does: `{0, 1, 2, 8}` becomes `0-2,8`."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def normalise_bus_id(text: str) -> Optional[str]:
    """Bring a PCI address to the spelling of sysfs: `0000000F:01:00.0` becomes `000f:01:00.0`; None if it is none."""
    match = re.fullmatch(
        r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?", text.strip(), re.IGNORECASE
    )
    if not match:
        return None
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


# What terminals, editors, log pipelines, JSON and web pages put into a text on its way into a ticket, and what it was.
_TRACES = (
    (r"[\x00\u200b-\u200d\u2060\ufeff]", ""),
    (r"\\+(?:u001b|x1b|033|ufffd|e(?=\[))|\^\[(?=[\[(])|#033|<?ESC>?(?=\[)|\u241b|\ufffd(?=\[)", "\x1b"),
    (r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[()][0-9A-B])|\x9b[0-?]*[@-~]|\[[0-9;]*[mK]", ""),
    (r"\\+t|\^I|#011|&#0?9;|&(?:emsp|Tab);|</t[dh]>", "\t"),
    (r"(?:\\+r)*\\+n|<br ?/?>|</(?:tr|p|div)>|\r*\n|\r|[\x0b\x0c\x85\u2028\u2029]", "\n"),
    (r"</?(?:pre|code|samp|p|div|span|font|table|tbody|tr|t[dh])(?: [^<>]*)?>", ""),
    (r"[\xa0\u2000-\u200a\u202f\u3000]|&nbsp;", " "),
    (r"[\u2010-\u2015\u2212]", "-"),
    (r"\\+(?=[\"'/])", ""),
)


def _as_printed(text: Any) -> str:
    """Give back the text as it was printed: colours gone, escapes, entities and exotic blanks turned back."""
    if isinstance(text, (bytes, bytearray)):
        text = bytes(text).decode("utf-8", "replace")  # of UTF-16 only NULs remain between the letters
    printed = "" if text is None else str(text)
    if re.search(r"&lt;(?:nvidia_smi_log|gpu)\b", printed):
        printed = html.unescape(printed)
    if re.match(r"\s*[\[{]\s*[\"']", printed):  # lines as a JSON or Python list
        printed = re.sub(r"(\\*[\"']),\s*\1", "\n", printed)
    for pattern, original in _TRACES:
        printed = re.sub(pattern, original, printed)
    return printed


# What JSON, Markdown and `cat -A` leave at the end of a line; a tab there is a blank cell.
_LINE_END = re.compile(r"(?:\\*[\"'`$][,}\]]*)+ *$", re.MULTILINE)


def _without_prefix(lines: list[str], anchor: re.Pattern[str]) -> list[str]:
    """Drop what stands before each line (a log's time and host, `> `, a line number, an indent).

    The first line with the anchor, which starts what nvidia-smi prints, shows how it looks; numbers in it may differ.
    """
    anchors = filter(None, map(anchor.search, lines))
    prefix = next((found.string[: found.start()] for found in anchors), "")
    words = prefix.strip()
    blanks = len(prefix) - len(prefix.rstrip())
    pattern = re.sub(r"\d+", lambda _: r"\d+", re.sub(r"(?:\\?\s)+", lambda _: r"\s+", re.escape(words)))
    start = re.compile((rf"^\s*{pattern}" if words else "^") + rf"[ \t]{{0,{blanks}}}")
    return [start.sub("", line) for line in lines]


# --- nvidia-smi topo -m ---------------------------------------------------------------------------------------------

# The classes of the legend; SOC and PSB are what old drivers called SYS and PIX. A GPU has at most 18 NVLinks, which
# decides where the number ends when the next cell is glued to it.
_LINK = r"(?:X(?!GMI)|SYS|NODE|PHB|PXB|PIX|PSB|SOC|NV\d+(?![\d,-])|NV(?:1[0-8]|[1-9])(?=\d))"
_LINK_CELL = re.compile(rf"\s*({_LINK})")
_ANY_CELL = re.compile(r"\s*(\S+)")
_GPU_ROW = re.compile(rf"(?<![\w-])GPU(\d{{1,3}})\s*(?={_LINK}|N/A)")
_GPU_NAME = re.compile(r"GPU(\d{1,3})(?![\d:])")
_HEADER_START = re.compile(
    r"(?<![\w-])GPU\d{1,3}(?![\d:])(?=\s*$|\s*(?:GPU|NIC)\d|\s+CPU\b|\s*CPU\s+Aff|\s+[a-z]\w*\d)",
)
_TAIL_COLUMNS = re.compile(r"CPU\s*Affinity|NUMA\s*Affinity|GPU\s*NUMA\s*ID")
_TAIL_NAMES = ["CPUAffinity", "NUMAAffinity", "GPUNUMAID"]
_MORE_CELLS = re.compile(r"(?!\s*(?:NIC|GPU)\d)[A-Z0-9,/\s-]+")
# The first word of a continued header may be the rest of one that was cut in two.
_MORE_NAMES = re.compile(
    r"\s*(?:\d+|(?:(?:(?:A?f)?f)?i)?n?i?t?y|U?M?A|P?U|D)?(?:\s*(?:NIC\d*|GPU\d*|mlx\w+|CPU|NUMA|Aff\w*|ID))*\s*"
)


class _Row(NamedTuple):
    """One GPU row: its link cells in column order and what stands behind them."""

    cells: list[Optional[str]]
    tail: str


class _Matrix(NamedTuple):
    """A `topo -m` table, believed as far as header and diagonal agree."""

    columns: list[str]
    tail_columns: list[str]
    rows: dict[int, _Row]


def _split_row(text: str, gpu_columns: int) -> _Row:
    """Cut a row into link cells and tail; cells may be glued to their neighbours."""
    cells: list[Optional[str]] = []
    position = 0
    while True:
        link = _LINK_CELL.match(text, position)
        other = None if link or len(cells) >= gpu_columns else _ANY_CELL.match(text, position)
        if link:
            cells.append(link[1])
            position = link.end()
        elif other:  # a failed cell between GPUs still takes its place
            cells.append(None)
            position = other.end()
        else:
            return _Row(cells, text[position:])


def _logical_lines(text: str) -> list[str]:
    """Lines without their prefix, those joined that a terminal wrapped: bare names continue a header, cells a row."""
    lines = _LINE_END.sub("", text).split("\n")
    # A Markdown table has a bar between all cells.
    lines = [line.replace("|", "\t") if line.count("|") > 2 else line for line in lines]  # noqa: PLR2004
    lines = _without_prefix(lines, _GPU_ROW)
    width = max(len(line.expandtabs()) for line in lines)
    joined: list[str] = []
    continuation: Optional[re.Pattern[str]] = None
    previous = ""
    for line in lines:
        starts = _GPU_ROW.search(line) or re.search(r"(?<!\w)GPU0(?!\d)", line)
        if continuation and line.strip() and continuation.fullmatch(line) and not starts:
            # A line that fills the width may end in the middle of a cell, a shorter one ends between two.
            joined[-1] += line if len(previous.expandtabs()) == width else " " + line
        else:
            joined.append(line)
            continuation = _MORE_CELLS if _GPU_ROW.search(line) else _MORE_NAMES if _HEADER_START.search(line) else None
        previous = line
    return joined


def _read_header(line: str) -> Optional[tuple[list[str], list[str]]]:
    """Names of the link columns and of the columns behind them; None when the line is no header."""
    start = None if _GPU_ROW.search(line) else _HEADER_START.search(line)
    if not start:
        return None
    before = re.search(r"(?:(?:NIC\d+|mlx\w+)\s+)*$", line[: start.start()])  # network cards may come first
    names = (before[0] if before else "") + line[start.start() :]
    found = [re.sub(r"\s+", "", name) for name in _TAIL_COLUMNS.findall(names)]
    # Drivers print the first one, two or all three; any other set is a damaged header that names no cell.
    tail_columns = found if sorted(found) == sorted(_TAIL_NAMES[: len(found)]) else []
    return re.findall(r"(?:GPU|NIC)\d+|\S+", _TAIL_COLUMNS.sub(" ", names)), tail_columns


def _read_matrix(text: str) -> _Matrix:
    """Read the table; of several (a peer-to-peer status before it) the one that says most."""
    # The last cell of a text that stops without a line end may be half of one: NV1 of NV18.
    tables = [_Matrix([], [], {})]
    for line in _logical_lines(re.sub(r"NV\d+\Z", "", text)):
        row, header = _GPU_ROW.search(line), _read_header(line)
        if header:
            tables.append(_Matrix(*header, {}))
        elif row:
            columns, _, rows = tables[-1]
            last_gpu = max((place for place, name in enumerate(columns) if _GPU_NAME.fullmatch(name)), default=-1)
            cells = _split_row(line[row.end() :], last_gpu + 1)
            if row[0].strip() in columns or "X" in cells.cells:  # else a sentence: "GPU1 NV18"
                rows.setdefault(int(row[1]), cells)
    tables = [_named(table) for table in tables]
    return max(tables, key=lambda table: (len(_directed_links(table)), len(table.tail_columns), len(table.rows)))


def _named(matrix: _Matrix) -> _Matrix:
    """Name the columns of a table whose header was cut off: the rows still say which GPUs there are."""
    return matrix if matrix.columns else matrix._replace(columns=[f"GPU{gpu}" for gpu in sorted(matrix.rows)])


def _trusted_columns(matrix: _Matrix) -> dict[int, int]:
    """Column number of each GPU: the header names it, and no other row has its X (self) there."""
    diagonal: dict[int, set[int]] = {}
    for gpu, row in matrix.rows.items():
        for column, cell in enumerate(row.cells):
            if cell == "X":
                diagonal.setdefault(column, set()).add(gpu)
    trusted: dict[int, int] = {}
    for column, name in enumerate(matrix.columns):
        match = _GPU_NAME.fullmatch(name)
        if match and int(match[1]) not in trusted:
            gpu = int(match[1])
            if not diagonal.get(column) or gpu in diagonal[column]:
                trusted[gpu] = column
    return trusted


def _directed_links(matrix: _Matrix) -> dict[tuple[int, int], str]:
    """Link class as each row prints it; a row whose X is not in its own column is not believed."""
    columns = _trusted_columns(matrix)
    links: dict[tuple[int, int], str] = {}
    for gpu, row in matrix.rows.items():
        own = columns.get(gpu)
        if own is None or own >= len(row.cells) or row.cells[own] != "X":
            continue
        for peer, column in columns.items():
            cell = row.cells[column] if column < len(row.cells) else None
            if peer != gpu and cell and cell != "X":
                links[gpu, peer] = cell
    return links


def _tail_cells(row: _Row, tail_columns: list[str]) -> dict[str, str]:
    """Name the cells behind the links; a tail that lacks cells names only what tabs place beyond doubt."""
    tail = re.sub(r",\s+(?=\d)", ",", row.tail)
    cells = re.findall(r"N/A|(?:(?!N/A)\S)+", tail)
    if len(cells) == len(tail_columns):
        return dict(zip(tail_columns, cells))  # noqa: B905  (no `strict` in Python 3.9)
    if len(cells) < len(tail_columns) and tail.lstrip(" ").startswith("\t"):
        by_tab = [cell.strip() for cell in tail.split("\t")[1:]]
        # The last tab cell may have been cut in the middle; one with a tab behind it is whole.
        whole = zip(tail_columns[:2], by_tab[:-1])  # noqa: B905  (no `strict` in Python 3.9; short is the case at hand)
        return {name: cell for name, cell in whole if cell}
    return {"CPUAffinity": cells[0]} if cells and tail_columns[:1] == ["CPUAffinity"] else {}


def _numa_nodes(matrix: _Matrix) -> dict[int, list[int]]:
    """NUMA nodes of each GPU row as printed; an empty list where the row does not say."""
    tails = {gpu: _tail_cells(row, matrix.tail_columns) for gpu, row in matrix.rows.items()}
    cpu_lists = {gpu: parse_ranges(tail.get("CPUAffinity", "")) or [] for gpu, tail in tails.items()}
    nodes: dict[int, list[int]] = {}
    for gpu, tail in tails.items():
        printed = tail.get("NUMAAffinity")
        if printed is None and "NUMAAffinity" in matrix.tail_columns:
            others = {cpu for peer, cpus in cpu_lists.items() if "NUMAAffinity" in tails[peer] for cpu in cpus}
            printed = _glued_node(tail.get("CPUAffinity", ""), others)
        nodes[gpu] = parse_ranges(printed or "", _MAX_NODE) or []
    return nodes


def _glued_node(cell: str, other_cpus: set[int]) -> Optional[str]:
    """Separate a node number stuck to the end of a CPU list (`0-47,96-1430`), only if the CPUs leave one reading.

    The list as printed must claim CPUs that whole rows give to other GPUs, and exactly one cut must not.
    """
    whole = set(parse_ranges(cell) or [])
    if not whole & other_cpus or whole <= other_cpus:
        return None
    cuts = []
    for digits in (1, 2, 3):
        cpus = parse_ranges(cell[:-digits])
        if cpus and re.fullmatch(r"0|[1-9]\d*", cell[-digits:]) and not set(cpus) & other_cpus:
            cuts.append(cell[-digits:])
    return cuts[0] if len(cuts) == 1 else None


def parse_topo_matrix(text: str) -> dict[str, Any]:
    """Read the table of `nvidia-smi topo -m`.

    Columns are found by the names in the header, cells by what a link class looks like, and a row is believed when
    its X stands in its own column; so lost tabs, glued cells, log prefixes, colour codes and cut rows cost what they
    hide and no more.

    Args:
        text: What nvidia-smi printed, in whatever state it arrived.

    Returns:
        `gpus`: the numbers in the header and rows, sorted. `links`: class by pair, `{"0-1": "PIX"}`, lower number
        first; where the two directions differ, the row of the lower number. `numa`: for each GPU the set of nodes
        printed for it, an empty list when none is (`N/A`, blank, no such column, a cut row).
    """
    matrix = _read_matrix(_as_printed(text))
    # A header alone is nvidia-smi's only if it goes on behind the GPUs; other vendors' tables have such rows, too.
    named = matrix.columns if matrix.rows or matrix.tail_columns else []
    in_header = {int(match[1]) for match in map(_GPU_NAME.fullmatch, named) if match}
    gpus = sorted(in_header | set(matrix.rows))
    directed = _directed_links(matrix)
    links: dict[str, str] = {}
    for first in gpus:
        for second in gpus:
            link = directed.get((first, second)) or directed.get((second, first))
            if first < second and link:
                links[f"{first}-{second}"] = link
    nodes = _numa_nodes(matrix)
    return {"gpus": gpus, "links": links, "numa": {gpu: nodes.get(gpu, []) for gpu in gpus}}


def topo_disagreements(text: str) -> list[tuple[int, int, str, str]]:
    """Pairs whose two directions print different classes: (first, second, there, back)."""
    directed = _directed_links(_read_matrix(_as_printed(text)))
    return [
        (first, second, link, directed[second, first])
        for (first, second), link in sorted(directed.items())
        if first < second and directed.get((second, first), link) != link
    ]


# --- nvidia-smi -q -x, -q, -L and --query-gpu -----------------------------------------------------------------------


class _Node(NamedTuple):
    """An element of the report; text is None until its end was seen, so that a cut value is not taken for one."""

    tag: str
    text: list[str]
    children: list[_Node]

    def find(self, path: str) -> Optional[_Node]:
        """First descendant at `a/b`."""
        node: Optional[_Node] = self
        for tag in path.split("/"):
            node = next((child for child in node.children if child.tag == tag), None) if node else None
        return node

    def value(self, path: str) -> Optional[str]:
        """Text at `a/b`, None when there is no such complete element."""
        node = self.find(path)
        return node.text[0].strip() if node and node.text else None


class _Field(NamedTuple):
    """One value of a GPU record and where each output format keeps it (`|` separates what driver releases call it)."""

    name: str
    kind: str
    xml: str
    text: str
    csv: str


_FIELDS = (
    _Field("minor", "count", "minor_number", "Minor Number", ""),
    _Field("uuid", "word", "uuid", "GPU UUID", "uuid|gpu_uuid"),
    _Field("pci_bus_id", "bus_id", "pci/pci_bus_id", "PCI/Bus Id", "pci.bus_id|gpu_bus_id"),
    _Field("pci_device", "device_id", "pci/pci_device_id", "PCI/Device Id", "pci.device_id"),
    _Field("name", "word", "product_name", "Product Name", "name|gpu_name"),
    _Field("compute_capability", "capability", "compute_cap|compute_capability", "Compute Capability", "compute_cap"),
    _Field("memory_total_mib", "mib", "fb_memory_usage/total", "FB Memory Usage/Total", "memory.total"),
    _Field("memory_reserved_mib", "mib", "fb_memory_usage/reserved", "FB Memory Usage/Reserved", "memory.reserved"),
    _Field("memory_used_mib", "mib", "fb_memory_usage/used", "FB Memory Usage/Used", "memory.used"),
    _Field(
        "pcie.generation",
        "count",
        "pci/pci_gpu_link_info/pcie_gen/current_link_gen",
        "PCI/GPU Link Info/PCIe Generation/Current",
        "pcie.link.gen.current|pcie.link.gen.gpucurrent",
    ),
    _Field(
        "pcie.max_generation",
        "count",
        "pci/pci_gpu_link_info/pcie_gen/max_device_link_gen|pci/pci_gpu_link_info/pcie_gen/max_link_gen",
        "PCI/GPU Link Info/PCIe Generation/Device Max|PCI/GPU Link Info/PCIe Generation/Max",
        "pcie.link.gen.gpumax|pcie.link.gen.max",
    ),
    _Field(
        "pcie.width",
        "width",
        "pci/pci_gpu_link_info/link_widths/current_link_width",
        "PCI/GPU Link Info/Link Width/Current",
        "pcie.link.width.current",
    ),
    _Field(
        "pcie.max_width",
        "width",
        "pci/pci_gpu_link_info/link_widths/max_link_width",
        "PCI/GPU Link Info/Link Width/Max",
        "pcie.link.width.max",
    ),
    _Field("bar1_mib", "mib", "bar1_memory_usage/total", "BAR1 Memory Usage/Total", ""),
    _Field("mig.enabled", "switch", "mig_mode/current_mig", "MIG Mode/Current", "mig.mode.current"),
    _Field(
        "vgpu",
        "vgpu",
        "gpu_virtualization_mode/virtualization_mode",
        "GPU Virtualization Mode/Virtualization Mode",
        "",
    ),
    _Field("ecc", "switch", "ecc_mode/current_ecc", "ECC Mode/Current", "ecc.mode.current"),
    _Field(
        "power_limit_w",
        "watt",
        "gpu_power_readings/current_power_limit|power_readings/power_limit",
        "GPU Power Readings/Current Power Limit|Power Readings/Power Limit",
        "power.limit",
    ),
    _Field("performance_state", "word", "performance_state", "Performance State", "pstate"),
    _Field("fabric_state", "word", "fabric/state", "Fabric/State", "fabric.state"),
)
# Fields whose absence is the normal case: most GPUs have no NVSwitch fabric, an idle report no performance state.
_OPTIONAL = {"performance_state", "fabric_state"}

# Values that say "this GPU has no such thing", as against those that say "asking failed".
_LOST = re.compile(r"\[?GPU (?:is lost|requires reset)\b.*", re.IGNORECASE)
_ABSENT = re.compile(r"\[?(?:N/A|Not Supported|Requested functionality has been deprecated)\]?", re.IGNORECASE)


def _watts(text: str) -> Union[int, float]:
    return int(float(text)) if float(text).is_integer() else float(text)


_NO_WORD = (
    r".*\berror\b|gpu is lost|gpu requires reset|insufficient permissions|not found$|unknown$|\[.*\]$|ERR!|\[?N/A|"
    r"\[?not supported|.*been deprecated"
)

# How the text of each kind looks and what it becomes.
_KINDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "count": (r"(\d+)", int),
    "width": (r"(\d+)x?", int),
    "mib": (r"(\d+)(?: ?MiB)?", int),
    "watt": (r"(\d+(?:\.\d+)?)(?: ?W)?", _watts),
    "capability": (r"(\d{1,2}\.\d)", str),
    "switch": (r"(Enabled|Disabled)", lambda text: text == "Enabled"),
    "vgpu": (
        r"(None|Pass-Through|V-?GPU|Host V-?GPU|VSGA|Host VSGA)",
        lambda text: text.replace("-", "").upper() == "VGPU",
    ),
    # Device in the high half, vendor in the low: 0x2BB510DE.
    "device_id": (r"(?:0x)?([0-9A-Fa-f]{8})", lambda text: f"{text[4:]}:{text[:4]}".lower()),
    "bus_id": (r"(.*)", normalise_bus_id),
    # Any words but those of a failure.
    "word": (rf"(?i)(?!{_NO_WORD})(.+)", str),
}


def _convert(kind: str, text: str) -> Any:
    """The value of a cell, or None when it holds none."""
    pattern, convert = _KINDS[kind]
    match = re.fullmatch(pattern, text)
    return convert(match[1]) if match else None


def _empty_gpu() -> dict[str, Any]:
    return {
        "index": None,
        "minor": None,
        "uuid": None,
        "pci_bus_id": None,
        "pci_device": None,
        "name": None,
        "compute_capability": None,
        "memory_total_mib": None,
        "memory_reserved_mib": None,
        "memory_used_mib": None,
        "holders": [],
        "unified_memory": None,
        "pcie": {"generation": None, "width": None, "max_generation": None, "max_width": None},
        "bar1_mib": None,
        "mig": {"enabled": None, "instances": []},
        "vgpu": None,
        "ecc": None,
        "power_limit_w": None,
        "performance_state": None,
        "fabric_state": None,
        "problems": [],
    }


def _mig_instance(index: Optional[int], uuid: Optional[str], memory_total_mib: Optional[int] = None) -> dict[str, Any]:
    return {"index": index, "uuid": uuid, "memory_total_mib": memory_total_mib}


def _label(gpu: dict[str, Any], position: int) -> str:
    index = position if gpu["index"] is None else gpu["index"]
    return f"GPU {index} ({gpu['pci_bus_id'] or gpu['uuid'] or gpu['name'] or 'unnamed'})"


_LOST_REMEDY = "Drain the host and reboot it; if the GPU is lost again, reseat or replace it (power, riser, slot)."


def _value_problem(label: str, text: str, names: list[str]) -> Problem:
    absent = bool(_ABSENT.fullmatch(text))
    if _LOST.fullmatch(text):
        message = f"{label}: nvidia-smi answers {text!r} for {', '.join(names)}."
        return problem("error", "gpu_lost", message, _LOST_REMEDY)
    return problem(
        "warning",
        "value_not_supported" if absent else "value_failed",
        f"{label}: nvidia-smi answers {text!r} for {', '.join(names)}; taken as unknown.",
        "None needed unless this GPU is known to report it."
        if absent
        else "Look for Xid errors of this GPU in the kernel log; reset it (nvidia-smi --gpu-reset) or reboot.",
    )


def _fill(gpu: dict[str, Any], cells: dict[str, str], position: int) -> None:
    """Put named cells into the record; each that holds no value stays null and is named in one problem."""
    failed: dict[str, list[str]] = {}
    for field in _FIELDS:
        if field.name not in cells:
            continue
        text = cells[field.name].strip()
        value = _convert(field.kind, text)
        if value is None and not (field.name in _OPTIONAL and _ABSENT.fullmatch(text)):
            failed.setdefault(text or "(blank)", []).append(field.name)
        group, _, key = field.name.rpartition(".")
        (gpu[group] if group else gpu)[key] = value
    if gpu["name"] and re.search(r"^GRID |-\d{1,3}[ABCQ]$", gpu["name"]):  # profile names such as GRID A100-40C
        gpu["vgpu"] = True
    if "memory_total_mib" in cells:
        # Memory shared with the CPU has no size of its own; a counter that failed says nothing of the kind.
        gpu["unified_memory"] = bool(_ABSENT.fullmatch(cells["memory_total_mib"].strip()))
    for text, names in failed.items():
        gpu["problems"].append(_value_problem(_label(gpu, position), text, names))


def _read_elements(text: str) -> _Node:
    """Read XML of any degree of damage: cut off, or with other text around and between the elements."""
    root = _Node("", [], [])
    stack = [root]
    data = ""
    for match in re.finditer(r"<(/?)([A-Za-z_][\w.-]*)([^<>]*)>|([^<]+)|<", text):
        closing, tag, attributes, characters = match.groups()
        if characters is not None:
            data = characters
        elif tag and not closing:
            node = _Node(tag, [], [])
            identity = re.search(r"""\bid=["']([^"']*)["']""", attributes)
            if identity:
                node.children.append(_Node("@id", [identity[1]], []))
            stack[-1].children.append(node)
            if not attributes.endswith("/"):
                stack.append(node)
            data = ""
        elif tag and any(node.tag == tag for node in stack[1:]):
            if stack[-1].tag == tag and not [child for child in stack[-1].children if child.tag != "@id"]:
                stack[-1].text.append(html.unescape(data))
            while stack.pop().tag != tag:
                pass
    return root


def _read_outline(text: str) -> _Node:
    """Read the indented `Name : value` report of `nvidia-smi -q`."""
    root = _Node("", [], [])
    stack = [(-1, root)]
    for line in text.split("\n"):
        match = re.match(r"( *)(\S[^:]*?(?:[0-9A-Fa-f:.]{12,})?)(?:\s+: (.*))?$", line.rstrip())
        if not match:
            continue
        indent = len(match[1])
        while stack[-1][0] >= indent:
            stack.pop()
        node = _Node(match[2], [] if match[3] is None else [match[3]], [])
        stack[-1][1].children.append(node)
        stack.append((indent, node))
    return root


def _all(node: _Node, tag: str) -> list[_Node]:
    """Descendants of that tag, outermost only, in document order."""
    found: list[_Node] = []
    for child in node.children:
        found += [child] if child.tag == tag else _all(child, tag)
    return found


def _integer(text: Optional[str]) -> Optional[int]:
    return _convert("mib", text) if text else None


class _HealthSign(NamedTuple):
    """Where -x and -q show failing hardware, what they print then, and what that means."""

    xml: str
    text: str
    bad: str
    severity: str
    code: str
    meaning: str
    remedy: str


_RESET = "Drain the host and reset the GPU (nvidia-smi --gpu-reset -i UUID) or reboot."
_ECC_REMEDY = f"{_RESET} If errors return, replace the card."
_REPLACE = "Replace the card: NVIDIA treats this as a reason for return (RMA)."
_RECOVER = "Drain the host, then do what the driver asks: nvidia-smi --gpu-reset -i UUID, or a reboot."
_HEALTH = (
    _HealthSign(
        "remapped_rows/remapped_row_failure",
        "Remapped Rows/Remapping Failure Occurred",
        "Yes",
        "error",
        "row_remap_failed",
        "remapping a bad memory row failed",
        _REPLACE,
    ),
    _HealthSign(
        "remapped_rows/remapped_row_pending",
        "Remapped Rows/Pending",
        "Yes",
        "warning",
        "row_remap_pending",
        "a bad memory row waits to be remapped",
        _RESET,
    ),
    _HealthSign(
        "retired_pages/pending_retirement|retired_pages/pending_blacklist",
        "Retired Pages/Pending Page Blacklist",
        "Yes",
        "warning",
        "page_retirement_pending",
        "a bad memory page waits to be retired",
        _RESET,
    ),
    _HealthSign(
        "ecc_errors/aggregate/sram_threshold_exceeded",
        "ECC Errors/Aggregate/SRAM Threshold Exceeded",
        "Yes",
        "error",
        "sram_threshold_exceeded",
        "more SRAM errors than NVIDIA accepts",
        _REPLACE,
    ),
    _HealthSign(
        "ecc_errors/unrepairable_memory",
        "ECC Errors/Unrepairable Memory",
        "Yes",
        "error",
        "unrepairable_memory",
        "memory that cannot be repaired",
        _REPLACE,
    ),
    _HealthSign(
        "ecc_errors/channel_repair_pending|ecc_errors/tpc_repair_pending",
        "ECC Errors/Channel Repair Pending|ECC Errors/TPC Repair Pending",
        "Yes",
        "warning",
        "repair_pending",
        "a repair waits for the next reset",
        _RESET,
    ),
    _HealthSign(
        "gpu_recovery_action",
        "GPU Recovery Action",
        r"(?!None$|N/A$).+",
        "error",
        "recovery_needed",
        "the driver asks for a recovery action",
        _RECOVER,
    ),
)


def _health_problems(node: _Node, label: str, *, xml: bool) -> list[Problem]:
    """What the report says about failing hardware, independent of any one field of the record."""
    found: list[Problem] = []
    volatile = node.find("ecc_errors/volatile" if xml else "ECC Errors/Volatile")
    # Up to Turing a double-bit error is what Ampere and later call an uncorrectable one.
    kinds = [*volatile.children, *_all(volatile, "double_bit"), *_all(volatile, "Double Bit")] if volatile else []
    counters = [child for kind in kinds for child in (kind, *(kind.children if "ouble" in kind.tag else ()))]
    uncorrected = {
        counter.tag: int(counter.text[0])
        for counter in counters
        if re.search("(?i)uncorrectable|^total$", counter.tag)
        and counter.text
        and counter.text[0].strip().isdecimal()
        and int(counter.text[0])
    }
    if uncorrected:
        counts = ", ".join(f"{tag} {count}" for tag, count in uncorrected.items())
        message = f"{label}: uncorrectable ECC errors since the driver was loaded ({counts})."
        found.append(problem("error", "ecc_uncorrected", message, _ECC_REMEDY))
    for sign in _HEALTH:
        values = (node.value(path) for path in (sign.xml if xml else sign.text).split("|"))
        value = next((value for value in values if value and re.fullmatch(sign.bad, value)), None)
        if value and not _ABSENT.fullmatch(value):
            says = "" if value == "Yes" else f": {value}"
            found.append(problem(sign.severity, sign.code, f"{label}: {sign.meaning}{says}.", sign.remedy))
    return found


def _gpu_from_xml(node: _Node, position: int) -> dict[str, Any]:
    gpu = _empty_gpu()
    gpu["index"] = position
    gpu["pci_bus_id"] = normalise_bus_id(node.value("@id") or "")
    cells: dict[str, str] = {}
    for field in _FIELDS:
        value = next((text for text in map(node.value, field.xml.split("|")) if text is not None), None)
        if value is not None:
            cells[field.name] = value
    _fill(gpu, cells, position)
    gpu["pci_bus_id"] = gpu["pci_bus_id"] or normalise_bus_id(node.value("@id") or "")
    devices = node.find("mig_devices")
    for device in devices.children if devices else []:
        gpu["mig"]["instances"].append(
            _mig_instance(
                _integer(device.value("index")),
                device.value("uuid"),
                _integer(device.value("fb_memory_usage/total")),
            ),
        )
    for process in _all(node, "process_info"):
        pid = _integer(process.value("pid"))
        if pid is not None:
            memory = _integer(process.value("used_memory"))
            gpu["holders"].append({"pid": pid, "user": None, "unit": None, "memory_mib": memory})
    gpu["problems"] += _health_problems(node, _label(gpu, position), xml=True)
    return gpu


def _gpu_from_outline(node: _Node, position: int) -> dict[str, Any]:
    gpu = _empty_gpu()
    gpu["index"] = position
    cells = {"pci_bus_id": node.tag.split(" ", 1)[1]}
    for field in _FIELDS:
        value = next((text for text in map(node.value, field.text.split("|")) if text is not None), None)
        if value is not None:
            cells[field.name] = value
    _fill(gpu, cells, position)
    gpu["problems"] += _health_problems(node, _label(gpu, position), xml=False)
    return gpu


_ERROR_LINE = r"^(?:Unable to|Failed to|NVIDIA-SMI has failed|ERROR)"
_FAILED_CELL = r"\[(?:Unknown Error|Insufficient Permissions|GPU requires reset|GPU is lost|Not Found)\]|^ERR!"


_GPU_NAMES = r"(?:NVIDIA |Tesla |Quadro |GeForce |GRID |TITAN |[RG]TX |[ABHLPTV]\d{2,4}\b)"
# What makes a table nvidia-smi's: columns that nothing else has.
_CSV_ONLY_NVIDIA = {"uuid", "gpu_uuid", "gpu_name", "gpu_bus_id", "compute_cap", "driver_version"}


def _is_nvidia_row(cells: list[str]) -> bool:
    """Whether a row without header is of an NVIDIA GPU: by its UUID or bus id, or its name beside a number."""
    identity = r"(?:GPU|MIG)-\S+|[\dA-Fa-f]{8}:[\dA-Fa-f]{2}:[\dA-Fa-f]{2}\.[0-7]"
    if any(re.fullmatch(identity, cell) for cell in cells):
        return True
    numbers = any(re.fullmatch(r"[\d.]+(?: ?(?:MiB|W|%))?", cell) for cell in cells)
    return numbers and any(re.match(_GPU_NAMES, cell) for cell in cells)


def _csv_cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


_CSV_NAMES = {name: field.name for field in _FIELDS for name in field.csv.split("|") if name}
_CSV_NAMES["index"] = "index"
_CSV_NAMES["driver_version"] = "driver_version"


def _csv_header(line: str) -> Optional[list[str]]:
    """Column names of a `--query-gpu` header without their units, None for any other line."""
    names = [re.sub(r" \[[^\]]*\]$", "", cell) for cell in _csv_cells(line)]
    named = all(re.fullmatch(r"[a-z_]+[a-z0-9_]*(\.[a-z0-9_]+)*", name) for name in names)
    return names if named and any(name in _CSV_NAMES for name in names) else None


def _guess_columns(rows: list[list[str]]) -> list[str]:
    """Name the columns of a table without header by the form of their cells; "" where the form does not tell."""
    width = min(len(row) for row in rows)
    forms = {
        "uuid": r"(?:GPU|MIG)-.+",
        "pci.bus_id": r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]",
        "driver_version": r"\d{3}\.\d{2,3}\.\d{2}",
        "memory": r"\d+ MiB",
    }
    names = [""] * width
    for column in range(width):
        cells = [row[column] for row in rows if _convert("word", row[column]) is not None]
        for name, form in forms.items():
            if cells and all(re.fullmatch(form, cell) for cell in cells):
                names[column] = name
    if all(row[0].isdecimal() for row in rows):
        names[0] = "index"
    if width > 1 and not names[1] and all(re.search(r"[A-Za-z]{3}", row[1]) for row in rows):
        names[1] = "name"
    elif not names[0] and all(re.match(_GPU_NAMES, row[0]) for row in rows):
        names[0] = "name"
    memory = [column for column, name in enumerate(names) if name == "memory"]
    for column in memory:
        names[column] = ""
    sizes = [[_convert("mib", row[column]) for column in memory] for row in rows]
    # Two sizes, the second never the smaller: the customary memory.used, memory.total. Anything else stays unnamed.
    if all(len(row) == 2 and None not in row and row[0] <= row[1] for row in sizes):  # noqa: PLR2004  (used, total)
        names[memory[0]], names[memory[1]] = "memory.used", "memory.total"
    return names


def _csv_table(lines: list[str]) -> tuple[Optional[list[str]], list[list[str]]]:
    """Find the header, if there is one, and the rows of a `--query-gpu` table among other lines."""
    header: Optional[list[str]] = None
    rows: list[list[str]] = []
    for line in lines:
        names = _csv_header(line)
        cells = _csv_cells(line)
        if names:
            header = header or names
        elif re.search(_ERROR_LINE, line):
            continue
        elif len(cells) == len(header or []) or (len(cells) > 1 and _is_nvidia_row(cells)):
            rows.append(cells)
    specific = any("." in name or name in _CSV_ONLY_NVIDIA for name in header or [])
    return header, rows if specific or any(map(_is_nvidia_row, rows)) else []


def _gpu_from_row(header: list[str], row: list[str], position: int, *, exact: bool) -> dict[str, Any]:
    gpu = _empty_gpu()
    # In a row cut short the last cell may be half a cell; in one too long nothing is sure to be in its column.
    whole = row if len(row) >= len(header) else row[:-1]
    named = {name: whole[column] for column, name in enumerate(header[: len(whole)])}
    if exact and len(row) > len(header):
        named = {}
    if named.get("index", "").isdecimal():
        gpu["index"] = int(named["index"])
    _fill(gpu, {_CSV_NAMES[name]: cell for name, cell in named.items() if name in _CSV_NAMES}, position)
    failed: dict[str, list[str]] = {}
    for column, cell in enumerate(whole):  # columns outside the record still tell that the GPU is unwell
        name = header[column] if column < len(header) else ""
        if name not in _CSV_NAMES and re.search(_FAILED_CELL, cell, re.IGNORECASE):
            failed.setdefault(cell, []).append(name or f"column {column + 1}")
    gpu["problems"] += [_value_problem(_label(gpu, position), text, names) for text, names in failed.items()]
    if exact and len(row) != len(header):
        gpu["problems"].append(
            problem(
                "warning",
                "row_damaged",
                f"{_label(gpu, position)}: the row has {len(row)} cells where the header has {len(header)}.",
                "Take the output again; it was cut or altered on its way.",
            ),
        )
    return gpu


def _gpus_from_csv(lines: list[str]) -> tuple[list[dict[str, Any]], list[Problem], Optional[str]]:
    """Read a `--query-gpu` table: GPU records, problems of the table as a whole, driver version."""
    header, rows = _csv_table(lines)
    problems: list[Problem] = []
    if not rows:
        return [], problems, None
    columns = header or _guess_columns(rows)
    if header is None:
        unnamed = columns.count("")
        problems.append(
            problem(
                "warning",
                "csv_without_header",
                f"The table has no header: its columns were named by their form, {unnamed} could not be and are left.",
                "Run nvidia-smi with --format=csv (without noheader), or give the output of nvidia-smi -q -x.",
            ),
        )
    gpus = [_gpu_from_row(columns, row, position, exact=header is not None) for position, row in enumerate(rows)]
    versions = [row[columns.index("driver_version")] for row in rows if "driver_version" in columns[: len(row)]]
    return gpus, problems, next((version for version in versions if _convert("word", version)), None)


def _gpus_from_list(lines: list[str]) -> list[dict[str, Any]]:
    """Read `nvidia-smi -L`."""
    gpus: list[dict[str, Any]] = []
    for line in lines:
        match = re.search(r"\bGPU (\d+): (.+?) \(UUID: (GPU-[^)\s]+)\)", line)
        device = re.search(r"\bMIG \S+\s+Device\s+(\d+): \(UUID: (MIG-[^)\s]+)\)", line)
        if match:
            gpu = _empty_gpu()
            gpu["index"] = int(match[1])
            _fill(gpu, {"name": match[2], "uuid": match[3]}, len(gpus))
            gpus.append(gpu)
        elif device and gpus:
            gpus[-1]["mig"]["enabled"] = True
            gpus[-1]["mig"]["instances"].append(_mig_instance(int(device[1]), device[2]))
    return gpus


_TABLE_GPU = re.compile(
    r"\|\s*(?P<index>\d+)\s+(?P<name>\S.*?)\s+(?:On|Off|WDDM|TCC|MCDM|N/A|ERR!)\s*\|"
    r"\s*(?P<bus_id>[0-9A-F]{4,8}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-7])\s+\S+\s*\|\s*(?P<ecc>\S+)\s*\|"
)
_TABLE_STATE = re.compile(
    r"\|.*?\b(?P<state>P\d{1,2}|ERR!)\s.*?/\s*(?P<power>\S+)\s*\|\s*(?:(?P<used>\S+)\s*/\s*(?P<total>\S+)|(?P<none>[^|]*?))\s*\|"
)
_TABLE_MIG = re.compile(r"\|\s*\|\s*\|\s*(Enabled|Disabled)\*?\s*\|")
_TABLE_PROCESS = re.compile(r"\|\s*(\d+)\s+(?:(?:N/A|\d+)\s+(?:N/A|\d+)\s+)?(\d+)\s+[CGM+]+\s.*?(?:\s(\d+)MiB)?\s*\|")


def _gpu_from_table(first: re.Match[str], second: Optional[re.Match[str]], mig: str, position: int) -> dict[str, Any]:
    gpu = _empty_gpu()
    gpu["index"] = int(first["index"])
    cells = {"pci_bus_id": first["bus_id"], "name": first["name"]}
    if first["name"].endswith("..."):  # shortened, and several cards begin alike
        del cells["name"]
    errors = int(first["ecc"]) if first["ecc"].isdecimal() else None
    cells["ecc"] = first["ecc"].replace("Off", "Disabled") if errors is None else "Enabled"
    if second:
        cells.update({"performance_state": second["state"], "power_limit_w": second["power"]})
        cells["memory_total_mib"] = second["total"] or second["none"]
        if second["used"]:
            cells["memory_used_mib"] = second["used"]
    _fill(gpu, cells, position)
    gpu["mig"]["enabled"] = {"Enabled": True, "Disabled": False}.get(mig)
    if errors:
        message = f"{_label(gpu, position)}: {errors} uncorrectable ECC errors since the driver was loaded."
        gpu["problems"].append(problem("error", "ecc_uncorrected", message, _ECC_REMEDY))
    return gpu


def _gpus_from_table(lines: list[str]) -> list[dict[str, Any]]:
    """Read the table of a bare `nvidia-smi`: three lines for each GPU, and one for each process."""
    gpus: list[dict[str, Any]] = []
    for number, line in enumerate(lines):
        first, process = _TABLE_GPU.search(line), _TABLE_PROCESS.search(line)
        if first:
            after = [*lines[number + 1 : number + 3], "", ""]
            mig = _TABLE_MIG.search(after[1])
            gpus.append(_gpu_from_table(first, _TABLE_STATE.search(after[0]), mig[1] if mig else "", len(gpus)))
        elif process:
            holder = {"pid": int(process[2]), "user": None, "unit": None, "memory_mib": _integer(process[3])}
            for gpu in gpus:
                if gpu["index"] == int(process[1]):
                    gpu["holders"].append(holder)
    return gpus


class _KnownError(NamedTuple):
    """A sentence of nvidia-smi or the kernel driver and what it means."""

    pattern: str
    code: str
    remedy: str
    severity: str = "error"


_KNOWN_ERRORS = (
    _KnownError(
        r"Unable to (?:determine|detect) the device handle for (?:GPU|gpu)\s?(?:\d+: ?)?"
        r"([0-9A-Fa-f:.]{7,}):\s*([^\n]*)",
        "gpu_unreachable",
        _LOST_REMEDY,
    ),
    _KnownError(r"NVRM: The NVIDIA GPU (\S+)\s[^<]*?(fallen off the bus[^\n]*)", "gpu_unreachable", _LOST_REMEDY),
    _KnownError(
        r"could(?:n(?:'|\\'|&#x27;|&#39;|\u2019)t| not) communicate with the NVIDIA driver[^\n]*",
        "driver_unreachable",
        "Load the driver (modprobe nvidia) and read the kernel log for NVRM lines; install the driver if it is absent.",
    ),
    _KnownError(
        r"Driver/library version mismatch[^\n]*(?:\n[^\n]*NVML library version: ?(\S+))?",
        "driver_mismatch",
        "The loaded kernel module is older than the installed library: reboot, or stop all GPU users and reload it.",
    ),
    _KnownError(
        r"No supported GPUs were found|No devices were found|Unable to determine the number of GPUs",
        "no_devices",
        "Check that a GPU is on the PCI bus (lspci -d 10de:) and bound to the driver nvidia, not vfio-pci or nouveau.",
    ),
    _KnownError(
        r"Failed to initialize NVML: (?!Driver/library|No supported)[^\n]*",
        "driver_unreachable",
        "Check /dev/nvidia* and who may open them; in a container restart it, its device rights may have been reset.",
    ),
    _KnownError(
        r"nvidia-smi[\"']?: (?:command |executable file )?not found|command not found: nvidia-smi|"
        r"'nvidia-smi' (?:is )?not (?:found|recognized)[^\n]*|[Nn]o such file or directory[^\n]*nvidia-smi|"
        r"nvidia-smi[^\n]*No such file|couldn't find libnvidia-ml[^\n]*",
        "driver_missing",
        "Install the NVIDIA driver.",
    ),
    _KnownError(
        r"WARNING: infoROM is corrupted at gpu[^\n]*",
        "inforom_corrupted",
        "Power the host off and on; if the warning stays, have the card's infoROM repaired or the card replaced.",
        "warning",
    ),
)


def _report_lines(text: str) -> list[str]:
    """Lines of an output of nvidia-smi without what a log, a quote or a data format put around them."""
    starts = r"GPU [0-9A-Fa-f]{8}:|GPU \d+: |<(?:nvidia_smi_log|gpu)\b|\+-{9}|\|  +0 |"
    names = "|".join(re.escape(name) for name in sorted(_CSV_NAMES, key=len, reverse=True))
    columns = rf"(?<![\w.])(?:{names}|timestamp|count)(?: \[\w+\])?, ?[a-z]|\d+, ?(?:{_GPU_NAMES}|GPU-)"
    return _without_prefix(_LINE_END.sub("", text).split("\n"), re.compile(starts + columns))


def _error_problems(text: str) -> list[Problem]:
    found: list[Problem] = []
    for known in _KNOWN_ERRORS:
        for match in re.finditer(known.pattern, text):
            if known.code == "no_devices" and any(entry["code"] == "no_devices" for entry in found):
                continue
            message = " ".join(match[0].split())
            entry = problem(known.severity, known.code, f"nvidia-smi says: {message}", known.remedy)
            if known.code == "gpu_unreachable":
                entry["pci_bus_id"] = normalise_bus_id(match[1])
            found.append(entry)
    return found


def parse_smi(text: str) -> dict[str, Any]:
    """Read GPU records from `nvidia-smi -q -x`, `-q`, `-L`, `--query-gpu` CSV or its plain table, or its error text.

    Args:
        text: What nvidia-smi printed; error lines before, between and after the records are expected.

    Returns:
        `gpus`: records in printed order, with the keys of a GPU in the topology contract that nvidia-smi can fill;
        a cell that failed is null. `index` is the number nvidia-smi gives, null where a GPU missing from the middle
        makes it uncertain. `problems`: everything that failed, named. `driver_version`, `cuda_version`: as printed,
        else null.
    """
    text = _as_printed(text)
    problems = _error_problems(text)
    text = "\n".join(_report_lines(text))
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    driver: Optional[str] = None
    cuda: Optional[str] = None
    outline = re.search(r"^GPU [0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]\s*$", text, re.MULTILINE)
    if re.search(r"<(?:nvidia_smi_log|gpu)\b", text):
        tree = _read_elements(text)
        nodes = [node for node in _all(tree, "gpu") if any(map(node.find, ("@id", "uuid", "product_name", "pci")))]
        gpus = [_gpu_from_xml(node, position) for position, node in enumerate(nodes)]
        log = tree.find("nvidia_smi_log") or tree
        driver, cuda = log.value("driver_version"), log.value("cuda_version")
        announced = _integer(log.value("attached_gpus"))
        if not re.search(r"</nvidia_smi_log\s*>", text) or (announced or 0) > len(gpus):
            problems.append(
                problem(
                    "warning",
                    "output_incomplete",
                    f"The report is cut or short: {len(gpus)} GPU records, {announced} announced.",
                    "Run nvidia-smi -q -x again; if it stays short, a GPU stopped answering (see the kernel log).",
                ),
            )
    elif outline:
        tree = _read_outline(text)
        blocks = [node for node in tree.children if re.fullmatch(r"GPU [0-9A-Fa-f]{8}:\S+", node.tag)]
        gpus = [_gpu_from_outline(node, position) for position, node in enumerate(blocks)]
        driver, cuda = tree.value("Driver Version"), tree.value("CUDA Version")
    else:
        gpus = _gpus_from_table(lines) or _gpus_from_list(lines)
        versions = re.search(r"Driver Version: *([\d.]+)(?: +CUDA Version: *([\d.]+))?", text)
        driver, cuda = versions.groups() if versions and gpus else (None, None)
        if not gpus:
            gpus, table_problems, driver = _gpus_from_csv(lines)
            problems += table_problems
    if any(entry["code"] == "gpu_unreachable" for entry in problems) and "<gpu" in text:
        for gpu in gpus:
            gpu["index"] = None
    if not gpus and not problems:
        problems.append(
            problem(
                "error",
                "unrecognised_output" if lines else "empty_output",
                f"No GPU record and no known error in: {' '.join(lines)[:120]!r}"
                if lines
                else "nvidia-smi printed nothing.",
                "Give the output of nvidia-smi -q -x, or of --query-gpu=... --format=csv.",
            ),
        )
    for gpu in gpus:
        problems += gpu["problems"]
    return {"gpus": gpus, "problems": problems, "driver_version": driver, "cuda_version": cuda}
