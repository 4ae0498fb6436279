"""Memory predicted against logs of real engines, and against arithmetic by hand."""

import dataclasses
import json
import math
from typing import Any

import pytest
from hosts import FIXTURES
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_fleet import catalog, memory
from vllm_fleet.catalog import Card
from vllm_fleet.layout import Layout
from vllm_fleet.memory import Step

M2_5 = catalog.load("minimax_m2_5")
KIMI, KIMI_NVFP4, GLM, GLM_NVFP4, GPT_OSS = (
    catalog.load(name) for name in ("kimi_k2_5", "kimi_k2_5_nvfp4", "glm_5_fp8", "glm_5_nvfp4", "gpt_oss_120b")
)
H200 = json.loads((FIXTURES / "memory" / "h200_single_ranks.json").read_text())

TP1, TP2, TP4, TP8 = (Layout(tensor_parallel=n) for n in (1, 2, 4, 8))
TP8_EP = Layout(tensor_parallel=8, expert_parallel=True)


def single_rank(row: dict[str, Any]) -> Card:
    """M2.5 with the shape that the measured engine was given."""
    shape = dataclasses.replace(M2_5.shape, **H200["rank_shapes"][row["rank_of"]])
    return dataclasses.replace(
        M2_5, shape=shape, engine=dataclasses.replace(M2_5.engine, kv_cache_dtype=row["kv_cache_dtype"])
    )


# Weights


def test_weights_of_m2_5_tp4_as_logged() -> None:
    """Both public TP4 starts logged 53.75 GiB per GPU (tests below name them)."""
    assert memory.weights_gib(M2_5, TP4) == pytest.approx(53.75, rel=0.002)


def test_weights_by_hand() -> None:
    """One GPU, every term written out: attention, experts, router, norms, embedding and head."""
    fp8 = 1 + 4 / 128**2
    attention = (3072 * 48 * 128 + 2 * 3072 * 8 * 128 + 48 * 128 * 3072) * fp8
    experts = 256 * 3 * 3072 * 1536 * fp8
    router = 3072 * 256 * 4
    norms = 2 * 3072 * 2
    total = 62 * (attention + experts + router + norms) + 2 * 200064 * 3072 * 2
    assert memory.weights_gib(M2_5, TP1) == pytest.approx(total / 2**30, rel=1e-12)


def test_expert_parallel_spreads_whole_experts_and_data_parallel_repeats_attention() -> None:
    """TP8+EP and TP8 hold the same; DP8+EP holds 7/8 of attention, embedding and head more."""
    attention = 62 * (2 * 3072 * 48 * 128 + 2 * 3072 * 8 * 128) * (1 + 4 / 128**2)
    matrices = 2 * 200064 * 3072 * 2
    more = (attention + matrices) * 7 / 8 / 2**30
    data_parallel = memory.weights_gib(M2_5, Layout(data_parallel=8, expert_parallel=True))
    assert memory.weights_gib(M2_5, TP8) == memory.weights_gib(M2_5, TP8_EP)
    assert data_parallel - memory.weights_gib(M2_5, TP8_EP) == pytest.approx(more, rel=1e-9)


def test_pipeline_stage_is_the_fuller_one() -> None:
    """62 layers over 4 stages: the fullest has 16; a stage has the embedding or the head, not both."""
    per_layer = (memory.weights_gib(M2_5, TP1) - 2 * 200064 * 3072 * 2 / 2**30) / 62
    stage = memory.weights_gib(M2_5, Layout(pipeline_parallel=4))
    assert stage == pytest.approx(16 * per_layer + 200064 * 3072 * 2 / 2**30)


@pytest.mark.parametrize(
    ("card", "layout", "gib"),
    [
        # Sums over the checkpoint's tensors, made apart from this code.
        ("minimax_m2_5_nvfp4", TP1, 125.2),
        ("minimax_m2_5_nvfp4", TP2, 62.6),
        ("minimax_m2_5_nvfp4", TP4, 31.4),
        ("qwen3_235b_a22b_fp8", TP1, 220.2),
        # 70.55 billion parameters (the model's page) x 2 bytes.
        ("llama_3_3_70b", TP1, 70.55e9 * 2 / 2**30),
        ("kimi_k2_5", TP1, 553.7),
        ("kimi_k2_5_nvfp4", TP1, 549.6),
        ("glm_5_nvfp4", TP1, 411),
        ("deepseek_v3_2", TP1, 627.9),
    ],
)
def test_weights_of_other_models(card: str, layout: Layout, gib: float) -> None:
    assert memory.weights_gib(catalog.load(card), layout) == pytest.approx(gib, rel=0.005)


