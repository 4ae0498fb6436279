"""`nvidia-smi topo -m` as people paste it.

Where the expected values come from:
- 86 of the 103 captures are undamaged: there a second reader, ten lines that split at blanks and go by position, must
  agree (`by_position`). It shares no code with the parser and refuses anything with a cell too many or too few.
- the other 17 were read by eye; `BY_HAND` holds the result and the damage.
- where a capture has the host's NUMA nodes from lscpu, the printed CPU list says which node it must be.
- the number of GPUs is checked against the names the capture lists from another source (torch, nvidia-smi -L).
"""

import html
import json
import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_fleet.target.gpu_topology import parse_ranges, parse_smi, parse_topo_matrix, topo_disagreements

CAPTURES: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent.parent / "fixtures" / "topologies").glob("*.json"))
}


def all_pairs(count: int, link: str) -> dict[str, str]:
    return {f"{first}-{second}": link for first, second in combinations(range(count), 2)}


def in_groups(groups: list[list[int]], inside: str, across: str) -> dict[str, str]:
    count = sum(len(group) for group in groups)
    home = {gpu: number for number, group in enumerate(groups) for gpu in group}
    return {
        f"{first}-{second}": inside if home[first] == home[second] else across
        for first, second in combinations(range(count), 2)
    }


# PXB within each half but for the two PIX pairs 2-3 and 6-7; SYS across.
_PXB_HALVES = {**in_groups([[0, 1, 2, 3], [4, 5, 6, 7]], "PXB", "SYS"), "2-3": "PIX", "6-7": "PIX"}
# Rows 0 to 2 whole, row 3 cut after GPU6; PIX for 0-1 and 3-4. Rows 4 to 7 are gone.
_QUADRO_CUT = {
    pair: "PIX" if pair in ("0-1", "3-4") else "PXB"
    for pair in all_pairs(8, "")
    if int(pair[0]) < 3 or (pair[0] == "3" and pair != "3-7")
}

# name: (nodes by GPU, links); the comment says what keeps the reader by position from it.
BY_HAND: dict[str, tuple[list[list[int]], dict[str, str]]] = {
    "a100-4x-reversed-nodes-3-2-1-0": ([[3], [2], [1], [0]], all_pairs(4, "NV4")),  # "# " before each line
    "b200-8x-4nodes-snc2": ([[0], [0], [1], [1], [2], [2], [3], [3]], all_pairs(8, "NV18")),  # glued header
    "h100-1x-59nic": ([[1]], {}),  # header glued at NIC26NIC27 and NIC55NIC56
    "h100-8x-4nodes-3-1-3-1-lscpu": ([[0], [0], [0], [1], [2], [2], [2], [3]], all_pairs(8, "NV18")),  # SYSSYS
    "h100-8x-log-prefixed-ansi": ([[0]] * 4 + [[1]] * 4, all_pairs(8, "NV18")),  # a log prefix on each line
    # The first four rows end in "0-47,96-1430N/A". CPUs 144-191 belong to GPU4 to GPU7, so the list ends at 143.
    "h100-8x-nic-overflow-glued": ([[0]] * 4 + [[1]] * 4, all_pairs(8, "NV18")),
    "h20-8x-40nic": ([[0]] * 4 + [[1]] * 4, all_pairs(8, "NV18")),  # header glued at NIC16NIC17
    "h200-8x-interleaved-cpus": ([[0]] * 4 + [[1]] * 4, all_pairs(8, "NV18")),  # header glued at NIC10NIC11
    "mixed-3090-4090-5090": ([[], [], []], all_pairs(3, "SYS")),  # WSL: blank affinity
    "quadro-rtx6000-8x-row-cut": ([[0], [0], [0], [], [], [], [], []], _QUADRO_CUT),
    "rtx4090-4x-blank-affinity": ([[]] * 4, all_pairs(4, "SYS")),
    "rtx4090-8x-pxb-old-format-ansi": ([[0]] * 4 + [[1]] * 4, _PXB_HALVES),  # U+FFFD where ESC was
    "rtxada4000-8x-blank-affinity": ([[]] * 8, all_pairs(8, "SYS")),
    # Sixteen columns, rows of GPU0 to GPU3 only, no NUMA column.
    "v100-16x-hgx2-rows-cut": ([[]] * 16, {pair: "NV6" for pair in all_pairs(16, "") if int(pair.split("-")[0]) < 4}),
    "wsl-3090-1x": ([[]], {}),
    "wsl-4090-1x": ([[]], {}),
    "wsl-laptop-3070": ([[]], {}),
}

