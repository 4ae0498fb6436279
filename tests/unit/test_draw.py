"""Pictures of hosts: what a reader must find in them, and that the committed ones are up to date."""

import json
import re
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts import FIXTURES, two_sockets

from vllm_fleet import draw, topology
from vllm_fleet.cli import main

_REPOSITORY = Path(__file__).parent.parent.parent
CAPTURES = sorted(path.name for path in (FIXTURES / "captures").iterdir())
PICTURES = ["rtxpro6000-8x-2nodes", "rtxpro6000-8x-switches", "h100-8x-80gb", "h100-8x-snc4"]
_SVG = "{http://www.w3.org/2000/svg}"


def facts(name: str) -> dict[str, Any]:
    return topology.read(FIXTURES / "captures" / name)


def words(picture: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(picture).iter(f"{_SVG}text")]  # noqa: S314  (our own)


@pytest.mark.parametrize("name", CAPTURES)
def test_every_capture_fits_one_screen(name: str) -> None:
    lines = draw.text(facts(name)).splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= draw.WIDTH


@pytest.mark.parametrize("name", CAPTURES)
def test_every_gpu_node_and_link_is_in_the_picture(name: str) -> None:
    host = facts(name)
    found = words(draw.svg(host))
    for gpu in host["gpus"]:
        assert gpu["pci_bus_id"].removeprefix("0000:") in found
    for node in host["numa_nodes"]:
        assert f"NUMA node {node['id']}" in found
        assert any(line.endswith(f"CPUs: {node['cpus']}") for line in found)
    for link in set(host["links"].values()):
        assert found.count(link) == 2 * list(host["links"].values()).count(link)


def test_gpus_stand_in_their_node() -> None:
    """The H100 with eight nodes counts its GPUs in another order than its nodes: GPU 3 is on node 1."""
    lines = draw.text(facts("h100-8x-snc4")).splitlines()
    above = next(number for number, line in enumerate(lines) if "NUMA node 1:" in line)
    assert "GPU 3 " in lines[above + 1]
    assert "CPUs 13-25" in lines[above]


def test_switches_group_their_gpus() -> None:
    text = draw.text(facts("rtxpro6000-8x-switches"))
    assert re.search(r"switch 01:00\.0 > 07:00\.0 .*\n.*GPU 2 .*\n.*GPU 3 .*\n.*switch 81:00\.0 > 83:00\.0", text)


def damaged(*, node_unknown: bool = False, **gpu: Any) -> dict[str, Any]:
    host = json.loads(json.dumps(facts("rtxpro6000-8x-2nodes")))
    host["gpus"][5].update(gpu)
    if node_unknown:
        host["gpus"][5]["numa_nodes"] = []
    return dict(host)


def test_what_is_wrong_is_seen() -> None:
    problem = {"severity": "error", "code": "ecc_uncorrected", "message": "GPU 5: <2> errors", "remedy": "Reset it."}
    host = damaged(problems=[problem])
    host["problems"] = [problem]
    assert "error: GPU 5: <2> errors" in draw.text(host)
    assert re.search(r"GPU 5 .*ERROR", draw.text(host))
    assert 'class="tile sick"' in draw.svg(host)
    assert "error: GPU 5: <2> errors" in words(draw.svg(host))
    assert "<td>Reset it.</td>" in draw.html_page(host)


def test_unknown_is_said() -> None:
    host = damaged(node_unknown=True, memory_total_mib=None)
    del host["links"]["0-5"]
    text = draw.text(host)
    assert "on 2 NUMA nodes (4 + 3 + 1 unknown)" in text
    assert re.search(r"NUMA node unknown or several.*\n.*GPU 5 .*memory unknown", text)
    assert "?: unknown (1 of 28 pairs)" in text
    assert words(draw.svg(host)).count("?") == 2


def test_a_narrow_link_is_seen() -> None:
    host = damaged(pcie={"generation": 1, "width": 8, "max_generation": 5, "max_width": 16, "switches": []})
    assert "PCIe 5.0 x8 of x16" in draw.text(host)
    assert "5.0 x8 of x16" in words(draw.svg(host))


def test_a_hand_written_topology_without_the_optional_parts_is_drawn() -> None:
    host = {key: value for key, value in two_sockets().items() if key not in ("pcie", "checks", "nvswitch", "problems")}
    host["gpus"] = [
        {key: value for key, value in gpu.items() if key not in ("pcie", "problems")} for gpu in host["gpus"]
    ]
    for picture in (draw.text, draw.svg, draw.html_page):
        assert "PCIe unknown" in picture(host)


@pytest.mark.parametrize("picture", [draw.svg, draw.html_page])
def test_names_cannot_break_out(picture: Callable[..., str]) -> None:
    host = damaged(name='<script>alert("x")</script>')
    assert "<script>" not in picture(host, "<b>host</b>")
    assert "<b>host" not in picture(host, "<b>host</b>")


def test_light_and_dark() -> None:
    style = draw.svg(facts("no-gpu"))
    assert "prefers-color-scheme: dark" in style
    assert set(re.findall(r"var\(--(\w+)\)", style)) <= set(re.findall(r"--(\w+):", style.partition("@media")[0]))


@pytest.mark.parametrize("name", PICTURES)
def test_the_committed_pictures_are_up_to_date(name: str) -> None:
    committed = _REPOSITORY / "docs" / "topologies" / f"{name}.svg"
    remedy = f"vllm-fleet topology tests/fixtures/captures/{name} --format svg > docs/topologies/{name}.svg"
    assert committed.read_text(encoding="utf-8").rstrip() == draw.svg(facts(name)).rstrip(), remedy


def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(FIXTURES / "captures" / "rtxpro6000-2x")
    archive = shutil.make_archive(str(tmp_path / "host"), "gztar", folder)
    printed = {}
    for source in (folder, archive):
        for style in ("text", "svg", "html", "json"):
            assert main(["topology", source, "--format", style]) == 0
            printed[source, style] = capsys.readouterr().out
    assert printed[folder, "svg"].startswith("<svg ")
    assert printed[folder, "html"].startswith("<!doctype html>")
    assert [printed[archive, style] for style in ("text", "svg", "html", "json")] == [
        printed[folder, style] for style in ("text", "svg", "html", "json")
    ]
