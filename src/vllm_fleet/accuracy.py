"""Predicted against reported memory: how far the planner may be trusted, on reports of engines that really started.

A row counts only where its inputs are stated, or follow from the engine's defaults for its version and GPU; every other
row is skipped with the reason. Nothing here is fitted: the constants are those of memory.py.
"""

import csv
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_fleet import catalog, memory
from vllm_fleet.catalog import Card, Quantization
from vllm_fleet.errors import BadInputError
from vllm_fleet.layout import Layout
from vllm_fleet.memory import GIB, Step

REPORT_MODELS = Path(__file__).with_name("report_models.yml")
COLUMNS = (
    "model", "params_or_checkpoint", "gpu", "gpu_mem_gib", "tp", "pp", "dp", "ep", "gpu_memory_utilization",
    "max_model_len", "max_num_batched_tokens", "kv_cache_dtype", "vllm_version", "weights_gib_per_gpu",
    "available_kv_gib_per_gpu", "kv_tokens", "max_concurrency", "source_url", "max_num_seqs", "notes",
)  # fmt: skip

# Defaults of the API server by version and GPU (vllm/engine/arg_utils.py): 1024 sequences and 8192 batched tokens from
# 70 GiB on except on an A100, 16384 batched tokens from 160 GiB on, else 256 and 2048.
_LARGE_GPU_GIB, _HUGE_GPU_GIB = 70, 160
_METHODS = (
    ("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("int4 g32", "int4"), ("fp8-dynamic", "fp8_channel"),
    ("fp8 block", "fp8_block"), ("bf16", "none"),
)  # fmt: skip
_UNCONVERTED = {"nvfp4": ("self_attn", "indexer"), "int4": ("self_attn", "shared_experts", "mlp")}
_GROUPS = {"nvfp4": 16, "mxfp4": 32, "int4": 32, "fp8_block": 128}
# A loaded text that says another scheme than those above has unknown exceptions.
_UNKNOWN_SCHEMES = ("awq", "gptq", "gguf", "mixed", "?", "fp8/fp4")


class _SkipError(Exception):
    """Why a row cannot be predicted."""


@dataclass(frozen=True)
class Report:
    """One row: what the engine was told, and what it said."""

    card: Card
    layout: Layout
    speculative: bool
    kv_cache_dtype: str
    step: Step | None
    requested_gib: float | None
    unpredictable_kv: str | None


def measure(path: str | Path) -> dict[str, Any]:
    """Predict every row of a CSV of memory reports.

    Args:
        path: Columns as in tests/fixtures/memory/memory_reports.csv.

    Returns:
        `rows`, `used`, `skipped` (row and why), statistics of `kv_gib` and `weights_gib` in per cent, and `detail`, one
        entry per used row. Rows are counted from 1, the header not counted.

    Raises:
        BadInputError: The file cannot be read, or a column is missing.
    """
    rows = _read(Path(path))
    models = _Models()
    detail: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for number, row in enumerate(rows, start=1):
        try:
            detail.append({"row": number, "model": row["model"], "gpu": row["gpu"]} | _compare(row, models))
        except _SkipError as reason:
            skipped.append({"row": number, "why": str(reason)})
    return {
        "rows": len(rows),
        "used": len(detail),
        "skipped": skipped,
        "kv_gib": _statistics(entry.get("kv_gib_error_pct") for entry in detail),
        "kv_bytes_per_token": _statistics(entry.get("kv_bytes_per_token_error_pct") for entry in detail),
        "weights_gib": _statistics(entry.get("weights_gib_error_pct") for entry in detail),
        "detail": detail,
    }


def render(result: Mapping[str, Any]) -> str:
    """Lay the result out for a terminal."""
    lines = [f"{result['used']} of {result['rows']} reports used, {len(result['skipped'])} skipped.", ""]
    for key, name in (("weights_gib", "weights"), ("kv_gib", "KV cache"), ("kv_bytes_per_token", "KV bytes per token")):
        found = result[key]
        if found["count"]:
            lines.append(
                f"{name:>18}: median {found['median_abs_pct']:.2f} %, 90th percentile {found['p90_abs_pct']:.2f} %, "
                f"worst {found['max_abs_pct']:.2f} % of {found['count']}"
            )
    lines += ["", f"{'row':>4}  {'model':<24} {'layout':<12} {'weights GiB':>18} {'KV cache GiB':>18}  note"]
    for entry in result["detail"]:
        weights = _pair(entry, "weights_gib")
        lines.append(
            f"{entry['row']:>4}  {entry['model'][:24]:<24} {entry['layout']:<12} {weights:>18} "
            f"{_pair(entry, 'kv_gib'):>18}  {entry.get('note') or ''}".rstrip()
        )
    lines += ["", "Skipped:"] + [f"{entry['row']:>4}  {entry['why']}" for entry in result["skipped"]]
    return "\n".join(lines)


def _pair(entry: Mapping[str, Any], key: str) -> str:
    error = entry.get(f"{key}_error_pct")
    return "" if error is None else f"{entry[key]:.2f} ({error:+.1f} %)"


def _read(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise BadInputError(
                    f"{path}: the column {', '.join(missing)} is missing. It needs: {', '.join(COLUMNS)}."
                )
            return [{key: (row[key] or "").strip() for key in COLUMNS} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInputError(f"{path}: not readable as CSV ({error}).") from None


def _compare(row: Mapping[str, str], models: "_Models") -> dict[str, Any]:
    """Predictions beside what a row reports, for whatever it reports."""
    reported = {
        "weights_gib": _number(row, "weights_gib_per_gpu"),
        "kv_gib": _number(row, "available_kv_gib_per_gpu"),
    }
    tokens = _number(row, "kv_tokens")
    if not any((*reported.values(), tokens)):
        raise _SkipError("it reports neither weights nor the KV cache")
    report = _report(row, models)
    entry: dict[str, Any] = {"layout": str(report.layout), "note": None}
    weights = memory.weights_gib(
        report.card, report.layout, speculative=report.speculative, version=_version(row["vllm_version"])
    )
    entry |= _against("weights_gib", weights, reported["weights_gib"])
    used = "weights_gib_error_pct" in entry
    per_token = memory.kv_bytes_per_token(
        report.card, report.layout, report.kv_cache_dtype, speculative=report.speculative
    )
    if reported["kv_gib"] is not None and reported["kv_gib"] > 0 and tokens:
        if _exact(row, report):
            implied = reported["kv_gib"] * GIB / (tokens / report.layout.decode_context_parallel)
            entry |= _against("kv_bytes_per_token", per_token, implied)
            used = True
    elif reported["kv_gib"] is None and tokens and _exact(row, report):
        # The tokens say how much memory they take.
        reported["kv_gib"] = tokens / report.layout.decode_context_parallel * per_token / GIB
    note = report.unpredictable_kv
    if reported["kv_gib"] is not None and note is None:
        if reported["kv_gib"] <= 0:
            note = "the engine refused to start: no KV cache to compare with"
        else:
            assert report.requested_gib is not None  # noqa: S101  unpredictable_kv says otherwise
            assert report.step is not None  # noqa: S101
            overhead = memory.overhead_gib(report.card, report.layout, report.step, margin=False)
            entry |= _against("kv_gib", report.requested_gib - weights - overhead, reported["kv_gib"])
            entry["overhead_gib"] = round(overhead, 2)
            used = True
    if not used:
        raise _SkipError(note or "it reports nothing that can be compared")
    entry["note"] = note
    return entry


def _against(key: str, predicted: float, reported: float | None) -> dict[str, Any]:
    if reported is None:
        return {}
    return {
        key: round(predicted, 2),
        f"{key}_reported": round(reported, 2),
        f"{key}_error_pct": round(100 * (predicted / reported - 1), 2),
    }


def _exact(row: Mapping[str, str], report: Report) -> bool:
    """Whether memory and tokens convert into each other; a hybrid's do not, and rounded figures say little."""
    return not report.card.shape.num_sliding_layers and "rounded" not in row["notes"].lower()


def _report(row: Mapping[str, str], models: "_Models") -> Report:
    """Read a row; raise with the reason where even its weights cannot be predicted."""
    notes = row["notes"].lower()
    if "sglang" in row["vllm_version"].lower():
        raise _SkipError("another engine (SGLang) divides memory in another way")
    card = models.card(row["model"], row["params_or_checkpoint"])
    layout = _layout(row, notes)
    drafting = re.search(r"mtp on|spec(ulative)? on|spec \d", notes) is not None or (
        "mtp layer" in row["params_or_checkpoint"].lower() and "mtp off" not in notes
    )
    if drafting and not card.shape.num_nextn_predict_layers:
        raise _SkipError("it drafts with another model, whose size is not stated")
    problem = _kv_problem(row)
    if problem:
        return Report(card, layout, drafting, row["kv_cache_dtype"], None, None, problem)
    version = _version(row["vllm_version"])
    total = float(row["gpu_mem_gib"])
    utilization = _number(row, "gpu_memory_utilization") or float(row["gpu_memory_utilization"].split()[0])
    large = total >= _LARGE_GPU_GIB and "a100" not in row["gpu"].lower()
    batched = 16384 if total >= _HUGE_GPU_GIB else 8192 if large else 2048
    step = Step(
        max_num_batched_tokens=int(_number(row, "max_num_batched_tokens") or batched),
        max_num_seqs=int(_number(row, "max_num_seqs") or (1024 if large else 256)),
        max_model_len=int(_number(row, "max_model_len") or card.shape.max_position_embeddings),
        version=version,
        cuda_graphs="eager" not in notes and "graph estimate off" not in notes,
    )
    return Report(card, layout, drafting, row["kv_cache_dtype"], step, total * utilization, None)


def _kv_problem(row: Mapping[str, str]) -> str | None:
    """Why the memory left for the KV cache cannot be predicted, or None."""
    notes, version = row["notes"].lower(), row["vllm_version"].lower()
    problems = (
        ("fork" in version + notes, "a fork with kernels of its own, whose workspaces are not vLLM's"),
        (
            not re.search(r"\d+\.\d+", version),
            "the engine's version is not stated, and its memory steps with the version",
        ),
        (not row["gpu_mem_gib"] or "?" in row["gpu"], "the GPU's memory is not stated"),
        ("unified" in notes, "the GPU shares its memory with the host"),
        (not re.match(r"0\.\d+", row["gpu_memory_utilization"]), "gpu_memory_utilization is not stated"),
        ("connector" in notes, "a KV connector keeps memory of its own"),
    )
    return next((why for applies, why in problems if applies), None)


def _layout(row: Mapping[str, str], notes: str) -> Layout:
    tensor = _number(row, "tp")
    if tensor is None:
        raise _SkipError("its tensor parallel size is not stated")
    context = re.search(r"dcp=?\s*(\d+)", notes)
    return Layout(
        tensor_parallel=int(tensor),
        expert_parallel=row["ep"].lower() not in ("", "no", "0", "1"),
        pipeline_parallel=int(_number(row, "pp") or 1),
        data_parallel=int(_number(row, "dp") or 1),
        decode_context_parallel=int(context[1]) if context else 1,
    )


def _version(text: str) -> tuple[int, ...]:
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in match.groups()) if match else (0,)


def _number(row: Mapping[str, str], column: str) -> float | None:
    text = row[column]
    if re.fullmatch(r"-?\d+(\.\d+)?", text):
        return float(text)
    leading = re.match(r"default (\d+)", text)
    return float(leading[1]) if leading else None


def _statistics(errors: Iterable[float | None]) -> dict[str, Any]:
    """Median, 90th percentile (nearest rank) and worst of absolute errors."""
    known = sorted(abs(error) for error in errors if error is not None)
    if not known:
        return {"count": 0, "median_abs_pct": None, "p90_abs_pct": None, "max_abs_pct": None}
    rank = max(0, -(-9 * len(known) // 10) - 1)
    return {
        "count": len(known),
        "median_abs_pct": round(statistics.median(known), 2),
        "p90_abs_pct": known[rank],
        "max_abs_pct": known[-1],
    }


class _Models:
    """Cards by the names that reports use."""

    def __init__(self) -> None:
        import yaml  # noqa: PLC0415  it costs a fifth of the start of every command

        data = yaml.safe_load(REPORT_MODELS.read_text(encoding="utf-8"))
        self._unknown: dict[str, str] = data["unknown"]
        cards = [catalog.load(name) for name in catalog.known_cards()]
        by_name = {card.name: card for card in cards}
        self._families: dict[str, Card] = {}
        # The plain checkpoint stands for its family; a conversion has only other quantization.
        for card in sorted(cards, key=lambda card: card.quantization.method == "nvfp4"):
            self._families.setdefault(_family(card.id), card)
        for name, entry in data["aliases"].items():
            self._families[name] = by_name[entry["like"]]
        for name, entry in data["changed"].items():
            base = by_name[entry["like"]]
            self._families[name] = replace(
                base, attention=entry.get("attention", base.attention), shape=replace(base.shape, **entry["shape"])
            )
        for name, numbers in data["dense"].items():
            self._families[name] = _dense(by_name["llama_3_3_70b"], numbers)

    def card(self, model: str, checkpoint: str) -> Card:
        """The card of a report's model with the quantization that the report names."""
        name = _family(model)
        for unknown, why in self._unknown.items():
            if name.startswith(unknown):
                raise _SkipError(f"{model}: {why}")
        card = self._families.get(name)
        if card is None:
            raise _SkipError(f"the shape of {model} is not known here")
        text = checkpoint.lower()
        if any(scheme in text for scheme in _UNKNOWN_SCHEMES):
            raise _SkipError(f"what {checkpoint!r} leaves unconverted is not stated")
        method = next((method for word, method in _METHODS if word in text), None)
        if method is None and card.quantization.method not in text.replace("fp8", "fp8_block fp8_channel"):
            raise _SkipError(f"the quantization {checkpoint!r} is not known here")
        if method is None or method == card.quantization.method:
            return card
        return replace(card, quantization=Quantization(method, _GROUPS.get(method), _UNCONVERTED.get(method, ())))


def _family(name: str) -> str:
    """A model's name without owner, instruction tuning and quantization."""
    short = name.rpartition("/")[2].lower()
    return re.sub(r"-(nvfp4|fp8|int4|mxfp4|instruct).*$", "", short)


def _dense(like: Card, numbers: Sequence[Any]) -> Card:
    layers, hidden, heads, kv_heads, width, vocabulary, context, tied = numbers
    shape = replace(
        like.shape,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=width,
        vocab_size=vocabulary,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
    )
    return replace(like, shape=shape)