@pytest.mark.parametrize(
    ("card", "layout", "logged_gib"),
    [
        # Startup logs: GLM-5.1 in FP8 on eight H200; in NVFP4 on eight RTX PRO 6000; gpt-oss on one H100 and four A100.
        (GLM, TP8, 89.39),
        (GLM_NVFP4, TP8, 55.67),
        (GPT_OSS, TP1, 64.38),
        (GPT_OSS, TP4, 17.22),
    ],
)
def test_weights_as_logged(card: Card, layout: Layout, logged_gib: float) -> None:
    assert memory.weights_gib(card, layout) == pytest.approx(logged_gib, rel=0.015)


def test_latent_attention_by_hand() -> None:
    """Kimi-K2.5 on eight ranks keeps attention in BF16: the compressing projections whole, eight of 64 heads each."""
    whole = 7168 * (1536 + 512 + 64)
    heads = 8 * (1536 * 192 + 512 * 256 + 128 * 7168)
    no_attention = dataclasses.replace(
        KIMI, quantization=dataclasses.replace(KIMI.quantization, unconverted=("shared_experts", "mlp"))
    )
    # In INT4 the same matrices take 0.5 + 2/32 bytes, and decode keeps one decompressing matrix in BF16 besides.
    copy = 8 * 512 * 256 * 2
    saved = 61 * ((whole + heads) * (2 - 0.5625) - copy) / 2**30
    difference = memory.weights_gib(KIMI, TP8) - memory.weights_gib(no_attention, TP8)
    assert difference == pytest.approx(saved, rel=1e-9)


def test_prediction_layers_are_counted_only_when_loaded() -> None:
    """NVIDIA left GLM-5's layer 78 in BF16: 19 GB on the page, less embedding and head, which it shares."""
    more = memory.weights_gib(GLM_NVFP4, TP1, speculative=True) - memory.weights_gib(GLM_NVFP4, TP1)
    assert more == pytest.approx(19e9 / 2**30, rel=0.06)
    more_per_token = memory.kv_bytes_per_token(GLM_NVFP4, TP8, "fp8", speculative=True)
    assert more_per_token - memory.kv_bytes_per_token(GLM_NVFP4, TP8, "fp8") == 656 + 132


@pytest.mark.parametrize("row", H200["rows"], ids=lambda row: f"{row['rank_of']}-{row['vllm_version']}")
def test_weights_of_measured_ranks(row: dict[str, Any]) -> None:
    assert memory.weights_gib(single_rank(row), TP1) == pytest.approx(row["weights_gib"], rel=0.015)


# KV cache


@pytest.mark.parametrize(
    ("card", "ranks", "dtype", "expected"),
    [
        (M2_5, 1, "auto", 2 * 62 * 8 * 128 * 2),
        (M2_5, 4, "auto", 63_488),
        (M2_5, 4, "fp8", 31_744),
        (M2_5, 8, "auto", 31_744),
        # 4 KV heads: eight ranks repeat them, so TP8 saves nothing over TP4.
        (catalog.load("qwen3_235b_a22b_fp8"), 4, "auto", 48_128),
        (catalog.load("qwen3_235b_a22b_fp8"), 8, "auto", 48_128),
        # Latent attention: 61 x 576 values, on every rank. Sparse: 1152 or 656, and 132 for the indexer.
        (KIMI, 8, "auto", 70_272),
        (KIMI, 1, "fp8", 35_136),
        (GLM, 8, "auto", 78 * (1152 + 132)),
        (GLM_NVFP4, 8, "fp8", 78 * (656 + 132)),
        # 18 of 36 layers stop growing after 128 tokens.
        (GPT_OSS, 4, "auto", 2 * 18 * 2 * 64 * 2),
    ],
)
def test_kv_bytes_per_token(card: Card, ranks: int, dtype: str, expected: int) -> None:
    assert memory.kv_bytes_per_token(card, Layout(tensor_parallel=ranks), dtype) == expected


@pytest.mark.parametrize(("available_gib", "logged_tokens"), [(23.62, 399_424), (18.16, 307_184)])
def test_tokens_of_m2_5_tp4_as_logged(available_gib: float, logged_tokens: int) -> None:
    """RTX PRO 6000 and H100 starts; the log rounds GiB to two digits, which is 0.03 % of the tokens."""
    budget = available_gib + memory.weights_gib(M2_5, TP4) + 5
    fit = memory.footprint(M2_5, TP4, budget_gib=budget, overhead=5)
    assert fit.kv_cache_tokens == pytest.approx(logged_tokens, rel=0.0005)
    assert fit.kv_cache_tokens % 16 == 0


