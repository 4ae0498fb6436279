"""The roofline against public reports, and the rankings that they show."""

import csv
import dataclasses
import json
import math
import re
import statistics
from collections.abc import Iterator

import pytest
from hosts import FIXTURES
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_fleet import catalog, memory, speed
from vllm_fleet.catalog import Card
from vllm_fleet.gpus import Rates
from vllm_fleet.layout import Layout
from vllm_fleet.speed import Place

CARDS = {name: catalog.load(name) for name in catalog.known_cards()}
M2_5, NVFP4 = CARDS["minimax_m2_5"], CARDS["minimax_m2_5_nvfp4"]
RTX, H100, H200, B200 = Rates(1792, 500), Rates(3350, 989), Rates(4800, 989), Rates(8000, 2250)
GPUS = {"RTX PRO 6000 Blackwell": RTX, "H100 80GB": H100, "H200 141GB": H200, "B200": B200}
REPORTED = {
    ("MiniMax-M2", "FP8"): "minimax_m2",
    ("MiniMax-M2.5", "FP8"): "minimax_m2_5",
    ("MiniMax-M2.5", "NVFP4"): "minimax_m2_5_nvfp4",
    ("Kimi-K2.5", "INT4"): "kimi_k2_5",
    ("Kimi-K2.6", "INT4"): "kimi_k2_5",
    ("Kimi-K2.5", "NVFP4"): "kimi_k2_5_nvfp4",
    ("GLM-5.1", "NVFP4"): "glm_5_nvfp4",
    ("GLM-5.2", "FP8"): "glm_5_fp8",
}