# Captures whose list of names does not count GPUs: the framework saw fewer, or lists each model once.
_NAMES_DIFFER = {"rtx4090-4x-blank-affinity", "v100pcie-4x-uneven-1-3"}


def by_position(text: str) -> tuple[list[list[int]], dict[str, str]] | None:
    """The second reader: every row must have exactly the cells of the header."""
    text = re.sub(r"\x1b\[\d*m", "", text)
    for name in ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID"):
        text = text.replace(name, name.replace(" ", "_"))
    table = [line.split() for line in text.split("\n") if re.match(r"\s*GPU\d", line)]
    header, rows = (table[0], table[1:]) if table else ([], [])
    count = sum(1 for name in header if re.fullmatch(r"GPU\d+", name))
    if len(rows) != count or any(len(row) != len(header) + 1 for row in rows) or not rows:
        return None
    nodes = []
    for row in rows:
        cell = row[1 + header.index("NUMA_Affinity")] if "NUMA_Affinity" in header else "N/A"
        first, _, last = cell.partition("-")
        nodes.append([] if cell == "N/A" else list(range(int(first), int(last or first) + 1)))
    links = {f"{first}-{second}": rows[first][1 + second] for first, second in combinations(range(count), 2)}
    return nodes, links


def expected(name: str) -> dict[str, Any]:
    text = CAPTURES[name]["topo_matrix_text"]
    nodes, links = BY_HAND[name] if name in BY_HAND else (by_position(text) or ([], {}))
    return {"gpus": list(range(len(nodes))), "links": links, "numa": dict(enumerate(nodes))}


@pytest.mark.parametrize("name", CAPTURES)
def test_every_capture(name: str) -> None:
    capture = CAPTURES[name]
    parsed = parse_topo_matrix(capture["topo_matrix_text"])
    assert parsed == expected(name)
    if capture["gpus"] and name not in _NAMES_DIFFER:
        assert len(parsed["gpus"]) == len(capture["gpus"])


def each_line(before: str) -> Callable[[str], str]:
    return lambda text: re.sub("^", lambda _: before, text, flags=re.MULTILINE)


_OTHER_OUTPUT = """\
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:9D:00.0 Off |                    0 |
| N/A   31C    P0             72W /  700W |       0MiB /  81559MiB |      0%      Default |
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaaaaaa-0000-0000-0000-000000000000)
"""

