"""The command line: what it prints, and the exit status that scripts go by."""

import json
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml
from hosts import FIXTURES, two_sockets

from vllm_fleet import catalog
from vllm_fleet.cli import main
from vllm_fleet.plan import make_plan

REFERENCE = str(FIXTURES / "captures" / "rtxpro6000-8x-2nodes")
TOO_SMALL = str(FIXTURES / "captures" / "rtxpro6000-2x")
SCREEN_LINES = 50


def test_plan_prints_replicas_memory_and_reasons_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "minimax_m2_5", "--topology", REFERENCE]) == 0
    text = capsys.readouterr().out
    for wanted in (
        "minimax-m2-5-0",
        "minimax-m2-5-1",
        "weights 53.7",
        "Why",
        "TP8 (fp8_block_divisibility)",
        "1536 / 8 = 192",
    ):
        assert wanted in text
    lines = text.splitlines()
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("objective", ["throughput", "latency", "context"])
@pytest.mark.parametrize("name", [name for name in catalog.known_cards() if not catalog.load(name).lab])
def test_every_plan_fits_one_screen(name: str, objective: str, capsys: pytest.CaptureFixture[str]) -> None:
    if main(["plan", "--model", name, "--topology", REFERENCE, "--objective", objective]) == 0:
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= SCREEN_LINES
        assert max(map(len, lines)) <= 120


def test_json_is_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = two_sockets()
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({"ansible_facts": {"gpu_topology": facts}}))
    arguments = ["plan", "--model", "minimax_m2_5", "--topology", str(path), "--format", "json"]
    assert main([*arguments, "--objective", "context", "--exclude-gpus", "0", "--first-port", "9001"]) == 0
    options = {"objective": "context", "exclude_gpus": ["0"], "first_port": 9001}
    assert json.loads(capsys.readouterr().out) == make_plan(facts, catalog.read_card("minimax_m2_5"), options).to_dict()


def test_topology_shows_gpus_links_and_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", REFERENCE]) == 0
    text = capsys.readouterr().out
    assert text.startswith("8 x NVIDIA RTX PRO 6000 Blackwell Server Edition on 2 NUMA nodes (4 + 4)")
    rows = [line.split() for line in text.splitlines() if line.startswith(("  0 ", "  7 "))]
    assert rows[0][-8:] == ["-", "NODE", "NODE", "NODE", "SYS", "SYS", "SYS", "SYS"]
    assert rows[1][-8:] == ["SYS", "SYS", "SYS", "SYS", "NODE", "NODE", "NODE", "-"]
    assert "NUMA node 1: CPUs 64-127,192-238,240-255" in text


def test_topology_as_json_is_what_a_plan_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", REFERENCE, "--format", "json"]) == 0
    path = tmp_path / "saved.json"
    path.write_text(capsys.readouterr().out)
    assert main(["plan", "--model", "minimax_m2_5", "--topology", str(path)]) == 0
    from_file = capsys.readouterr().out
    assert main(["plan", "--model", "minimax_m2_5", "--topology", REFERENCE]) == 0
    assert capsys.readouterr().out == from_file