def reports() -> Iterator[tuple[float, float]]:
    """Predicted and reported tokens per second of every vLLM report without drafting whose setup is stated."""
    with (FIXTURES / "memory" / "throughput_reports.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        card = CARDS.get(REPORTED.get((row["model"], row["params_or_checkpoint"]), ""))
        rates = GPUS.get(row["gpu"])
        stated = row["concurrency"].isdigit() and row["output_tok_s_total"] and row["tp"]
        if not card or not rates or not stated or "vLLM" not in row["engine"] or row["spec_decode"]:
            continue
        if "no P2P" in row["notes"] or "DeepGEMM on" in row["notes"]:  # setups that no plan has
            continue
        yield predicted(row, card, rates), float(row["output_tok_s_total"])


def predicted(row: dict[str, str], card: Card, rates: Rates) -> float:
    work = row["context_or_workload"]
    spread = re.search(r"DCP(\d)", work)
    long = re.search(r"(\d+)K context", work)
    layout = Layout(
        int(row["tp"]), expert_parallel=bool(row["ep"]), decode_context_parallel=int(spread[1]) if spread else 1
    )
    link = "NV" if rates is not RTX else "SYS" if layout.tensor_parallel == 8 else "PCIE"
    concurrency = int(row["concurrency"])
    replicas = min(int(row["dp"] or 1), concurrency)
    quantized = "fp8" if row["model"].startswith(("Kimi", "GLM-5.1")) else card.engine.kv_cache_dtype
    return replicas * speed.tokens_per_second(
        card,
        layout,
        Place(rates, link),
        math.ceil(concurrency / replicas),
        context=(int(long[1]) * 1000 or 500) if long else speed.TYPICAL_CONTEXT,
        dtype=quantized,
    )


def test_the_errors_that_plans_state_are_those_on_known_reports() -> None:
    errors = sorted(abs(guess / told - 1) for guess, told in reports())
    assert len(errors) > 50
    assert 100 * statistics.median(errors) == pytest.approx(speed.ERROR_PCT, abs=1)
    assert 100 * errors[math.ceil(0.9 * len(errors)) - 1] == pytest.approx(speed.ERROR_P90_PCT, abs=3)


def test_single_ranks_as_measured() -> None:
    """One H200, 0.26 with CUDA graphs: a TP4 rank decoded 214.3 tokens/s, 28 of 62 layers at full width 313.9."""
    part = dataclasses.replace(M2_5, shape=dataclasses.replace(M2_5.shape, num_hidden_layers=28))
    for card, measured in ((rank_of(4), 214.3), (part, 313.9)):
        guess = speed.tokens_per_second(card, Layout(), Place(H200, "NV"), 1, context=128)
        assert guess == pytest.approx(measured, rel=0.05)


def rank_of(ranks: int, *, whole_experts: bool = False) -> Card:
    """What one rank of M2.5 holds, as a model of its own."""
    shape, width = M2_5.shape, 1 if whole_experts else ranks
    cut = dataclasses.replace(
        shape,
        num_attention_heads=shape.num_attention_heads // ranks,
        num_key_value_heads=max(1, shape.num_key_value_heads // ranks),
        moe_intermediate_size=shape.moe_intermediate_size // width,
        num_experts=shape.num_experts // ranks if whole_experts else shape.num_experts,
        vocab_size=shape.vocab_size // ranks,
    )
    return dataclasses.replace(M2_5, shape=cut)


@pytest.mark.parametrize(
    ("case", "card", "most"),
    [("tp4-defaults", rank_of(4), 10), ("tp8-ep8-planned", rank_of(8, whole_experts=True), 8)],
)
def test_steps_of_single_ranks_as_measured(case: str, card: Card, most: int) -> None:
    """0.32 on an H200, one request to 128, within 12 %.

    The weights were dummies that sent all tokens of a layer to the same few experts, so the bytes of those are counted
    in place of what real text would touch (tests/fixtures/gpu/README.md).
    """
    report = json.loads((FIXTURES / "gpu" / f"{case}.json").read_text(encoding="utf-8"))
    expert = memory.expert_bytes(card, Layout()) * card.shape.num_hidden_layers
    everything = memory.weights_gib(card, Layout()) * memory.GIB - card.shape.vocab_size * card.shape.hidden_size * 2
    for entry in report["decode"]:
        requests = entry["requests"]
        touched = min(most, 7 + requests)
        as_measured = everything - (card.shape.num_experts - touched) * expert
        real = speed._weights_read(card, Layout(), requests)
        step = speed.decode_step_seconds(card, Layout(), Place(H200, "NV"), requests, context=entry["context"])
        step -= (real - as_measured) / (H200.memory_gb_s * 1e9 * speed._BANDWIDTH_SHARE)
        assert 1000 * step == pytest.approx(entry["step_ms"], rel=0.12), requests


def test_prefill_of_a_single_rank_as_measured() -> None:
    report = json.loads((FIXTURES / "gpu" / "tp4-defaults.json").read_text(encoding="utf-8"))
    (measured,) = [entry["tokens_per_second"] for entry in report["prefill"] if entry["prompt_tokens"] == 8192]
    assert speed.prefill_tokens_per_second(rank_of(4), Layout(), Place(H200, "NV")) == pytest.approx(measured, rel=0.1)


def test_bandwidth_as_measured() -> None:
    """A read of 4 GiB on an H200, beside the share of its data sheet's 4.8 TB/s that the roofline takes."""
    rates = json.loads((FIXTURES / "gpu" / "rates.json").read_text(encoding="utf-8"))
    assert speed._BANDWIDTH_SHARE * H200.memory_gb_s == pytest.approx(rates["read_gb_s"], rel=0.03)


def host_rate(card: Card, ranks: int, concurrency: int, gpus: int = 4) -> float:
    replicas = min(gpus // ranks, concurrency)
    share = math.ceil(concurrency / replicas)
    return replicas * speed.tokens_per_second(card, Layout(ranks), Place(RTX, "PCIE"), share, dtype="fp8")


@pytest.mark.parametrize(("concurrency", "wide_wins"), [(1, True), (4, True), (16, True), (64, True), (128, False)])
def test_narrow_groups_overtake_wide_ones_where_they_did(concurrency: int, wide_wins: bool) -> None:  # noqa: FBT001
    """NVFP4 M2.5 on four RTX PRO 6000: TP4 led 2 x TP2 up to 64 streams (2,472 to 2,222) and lost at 128."""
    assert (host_rate(NVFP4, 4, concurrency) > host_rate(NVFP4, 2, concurrency)) == wide_wins


@pytest.mark.parametrize(
    ("name", "billions"),
    [("minimax_m2_5", 10), ("kimi_k2_5", 32), ("glm_5_fp8", 40), ("deepseek_v3_2", 37), ("gpt_oss_120b", 5.1)],
)
def test_active_weights_are_those_of_the_models_pages(name: str, billions: float) -> None:
    assert speed.active_weights(CARDS[name], Layout()) / 1e9 == pytest.approx(billions, rel=0.06)


def test_all_reduce_bytes_by_hand() -> None:
    """Two per layer, 62 layers, 3,072 values of two bytes."""
    assert speed.all_reduce_bytes_per_token(M2_5) == 2 * 62 * 3072 * 2


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(name for name, card in CARDS.items() if not card.lab)),
    layout=st.sampled_from([Layout(), Layout(8), Layout(8, expert_parallel=True)]),
    requests=st.integers(1, 512),
    context=st.integers(1, 100_000),
)
def test_a_step_takes_longer_with_more_requests_and_longer_contexts(
    name: str, layout: Layout, requests: int, context: int
) -> None:
    def seconds(count: int, length: int) -> float:
        return speed.decode_step_seconds(CARDS[name], layout, Place(H200, "NV"), count, context=length)

    assert 0 < seconds(requests, context) <= seconds(requests + 1, context)
    assert seconds(requests, context) <= seconds(requests, context + 1000)


def test_links_count_for_what_they_carry() -> None:
    rates = [speed.tokens_per_second(M2_5, Layout(4), speed.place_of(RTX, link), 32) for link in ("NV", "PIX", "SYS")]
    assert rates == sorted(rates, reverse=True)
    assert speed.place_of(RTX, None) == speed.place_of(RTX, "SYS")
    alone = [speed.tokens_per_second(NVFP4, Layout(), speed.place_of(B200, link), 32) for link in ("NV", "SYS")]
    assert alone[0] == alone[1]


def test_prefill_is_faster_on_more_ranks_and_better_links() -> None:
    four, eight = (speed.prefill_tokens_per_second(M2_5, Layout(n), Place(H100, "NV")) for n in (4, 8))
    assert 0 < four < eight
    assert speed.prefill_tokens_per_second(M2_5, Layout(8), Place(H100, "SYS")) < eight
