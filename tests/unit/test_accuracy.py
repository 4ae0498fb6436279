"""Predicted against reported memory: the reports in tests/fixtures/memory, and rows that say too little."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hosts import FIXTURES

from vllm_fleet import accuracy, memory
from vllm_fleet.cli import main
from vllm_fleet.errors import BadInputError

ROOT = Path(__file__).resolve().parents[2]
REPORTS = FIXTURES / "memory" / "memory_reports.csv"
# Logs that no constant was fitted on, of models and sizes that the fit has not seen.
HELD_OUT = FIXTURES / "memory" / "held_out_reports.csv"
MEASURED = FIXTURES / "gpu" / "h200_memory.csv"


def one_row(tmp_path: Path, **changed: str) -> Path:
    """M2.5 at TP4 on H100, as reported, with some columns changed."""
    with REPORTS.open(encoding="utf-8") as file:
        row = list(csv.DictReader(file))[1] | changed
    path = tmp_path / "reports.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow(row)
    return path


@pytest.mark.parametrize("path", [REPORTS, HELD_OUT], ids=["fitted", "held-out"])
def test_predictions_are_as_good_as_promised(path: Path) -> None:
    result = accuracy.measure(path)
    assert result["weights_gib"]["max_abs_pct"] <= 1.5
    assert result["kv_gib"]["median_abs_pct"] <= 3
    assert result["kv_gib"]["max_abs_pct"] <= 10
    assert result["kv_bytes_per_token"]["max_abs_pct"] <= 1.5  # logs round GiB and tokens
    assert result["kv_gib"]["count"] >= 5
    assert result["used"] + len(result["skipped"]) == result["rows"]


def test_own_measurements_are_met_within_one_per_cent_and_never_promised_more() -> None:
    """Single ranks on an H200, the planner's flags and the engine's defaults, grouped-query and latent attention."""
    result = accuracy.measure(MEASURED)
    assert result["skipped"] == []
    assert result["kv_gib"]["max_abs_pct"] <= 1
    assert result["kv_bytes_per_token"]["max_abs_pct"] <= 0.1
    for row in result["detail"]:
        assert row["kv_gib"] - memory.MARGIN_GIB <= row["kv_gib_reported"] + 0.01, row


def test_rows_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama-3.1-8B on one H100, from its log: 0.9 x 79.18 - 14.99 - 4.76 - 0.13 = 51.38 GiB for the cache."""
    assert main(["accuracy", str(HELD_OUT), "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (row,) = [entry for entry in result["detail"] if entry["model"].startswith("Llama-3.1-8B")]
    assert row["kv_gib_reported"] == 51.38
    # 8.03 billion parameters of two bytes.
    assert row["weights_gib"] == pytest.approx(8.03e9 * 2 / 2**30, rel=0.001)
    assert row["kv_gib_error_pct"] == pytest.approx(100 * (row["kv_gib"] / 51.38 - 1), abs=0.02)


def test_text_names_every_skipped_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accuracy", str(REPORTS)]) == 0
    text = capsys.readouterr().out
    assert "KV cache: median" in text
    assert "another engine (SGLang)" in text
    assert "Skipped:" in text


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"vllm_version": "SGLang (not vLLM)"}, "another engine"),
        ({"model": "Grok-9"}, "shape of Grok-9 is not known"),
        ({"params_or_checkpoint": "AWQ 4-bit"}, "leaves unconverted"),
        ({"tp": ""}, "tensor parallel size"),
        ({"weights_gib_per_gpu": "", "available_kv_gib_per_gpu": "", "kv_tokens": ""}, "neither"),
        ({"model": "Mistral-Small-3.2-24B"}, "image encoder"),
    ],
)
def test_a_row_that_cannot_be_predicted_is_skipped_with_the_reason(
    tmp_path: Path, changed: dict[str, str], why: str
) -> None:
    result = accuracy.measure(one_row(tmp_path, **changed))
    assert result["used"] == 0
    assert why in result["skipped"][0]["why"]
    assert result["kv_gib"] == {"count": 0, "median_abs_pct": None, "p90_abs_pct": None, "max_abs_pct": None}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"vllm_version": "0.20.2 (fork)"}, "fork"),
        ({"vllm_version": "Jan 2026"}, "version"),
        ({"gpu_memory_utilization": ""}, "gpu_memory_utilization"),
        ({"available_kv_gib_per_gpu": "-1.2", "kv_tokens": ""}, "refused to start"),
    ],
)
def test_weights_are_compared_where_the_cache_cannot_be(tmp_path: Path, changed: dict[str, str], why: str) -> None:
    result = accuracy.measure(one_row(tmp_path, **changed))
    assert result["kv_gib"]["count"] == 0
    assert result["weights_gib"]["count"] == 1
    assert why in result["detail"][0]["note"]


def test_tokens_alone_say_how_much_memory_they_take(tmp_path: Path) -> None:
    """307,184 tokens of 63,488 bytes are 18.16 GiB."""
    entry: dict[str, Any] = accuracy.measure(one_row(tmp_path, available_kv_gib_per_gpu=""))["detail"][0]
    assert entry["kv_gib_reported"] == 18.16


def test_more_of_the_memory_leaves_more_for_the_cache(tmp_path: Path) -> None:
    """0.05 of 79.18 GiB."""
    more, less = (
        accuracy.measure(one_row(tmp_path, gpu_memory_utilization=share))["detail"][0]["kv_gib"]
        for share in ("0.95", "0.90")
    )
    assert more - less == pytest.approx(0.05 * 79.18, abs=0.01)


def test_a_file_that_is_no_report_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text("model,gpu\nM2.5,H100\n")
    with pytest.raises(BadInputError, match="params_or_checkpoint"):
        accuracy.measure(path)
    assert main(["accuracy", str(tmp_path / "nothing.csv")]) == 2
    assert "not readable" in capsys.readouterr().err


def test_the_page_states_the_errors_as_they_are() -> None:
    page = (ROOT / "docs" / "memory-model.md").read_text(encoding="utf-8")
    for path in (REPORTS, HELD_OUT):
        result = accuracy.measure(path)
        weights, cache = result["weights_gib"], result["kv_gib"]
        row = (
            f"| {weights['max_abs_pct']:.1f} % | {cache['median_abs_pct']:.1f} % | {cache['max_abs_pct']:.1f} % | "
            f"{result['kv_bytes_per_token']['max_abs_pct']:.1f} %"
        )
        assert row in page


def test_the_picture_is_what_its_script_draws() -> None:
    drawn = subprocess.run([sys.executable, ROOT / "scripts" / "memory_picture"], check=True, capture_output=True)
    assert (ROOT / "docs" / "memory-model.svg").read_bytes() == drawn.stdout, "run scripts/memory_picture"