@pytest.mark.parametrize(("context", "logged_tokens"), [(1, 319_232), (2, 635_520), (8, 2_720_768)])
def test_tokens_of_sparse_attention_as_logged(context: int, logged_tokens: int) -> None:
    """Startup logs of GLM-5.1-NVFP4 on eight RTX PRO 6000 with 18.51, 18.42 and 19.47 GiB for the cache."""
    available = {1: 18.51, 2: 18.42, 8: 19.47}[context]
    drafting = context < 8
    layout = Layout(tensor_parallel=8, decode_context_parallel=context)
    weights = memory.weights_gib(GLM_NVFP4, layout, speculative=drafting)
    fit = memory.footprint(GLM_NVFP4, layout, budget_gib=available + weights, overhead=0, speculative=drafting)
    assert fit.kv_cache_tokens == pytest.approx(logged_tokens, rel=0.0005)
    assert fit.kv_cache_tokens % 64 == 0


def test_requests_of_a_hybrid_as_logged() -> None:
    """gpt-oss on four A100 (https://github.com/dennislee22/vLLM-benchmarking, log of four GPUs at 0.8).

    330,018 blocks of 16 tokens gave 284.25 requests of 16,384 tokens, with 2,048 tokens a step.
    """
    short = dataclasses.replace(GPT_OSS, shape=dataclasses.replace(GPT_OSS.shape, max_position_embeddings=16_384))
    assert memory.hybrid_tokens(short, 330_018, 16, 2048) / 16_384 == pytest.approx(284.25, abs=0.005)
    # Fewer blocks than one full-length request: what is left of them once the window is set aside.
    assert memory.hybrid_tokens(short, 500, 16, 2048) == (500 - 137) * 16


def test_cpu_blocks_are_128_tokens() -> None:
    tiny = catalog.load("lab_tiny_minimax_m2")
    # 512 bytes per token: 2 x 2 layers x 2 heads x 32 x 2 bytes. 1 MiB and a bit holds 2,048 tokens in 16 blocks.
    budget = memory.weights_gib(tiny, TP1) + (2**20 + 60_000) / 2**30
    fit = memory.footprint(tiny, TP1, budget_gib=budget, overhead=0, block_tokens=memory.CPU_BLOCK_TOKENS)
    assert (fit.kv_bytes_per_token, fit.kv_cache_tokens) == (512, 2048)


@settings(deadline=None)
@given(budget=st.floats(0, 200), more=st.floats(0, 100), ranks=st.sampled_from([1, 2, 4, 8]))
def test_more_memory_never_holds_fewer_tokens(budget: float, more: float, ranks: int) -> None:
    layout = Layout(tensor_parallel=ranks)
    small, large = (
        memory.footprint(M2_5, layout, budget_gib=gib, overhead=4).kv_cache_tokens for gib in (budget, budget + more)
    )
    assert 0 <= small <= large


# Overhead, against what engines left for the KV cache


def step(batched: int, seqs: int, version: tuple[int, ...] = (0, 32), *, graphs: bool = True) -> Step:
    return Step(batched, seqs, max_model_len=196_608, version=version, cuda_graphs=graphs)


@pytest.mark.parametrize(
    "row", H200["rows"], ids=lambda r: f"{r['rank_of']}-{r['vllm_version']}-{r['max_num_batched_tokens']}"
)
def test_kv_cache_of_measured_ranks(row: dict[str, Any]) -> None:
    """The estimate is within 1 % of what the engine had; a plan's is never above it, and at most 2 % below."""
    card, version = single_rank(row), tuple(map(int, row["vllm_version"].split(".")))
    limits = step(row["max_num_batched_tokens"], row["max_num_seqs"], version, graphs=row["cuda_graphs"] == "on")
    budget = row["gpu_mem_gib"] * row["gpu_memory_utilization"]
    estimate, planned = (
        memory.footprint(card, TP1, budget_gib=budget, overhead=memory.overhead_gib(card, TP1, limits, margin=margin))
        for margin in (False, True)
    )
    assert estimate.kv_cache_gib == pytest.approx(row["available_kv_gib"], rel=0.01)
    assert estimate.kv_cache_tokens == pytest.approx(row["kv_tokens"], rel=0.01)
    assert 0.98 * row["available_kv_gib"] <= planned.kv_cache_gib <= row["available_kv_gib"] * 1.005