# The ways in which a matrix comes to us; none of them hides anything.
CARRIED: dict[str, Callable[[str], object]] = {
    "quoted mail": each_line("> "),
    "quoted twice": each_line(">> "),
    "source comment": each_line("// "),
    "shell comment": each_line("#"),
    "list item": each_line(" * "),
    "diff": each_line("- "),
    "indented": each_line("    "),
    "docker compose": each_line("vllm_gpu0  | "),
    "pdsh, the host named like a GPU": each_line("gpu0301: "),
    "a rank named like a GPU": each_line("[GPU0] "),
    "mpirun": each_line("[1,0]<stdout>:"),
    "journal": each_line("Apr 06 03:02:45 gpu-a vllm[123]: "),
    "klog": each_line("I0406 03:02:45.000000       1 topo.go:12] "),
    "ray, coloured": each_line("\x1b[36m(Worker pid=12, ip=10.0.0.1)\x1b[0m "),
    "line numbers": lambda text: "\n".join(f"{n:6d}\t{line}" for n, line in enumerate(text.split("\n"), 1)),
    "rsyslog": lambda text: each_line("Apr  6 03:02:45 h x: ")(text.replace("\t", "#011").replace("\x1b", "#033")),
    "code fence": lambda text: f"```text\n{text}\n```",
    "inline code": lambda text: f"`{text}`",
    "no-break spaces": lambda text: text.replace(" ", "\xa0"),
    "typographic dashes": lambda text: text.replace("-", "\u2013"),
    "zero-width spaces": lambda text: text.replace("\t", "\t\u200b"),
    "HTML entities": lambda text: text.replace(" ", "&nbsp;").replace("\t", "&#9;"),
    "HTML": lambda text: f"<pre><code>{html.escape(text)}</code></pre>",
    "HTML line breaks": lambda text: text.replace("\n", "<br/>"),
    "JSON": lambda text: json.dumps({"stdout": text}),
    "JSON in JSON": lambda text: json.dumps(json.dumps(text)),
    "Ansible's stdout_lines": lambda text: json.dumps({"stdout_lines": text.split("\n")}, indent=1),
    "JSON list on one line": lambda text: json.dumps(text.split("\n")),
    "Python list": lambda text: repr(text.split("\n")),
    "Windows PowerShell's UTF-16": lambda text: text.encode("utf-16"),
    "UTF-16 read as UTF-8": lambda text: text.encode("utf-16").decode("utf-8", "replace"),
    "CRLF twice": lambda text: text.replace("\n", "\r\r\n"),
    "CR alone": lambda text: text.replace("\n", "\r"),
    "blank lines between": lambda text: text.replace("\n", "\n\n"),
    "cat -A": lambda text: text.replace("\t", "^I").replace("\x1b", "^[").replace("\n", "$\n"),
    "tput": lambda text: f"\x1b[0;4m{text}\x1b(B\x1b[m",
    "terminal title": lambda text: f"\x1b]0;root@gpu-a: ~\x07{text}",
    "grep --color": lambda text: text.replace("GPU", "\x1b[01;31m\x1b[KGPU\x1b[m\x1b[K"),
    "after the other outputs": lambda text: f"$ nvidia-smi; nvidia-smi -L; nvidia-smi topo -m\n{_OTHER_OUTPUT}{text}",
    "before another matrix": lambda text: f"{text}\n\n \tGPU0\tGPU1\t\n GPU0\tX\tGNS\t\n GPU1\tGNS\tX\t\n",
    "after sentences on GPUs": lambda text: f"CUDA_VISIBLE_DEVICES=0 uses GPU0\n{text}\nGPU0 has 1 NVLink, GPU1 NV18",
    "sent twice": lambda text: f"{text}\n\n{text}",
}


@pytest.mark.parametrize("way", CARRIED)
def test_how_a_capture_was_carried_changes_nothing(way: str) -> None:
    different = [
        name
        for name, capture in CAPTURES.items()
        if parse_topo_matrix(CARRIED[way](capture["topo_matrix_text"])) != expected(name)  # type: ignore[arg-type]
    ]
    assert different == []


def hard_wrapped(text: str, width: int) -> str:
    lines = [line.expandtabs() for line in text.split("\n")]
    return "\n".join(line[start : start + width] for line in lines for start in range(0, max(len(line), 1), width))


def agrees(parsed: dict[str, Any], truth: dict[str, Any]) -> bool:
    """Nothing but the truth, though not all of it."""
    return (
        set(parsed["gpus"]) <= set(truth["gpus"])
        and parsed["links"].items() <= truth["links"].items()
        and all(nodes in ([], truth["numa"].get(gpu)) for gpu, nodes in parsed["numa"].items())
    )


@pytest.mark.parametrize("width", [72, 80, 100, 120, 160, 200])
def test_wrapped_by_any_terminal_nothing_is_made_up(width: int) -> None:
    parsed = {
        name: parse_topo_matrix(hard_wrapped(capture["topo_matrix_text"], width)) for name, capture in CAPTURES.items()
    }
    assert [name for name in CAPTURES if not agrees(parsed[name], expected(name))] == []
    assert sum(parsed[name] == expected(name) for name in CAPTURES) >= 90  # of 103


def test_a_text_that_stops_anywhere_says_nothing_else() -> None:
    """NV1 is no link when NV18 was cut, and 0 no node when 0-1 was."""
    wrong = [
        (name, end)
        for name, capture in CAPTURES.items()
        for end in range(7, len(capture["topo_matrix_text"]), 61)
        if not agrees(parse_topo_matrix(capture["topo_matrix_text"][:end]), expected(name))
    ]
    assert wrong == []


def test_of_two_matrices_the_one_with_links_counts() -> None:
    status = " \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n\n"
    assert parse_topo_matrix(status + _WHOLE) == _WHOLE_RESULT