def test_no_feasible_layout_is_exit_3_with_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "minimax_m2_5", "--topology", TOO_SMALL]) == 3
    text = capsys.readouterr().err
    assert "What would fit: 4 x" in " ".join(text.split())
    for layout in ("TP1 (memory)", "TP2 (memory)", "TP2+EP (memory)", "PP2 (memory)"):
        assert layout in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "gpt9", "--topology", REFERENCE], "Known cards"),
        (["--model", "minimax_m2_5", "--topology", "/nowhere.json"], "no such file or folder"),
        (["--model", "minimax_m2_5", "--topology", __file__], "not readable as JSON"),
        (["--model", "minimax_m2_5", "--topology", REFERENCE, "--vllm-version", "0.20.2"], "older than 0.24.0"),
        (["--model", "minimax_m2_5", "--topology", REFERENCE, "--exclude-gpus", "99"], "no such GPU"),
    ],
)
def test_bad_input_is_exit_2_and_one_paragraph(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in " ".join(captured.err.split())
    assert "Traceback" not in captured.err


def test_unknown_choice_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--model", "minimax_m2_5", "--topology", REFERENCE, "--objective", "speed"])
    assert caught.value.code == 2
    assert "throughput" in capsys.readouterr().err


def test_html_is_one_page_that_needs_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "--model", "minimax_m2_5", "--topology", REFERENCE, "--exclude-gpus", "5", "--format", "html"])
        == 0
    )
    page = capsys.readouterr().out
    assert page.startswith("<!DOCTYPE html>")
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"(src|href)=|@import|url[(]", page)
    assert page.count("not used") == 4  # GPU 5 and the three that it leaves without a group
    assert "KV cache: 32.2 GiB" in page
    ET.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])  # noqa: S314  our own page


def test_text_of_a_card_cannot_break_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = catalog.read_card("minimax_m2_5") | {"id": "owner/<script>alert(1)</script>"}
    path = tmp_path / "evil.yml"
    path.write_text(yaml.safe_dump({key: value for key, value in card.items() if key != "name"}))
    assert main(["plan", "--model", str(path), "--gpus", "8x H200", "--format", "html"]) == 0
    assert "<script>" not in capsys.readouterr().out


def test_compare_puts_models_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["minimax_m2_5", "glm_5_fp8", "kimi_k2_5_nvfp4", "glm_5_nvfp4"]
    arguments = [part for name in names for part in ("--model", name)]
    assert main(["compare", "--topology", REFERENCE, *arguments, "--format", "json"]) == 0
    entries = {entry["card"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert entries["minimax_m2_5"]["plan"]["layout"] == "2 x TP4"
    assert entries["minimax_m2_5"]["all_reduce_bytes_per_token"] == 2 * 62 * 3072 * 2
    assert entries["glm_5_fp8"]["plan"] is None
    assert "16 x" in entries["glm_5_fp8"]["why_not"]
    for name in ("kimi_k2_5_nvfp4", "glm_5_nvfp4"):
        assert entries[name]["plan"]["gpus"] == 8
        assert any("forks" in risk for risk in entries[name]["plan"]["risks"])


def test_compare_takes_every_card_and_fits_a_wide_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--gpus", "8x H200"]) == 0
    text = capsys.readouterr().out
    for name in catalog.known_cards():
        assert (name in text) == (not name.startswith("lab_"))
    assert max(map(len, text.splitlines())) <= 160
    assert "do not remove all-reduces" in " ".join(text.split())


@pytest.mark.parametrize(("gpus", "layout"), [("8x H200", "TP8"), ("16x RTX PRO 6000", "TP16")])
def test_what_if_answers_for_hosts_that_nobody_has(gpus: str, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    """GLM-5-FP8 takes 89.4 GiB on each of eight GPUs: an H200 has them, an RTX PRO 6000 does not."""
    assert main(["plan", "--model", "glm_5_fp8", "--gpus", gpus]) == 0
    text = capsys.readouterr().out
    assert f"as {layout}" in text
    assert "not to serve with" in " ".join(text.split())


@pytest.mark.parametrize(
    ("gpus", "told"), [("H200", "write it like"), ("8x Voodoo2", "not in the table"), ("0x H200", "1 to")]
)
def test_a_host_that_cannot_be_assumed_is_told(gpus: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "minimax_m2_5", "--gpus", gpus]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_the_command_loads_no_library_before_it_needs_one() -> None:
    """So that it starts at once."""
    code = "import sys, vllm_fleet.cli; print(*{name.partition('.')[0] for name in sys.modules})"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    own = {"vllm_fleet", "_distutils_hack"}  # the second comes with every environment
    assert set(printed.split()) & packages_distributions().keys() - own == set()