@pytest.mark.parametrize(
    ("gpu_gib", "fraction", "limits", "available_gib"),
    [
        # vLLM about 0.15 on RTX PRO 6000, default sequences, default batched tokens:
        # https://github.com/local-inference-lab/rtx6kpro/blob/e2c2b9577c938525d99a4ff62ba4a8ecc47a9990/models/minimax-m25.md
        (95.0, 0.90, step(8192, 1024, (0, 15)), 23.62),
        # vLLM 0.19.1rc1 on H100 (a public repository's log; its address was not kept).
        (79.18, 0.95, step(8192, 10, (0, 19, 1)), 18.16),
    ],
)
def test_kv_cache_of_public_tp4_starts(gpu_gib: float, fraction: float, limits: Step, available_gib: float) -> None:
    """Neither version counted CUDA graphs. A plan's is never above what the engine had, and at most 7 % below."""
    overhead = memory.overhead_gib(M2_5, TP4, limits)
    fit = memory.footprint(M2_5, TP4, budget_gib=gpu_gib * fraction, overhead=overhead)
    assert 0.93 * available_gib <= fit.kv_cache_gib <= available_gib


@settings(deadline=None)
@given(
    tokens=st.integers(512, 65_536),
    sequences=st.integers(1, 2048),
    card=st.sampled_from([M2_5, KIMI, GLM_NVFP4, GPT_OSS]),
    layout=st.sampled_from([TP1, TP8, TP8_EP]),
)
def test_overhead_grows_with_the_step_and_the_sequences(
    tokens: int, sequences: int, card: Card, layout: Layout
) -> None:
    base = memory.overhead_gib(card, layout, step(tokens, sequences))
    assert base <= memory.overhead_gib(card, layout, step(2 * tokens, sequences))
    assert base <= memory.overhead_gib(card, layout, step(tokens, 2 * sequences))
    assert memory.overhead_gib(card, layout, step(tokens, sequences), margin=False) < base


def test_sparse_attention_and_experts_share_one_workspace() -> None:
    """GLM-5 at TP8, by hand.

    2 x 8 rows of 6,144 BF16 values for 8,192 tokens are 1.5 GiB; five contexts of 202,752 rows of 576 are 1.09. Of a
    million tokens they are 5.6, and those count instead.
    """
    longer = dataclasses.replace(GLM_NVFP4, shape=dataclasses.replace(GLM_NVFP4.shape, max_position_embeddings=2**20))
    short, long = (
        memory.overhead_gib(card, TP8, Step(8192, 64, card.shape.max_position_embeddings))
        for card in (GLM_NVFP4, longer)
    )
    experts = 2 * 8 * 6144 * 8192 * 2 / 2**30
    assert long - short == pytest.approx(5 * 2**20 * 576 * 2 / 2**30 - experts, abs=1e-9)


# Fraction


def test_cuda_total_leaves_out_what_the_driver_reserves() -> None:
    """nvidia-smi of an RTX PRO 6000: 97,887 MiB, 636 reserved; CUDA there sees 94.97 GiB."""
    assert memory.cuda_total_gib(97_887, 636) == pytest.approx(94.97, abs=0.005)


def test_unknown_reserve_is_assumed_larger_than_any_seen() -> None:
    """Seen: 636 of 97,887 and 616 of 143,771 MiB. Assumed: one per cent, at least 640."""
    assert memory.reserved_mib(97_887, None) == 979
    assert memory.reserved_mib(24_576, None) == 640
    assert memory.reserved_mib(97_887, 636) == 636


@pytest.mark.parametrize(
    ("total_gib", "layout", "ceiling", "expected"),
    [
        (94.97, TP4, None, 0.95),  # 1 - (1.5 + 4 x 0.75) / 94.97 = 0.9526
        (79.18, TP4, None, 0.94),  # 1 - 4.5 / 79.18 = 0.9432
        (94.97, TP8_EP, None, 0.92),  # 1 - 7.5 / 94.97 = 0.9210
        (139.8, TP1, None, 0.95),  # 1 - 1.5 / 139.8 = 0.989, more than any report ran with
        (94.97, TP4, 0.9, 0.9),  # the card's ceiling
        (1.0, TP1, None, 0.0),
    ],
)
def test_fraction(total_gib: float, layout: Layout, ceiling: float | None, expected: float) -> None:
    assert memory.memory_fraction(total_gib, layout, ceiling) == expected


@settings(deadline=None)
@given(total=st.floats(8, 400), ranks=st.sampled_from([1, 2, 4, 8]))
def test_fraction_always_leaves_the_reserve(total: float, ranks: int) -> None:
    """By hand: 1.5 GiB for the context, and 0.75 per rank for NCCL when there is more than one."""
    fraction = memory.memory_fraction(total, Layout(tensor_parallel=ranks), None)
    reserve = 1.5 + (0.75 * ranks if ranks > 1 else 0)
    assert total * (1 - fraction) >= min(reserve, total) - 1e-9
    assert fraction == math.floor(fraction * 100 + 1e-9) / 100