def test_a_markdown_table() -> None:
    text = (
        "| | GPU0 | GPU1 | CPU Affinity | NUMA Affinity | GPU NUMA ID |\n|---|---|---|---|---|---|\n"
        "| GPU0 | X | SYS | 0-31 | 0 | N/A |\n| GPU1 | SYS | X | 32-63 | 1 | N/A |\n"
    )
    assert parse_topo_matrix(text) == {"gpus": [0, 1], "links": {"0-1": "SYS"}, "numa": {0: [0], 1: [1]}}


# What the tools of other vendors print of their GPUs.
OTHER_VENDORS = {
    "rocm-smi link types": (
        "================= Link Type between two GPUs =================\n"
        "       GPU0         GPU1\nGPU0   0            XGMI\nGPU1   XGMI         0\n"
    ),
    "rocm-smi weights": "       GPU0         GPU1\nGPU0   0            15\nGPU1   15           0\n",
    "rocm-smi nodes": "GPU[0]\t\t: (Topology) Numa Node: 0\nGPU[0]\t\t: (Topology) Numa Affinity: 0\n",
    "amd-smi csv": "gpu,market_name,vram\n0,AMD Instinct MI300X,196592\n1,AMD Instinct MI300X,196592\n",
    "xpu-smi": "         GPU 0/0  GPU 0/1  CPU Affinity\nGPU 0/0  S        MDF      0-23,48-71\n",
    "npu-smi": "\tNPU0\tNPU1\tCPU Affinity\nNPU0\tX\tHCCS\t0-23\nNPU1\tHCCS\tX\t24-47\n",
}


@pytest.mark.parametrize("name", OTHER_VENDORS)
def test_gpus_of_other_vendors_are_not_ours(name: str) -> None:
    assert parse_topo_matrix(OTHER_VENDORS[name]) == {"gpus": [], "links": {}, "numa": {}}
    assert parse_smi(OTHER_VENDORS[name])["gpus"] == []


def test_what_the_second_reader_cannot_read_was_read_by_hand() -> None:
    assert len(CAPTURES) == 103
    assert {name for name, capture in CAPTURES.items() if by_position(capture["topo_matrix_text"]) is None} == set(
        BY_HAND
    )


@pytest.mark.parametrize("name", [name for name, capture in CAPTURES.items() if capture["numa_nodes"]])
def test_nodes_agree_with_lscpu(name: str) -> None:
    capture = CAPTURES[name]
    cpus_of_node = {int(node): set(parse_ranges(cpus) or []) for node, cpus in capture["numa_nodes"].items()}
    parsed = parse_topo_matrix(capture["topo_matrix_text"])
    for line in capture["topo_matrix_text"].split("\n"):
        row = re.search(r"GPU(\d+)\s.*?[\sA-Z](\d+[-,][\d,-]*\d)", line)
        if not row or len(parsed["numa"][int(row[1])]) != 1:
            continue
        printed = set(parse_ranges(row[2]) or [])
        assert printed <= cpus_of_node[parsed["numa"][int(row[1])][0]], line


def test_columns_of_gpu_memory_nodes_are_not_gpus_and_not_places() -> None:
    parsed = parse_topo_matrix(CAPTURES["gb200-nvl4-arm-34numa"]["topo_matrix_text"])
    assert parsed["gpus"] == [0, 1, 2, 3]
    assert parsed["numa"] == {0: [0], 1: [0], 2: [1], 3: [1]}  # not 2, 10, 18, 26, where only GPU memory is


def test_the_row_of_the_lower_number_decides_and_the_difference_is_told() -> None:
    text = CAPTURES["h100-4x-nv6-8nodes-0-2-4-6"]["topo_matrix_text"]
    assert parse_topo_matrix(text)["links"]["0-2"] == "NV6"
    assert (0, 2, "NV6", "SYS") in topo_disagreements(text)


_WHOLE = (
    "\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tNV18\tPIX\tSYS\t0-31,64-95\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tPIX\t32-63,96-127\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tPIX\tSYS\t X \t\t\t\t\n"
)
_WHOLE_RESULT = {"gpus": [0, 1], "links": {"0-1": "NV18"}, "numa": {0: [0], 1: [1]}}


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda text: text, id="none"),
        pytest.param(lambda text: text.lstrip(), id="leading tab lost"),
        pytest.param(lambda text: text.expandtabs(8), id="tabs became spaces"),
        pytest.param(lambda text: re.sub(r"[ \t]+", " ", text), id="single spaces"),
        pytest.param(lambda text: text.replace("\t", "\t\t"), id="double tabs"),
        pytest.param(lambda text: text.replace("\n", "\r\n"), id="CRLF"),
        pytest.param(lambda text: text.replace("\t X \t", "\tX\t"), id="X without blanks"),
        pytest.param(lambda text: text.replace("\t X \t", "X"), id="X glued on both sides"),
        pytest.param(lambda text: text.replace("SYS\t", "SYS"), id="cells glued"),
        pytest.param(lambda text: text.replace("NIC1\t", "NIC1"), id="header glued"),
        pytest.param(lambda text: text.replace("CPU Affinity\t", "CPU Affinity"), id="tail header glued"),
        pytest.param(
            lambda text: re.sub("^", "2025-04-06T03:02:45Z gpu-7 | ", text, flags=re.MULTILINE), id="log prefix"
        ),
        pytest.param(lambda text: re.sub("^", "> ", text, flags=re.MULTILINE), id="quoted"),
        pytest.param(lambda text: f"\x1b[4m{text}\x1b[0m", id="ANSI"),
        pytest.param(lambda text: text.replace("\tGPU0", "\t\\x1b[4mGPU0", 1), id="escaped ANSI"),
        pytest.param(
            lambda text: f"Unable to determine the device handle for GPU0000:07:00.0\n{text}", id="error before"
        ),
        pytest.param(lambda text: text.replace("GPU1\tNV", "\nWARNING: lost\n\nGPU1\tNV"), id="lines between"),
        pytest.param(lambda text: text.encode(), id="bytes"),
    ],
)
def test_damage_that_hides_nothing_changes_nothing(damage: Any) -> None:
    assert parse_topo_matrix(damage(_WHOLE)) == _WHOLE_RESULT


def test_rows_wrapped_by_a_terminal_are_joined() -> None:
    names = [f"NIC{number}" for number in range(12)]
    header = "\t" + "\t".join(["GPU0", "GPU1", *names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    first = "\t".join(["GPU0", " X ", "NV18", *["SYS"] * 12, "0-31,64-95", "0", "", "N/A"])
    second = "\t".join(["GPU1", "NV18", " X ", *["NODE"] * 12, "32-63,96-127", "1", "", "N/A"])
    wide = [line.expandtabs(8) for line in (header, first, second)]
    for width in (60, 80, 100, 123):
        wrapped = "\n".join(line[start : start + width] for line in wide for start in range(0, len(line), width))
        parsed = parse_topo_matrix(wrapped)
        assert parsed["links"] == {"0-1": "NV18"}, width
        assert all(nodes in ([], [gpu]) for gpu, nodes in parsed["numa"].items()), width


@pytest.mark.parametrize(
    ("row", "nodes"),
    [
        ("GPU0\t X \t0-31\t0-1\t\tN/A", [0, 1]),
        ("GPU0\t X \t0-31\t0,2\t\tN/A", [0, 2]),
        ("GPU0\t X \t0-31\t\tN/A\t\tN/A", []),  # how nvidia-smi prints N/A
        ("GPU0\t X \t\t\t\tN/A", []),  # WSL
        ("GPU0\t X \t\t3\t\tN/A", [3]),  # no CPUs, a node all the same
        ("GPU0\t X \t0,2,4,6,8,10,1\t1\t\tN/A", [1]),  # CPU list cut after 15 characters
        ("GPU0\t X \t0-31\t-1\t\tN/A", []),
        ("GPU0\t X \t0-31\t1", []),  # cut: could be the start of 12
        ("GPU0 X 0-31 1", []),
        ("GPU0 X 0-31", []),
        ("GPU0 X", []),
        ("GPU0 X N/A N/A 2", []),  # the node of the GPU's own memory
        ("GPU0\t X \t0-31\t9999\t\tN/A", []),
    ],
)
def test_the_affinity_cell(row: str, nodes: list[int]) -> None:
    text = f"\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n{row}\n"
    assert parse_topo_matrix(text) == {"gpus": [0], "links": {}, "numa": {0: nodes}}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            "\tNIC0\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nNIC0\t X \tPIX\tSYS\t\t\n"
            "GPU0\tPIX\t X \tNV4\t0-7\t0\nGPU1\tSYS\tNV4\t X \t8-15\t1\n",
            id="network cards first",
        ),
        pytest.param(
            "\tGPU1\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU1\t X \tNV4\t8-15\t1\nGPU0\tNV4\t X \t0-7\t0\n",
            id="GPUs reversed",
        ),
        pytest.param(
            "\tGPU0\tGPU1\tNUMA Affinity\tCPU Affinity\nGPU0\t X \tNV4\t0\t0-7\nGPU1\tNV4\t X \t1\t8-15\n",
            id="nodes before CPUs",
        ),
        pytest.param(
            "\tGPU0\tGPU1\tGPU NUMA ID\tCPU Affinity\tNUMA Affinity\n"
            "GPU0\t X \tNV4\t4\t0-7\t0\nGPU1\tNV4\t X \t12\t8-15\t1\n",
            id="memory nodes first",
        ),
    ],
)
def test_columns_are_found_by_name_not_by_place(text: str) -> None:
    assert parse_topo_matrix(text) == {"gpus": [0, 1], "links": {"0-1": "NV4"}, "numa": {0: [0], 1: [1]}}


def test_a_cell_short_of_a_header_in_another_order_names_nothing() -> None:
    text = "\tGPU0\tNUMA Affinity\tCPU Affinity\nGPU0 X 0-7\n"
    assert parse_topo_matrix(text)["numa"] == {0: []}  # not nodes 0 to 7


def test_numbers_with_a_gap_are_kept() -> None:
    """nvidia-smi goes on without a GPU that it cannot open: here 1."""
    text = (
        "\tGPU0\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \tNODE\tSYS\t0-7\t0\t\tN/A\n"
        "GPU2\tNODE\t X \tSYS\t0-7\t0\t\tN/A\nGPU3\tSYS\tSYS\t X \t8-15\t1\t\tN/A\n"
    )
    assert parse_topo_matrix(text) == {
        "gpus": [0, 2, 3],
        "links": {"0-2": "NODE", "0-3": "SYS", "2-3": "SYS"},
        "numa": {0: [0], 2: [0], 3: [1]},
    }


def test_superchips_print_their_memory_nodes_apart() -> None:
    """GH200 with four: the last column is the node of the GPU's own memory, which has no CPUs."""
    rows = [["NV6"] * 4 for _ in range(4)]
    for gpu in range(4):
        rows[gpu][gpu] = " X "
    lines = ["\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"]
    lines += [
        "\t".join([f"GPU{gpu}", *row, f"{72 * gpu}-{72 * gpu + 71}", str(gpu), "", str(4 + 8 * gpu)])
        for gpu, row in enumerate(rows)
    ]
    parsed = parse_topo_matrix("\n".join(lines))
    assert parsed["numa"] == {0: [0], 1: [1], 2: [2], 3: [3]}
    assert parsed["links"] == all_pairs(4, "NV6")


def test_a_header_that_lost_a_name_moves_no_link() -> None:
    text = (
        "GPU0 GPU1 GPU3 CPU Affinity NUMA Affinity\n"
        "GPU0 X NV4 PIX SYS 0-7 0\nGPU1 NV4 X PXB PHB 0-7 0\nGPU2 PIX PXB X NODE 0-7 0\nGPU3 SYS PHB NODE X 8-15 1\n"
    )
    links = parse_topo_matrix(text)["links"]
    truth = {"0-1": "NV4", "0-2": "PIX", "0-3": "SYS", "1-2": "PXB", "1-3": "PHB", "2-3": "NODE"}
    assert links["0-1"] == "NV4"
    assert links.items() <= truth.items()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Failed to initialize NVML: Unknown Error",
        "GPU 0: NVIDIA H100 (UUID: GPU-0)",
        "NIC Legend:\n  NIC0: mlx5_0",
        None,
    ],
)
def test_text_without_a_matrix_has_no_gpus(text: str | None) -> None:
    assert parse_topo_matrix(text) == {"gpus": [], "links": {}, "numa": {}}  # type: ignore[arg-type]


# --- properties -----------------------------------------------------------------------------------------------------


@st.composite
def hosts(draw: st.DrawFn) -> tuple[dict[str, Any], str]:
    """A host and what nvidia-smi prints of it, in the tabs of the real thing."""
    count = draw(st.integers(1, 12))
    nics = draw(st.integers(0, 20))
    gpus = range(count)
    link = st.sampled_from(["SYS", "NODE", "PHB", "PXB", "PIX", "NV1", "NV6", "NV12", "NV18"])
    links = {f"{first}-{second}": draw(link) for first, second in combinations(gpus, 2)}
    columns = draw(st.sampled_from([[], ["CPU Affinity"], ["CPU Affinity", "NUMA Affinity"]]))
    if len(columns) == 2 and draw(st.booleans()):
        columns = [*columns, "GPU NUMA ID"]
    node_cell = st.sampled_from(["N/A", "0", "1", "3", "7", "0-1", "0-3", "2,5"])
    cells = {gpu: draw(node_cell) for gpu in gpus}
    nic_name = draw(st.sampled_from(["NIC{}", "mlx5_{}"]))
    names = [f"GPU{gpu}" for gpu in gpus] + [nic_name.format(nic) for nic in range(nics)]
    lines = ["\t" + "\t".join(names + columns)]
    for gpu in gpus:
        row = [" X " if gpu == peer else links[f"{min(gpu, peer)}-{max(gpu, peer)}"] for peer in gpus]
        row += [draw(link) for _ in range(nics)]
        cpus = draw(st.sampled_from(["0-31", "5", "0-63,128-191", "1,4-89", "0,2,4,6,8,10", "112-127,240-255"]))
        tail = [
            cpus,
            ("\t" if cells[gpu] == "N/A" else "") + cells[gpu],
            "\t" + draw(st.sampled_from(["N/A", "2", "10"])),
        ]
        lines.append("\t".join([f"GPU{gpu}", *row, *tail[: len(columns)]]))
    lines += [
        "\t".join([name, *["SYS"] * count, *[" X " if name == other else "PIX" for other in names[count:]]])
        for name in names[count:]
    ]
    lines += ["", "Legend:", "", "  X    = Self", "  SYS  = Connection traversing PCIe as well as the SMP interconnect"]
    known = "NUMA Affinity" in columns
    numa = {gpu: (parse_ranges(cells[gpu]) or [] if known else []) for gpu in gpus}
    return {"gpus": list(gpus), "links": links, "numa": numa}, "\n".join(lines)


@given(hosts(), st.sampled_from(["tabs", "spaces", "single", "stripped", "crlf", "ansi", "prefix"]))
def test_a_host_reads_back_as_it_was_printed(host: tuple[dict[str, Any], str], style: str) -> None:
    truth, text = host
    text = {
        "tabs": text,
        "spaces": text.expandtabs(8),
        "single": re.sub(r"[ \t]+", " ", text),
        "stripped": text.strip(),
        "crlf": text.replace("\n", "\r\n"),
        "ansi": re.sub(r"^\t(.*)$", "\t\x1b[4m\\1\x1b[0m", text, count=1, flags=re.MULTILINE),
        "prefix": re.sub("^", "INFO 12:00:01 ", text, flags=re.MULTILINE),
    }[style]
    assert parse_topo_matrix(text) == truth


@given(hosts(), st.data())
def test_damage_never_raises_and_never_invents_a_node(host: tuple[dict[str, Any], str], data: st.DataObject) -> None:
    truth, text = host
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 40)))
        text = (
            text[:start]
            + data.draw(st.sampled_from(["", " ", "\n", "N/A", "Unknown Error", "\x1b[0m", "ERR!"]))
            + text[end:]
        )
    parsed = parse_topo_matrix(text)
    printed = {node for nodes in truth["numa"].values() for node in nodes}
    assert {node for nodes in parsed["numa"].values() for node in nodes} <= printed


@given(st.text(st.sampled_from("GPU0123456789 XNVSYODEPIB\t\n,-/ACPUfinityNUMA\x1b[4m"), max_size=400))
def test_any_text_is_survived(text: str) -> None:
    parsed = parse_topo_matrix(text)
    assert set(parsed) == {"gpus", "links", "numa"}
    assert set(parsed["numa"]) == set(parsed["gpus"])
