"""How fast a layout decodes and reads prompts: a roofline, calibrated on public reports.

A decode step reads the weights that its tokens need and their KV cache once, launches its kernels, and reduces twice
per layer among the ranks:

    step = bytes read / bandwidth + launches + all-reduces + arithmetic
    tokens per second = requests / step

The point is which layout wins as concurrency grows; every figure is an estimate. docs/memory-model.md shows it against
the reports.
"""

import math
from dataclasses import dataclass
from typing import Any

from vllm_fleet import memory
from vllm_fleet.catalog import Card
from vllm_fleet.gpus import Rates
from vllm_fleet.layout import Layout
from vllm_fleet.memory import GIB

CUSTOM_ALL_REDUCE_PCIE_RANKS = 2  # vLLM's own all-reduce stops there over PCIe

# A request of the public benchmarks behind the constants: 1,024 tokens in, 1,024 out; on average it holds this many.
TYPICAL_CONTEXT = 1536
# Errors on the reports that the constants were fitted on, in per cent: the median, and what nine of ten stay within
# (tests/unit/test_speed.py computes them).
ERROR_PCT = 10
ERROR_P90_PCT = 32

# Fitted on the reports of tests/fixtures/memory/throughput_reports.csv and the H200 measurements.
_BANDWIDTH_SHARE = 0.9  # of a GPU's memory bandwidth, in kernels that read weights
_LAYER_SECONDS = 66e-6  # kernels of one layer in a CUDA graph, beyond the bytes that they read
_SPARSE_LAYER_SECONDS = 30e-6  # an indexer's, on top
_BATCH_LAYER_SECONDS = 25e-6  # on top where experts serve several requests: an H200's step grew so from one to eight
# Tokens prefer the same experts: a batch touches as many as this power of its size would by chance.
_ROUTING_POWER = 0.84
# The fullest rank's share of the experts touched, where each holds whole ones.
_EXPERT_IMBALANCE = 1.25
_ARITHMETIC_SHARE = 0.5  # of the dense BF16 rate
_PREFILL_SHARE = 0.32  # the same in prefill: an H200 read 47,400 prompt tokens/s as a rank of M2.5 at TP4

# One all-reduce: seconds, and bytes per second of the ring.
_ALL_REDUCE = {
    "NV": (10e-6, 100e9),
    "PCIE": (25e-6, 25e9),
    "SYS": (50e-6, 20e9),
}
# Over PCIe more than two ranks go through NCCL, which leaves its low-latency protocol for larger messages: M2.5 on four
# ranks took 25 ms more per step at 128 requests (768 KiB) than at 64, in FP8 and in NVFP4; on two ranks it did not.
_NCCL_LARGE_BYTES = 512 * 1024
_NCCL_LARGE_SECONDS = 100e-6


@dataclass(frozen=True)
class Place:
    """What a replica runs on, as far as speed goes."""

    rates: Rates
    link: str  # NV, PCIE or SYS: the farthest among the ranks


def place_of(rates: Rates, farthest: str | None) -> Place:
    """The link class of a group, from nvidia-smi's name of its farthest link; unknown counts as across sockets."""
    return Place(rates, "NV" if farthest == "NV" else "SYS" if farthest in (None, "SYS") else "PCIE")


def decode_step_seconds(
    card: Card, layout: Layout, place: Place, requests: int, *, context: int = TYPICAL_CONTEXT, dtype: str = "auto"
) -> float:
    """One step that gives each of a replica's requests a token."""
    own = math.ceil(requests / layout.data_parallel)  # attention's share of a data-parallel rank
    bandwidth = place.rates.memory_gb_s * 1e9 * _BANDWIDTH_SHARE
    read = _weights_read(card, layout, requests) + own * _cache_read(card, layout, context, dtype)
    layers = card.shape.num_hidden_layers
    layer = _LAYER_SECONDS + (_SPARSE_LAYER_SECONDS if card.attention == "dsa" else 0)
    launches = layers * (layer + (_BATCH_LAYER_SECONDS if card.shape.num_experts and requests > 1 else 0))
    arithmetic = requests * _flops_per_token(card, context) / layout.ranks / _arithmetic(place, _ARITHMETIC_SHARE)
    # Stages take turns: each reads its share, and a token passes all of them.
    exchanges = _exchange(card, layout, place, requests)
    return read * layout.pipeline_parallel / bandwidth + launches + arithmetic + exchanges


def tokens_per_second(
    card: Card, layout: Layout, place: Place, requests: int, *, context: int = TYPICAL_CONTEXT, dtype: str = "auto"
) -> float:
    """Tokens that a replica decodes per second for so many requests at once."""
    return requests / decode_step_seconds(card, layout, place, requests, context=context, dtype=dtype)


def prefill_tokens_per_second(card: Card, layout: Layout, place: Place, tokens: int = 8192) -> float:
    """Prompt tokens that a replica reads per second, in steps of so many."""
    arithmetic = tokens * _flops_per_token(card, tokens // 2) / layout.ranks / _arithmetic(place, _PREFILL_SHARE)
    read = _weights_read(card, layout, tokens) / (place.rates.memory_gb_s * 1e9 * _BANDWIDTH_SHARE)
    launches = card.shape.num_hidden_layers * _LAYER_SECONDS
    exchanges = _exchange(card, layout, place, tokens)
    return tokens / (max(arithmetic, read * layout.pipeline_parallel) + launches + exchanges)


def all_reduce_bytes_per_token(card: Card) -> int:
    """What each token sends through every all-reduce of a step: two per layer, of the hidden size in BF16."""
    return 2 * card.shape.num_hidden_layers * card.shape.hidden_size * memory.BF16_BYTES


def estimate(card: Card, layout: Layout, place: Place, requests: int, dtype: str) -> dict[str, Any]:
    """The figures of a plan: one request alone, and a replica's share of the expected ones together."""
    return {
        "single": round(tokens_per_second(card, layout, place, 1, dtype=dtype), 1),
        "at_concurrency": round(tokens_per_second(card, layout, place, requests, dtype=dtype), 1),
        "basis": "roofline",
        "error_pct": ERROR_PCT,
        "error_p90_pct": ERROR_P90_PCT,
    }


def _weights_read(card: Card, layout: Layout, requests: int) -> float:
    """Bytes of weights that one rank reads in a step: everything but the embedding, of the experts those touched."""
    shape = card.shape
    total = memory.weights_gib(card, layout) * GIB
    embedding = shape.vocab_size * shape.hidden_size / layout.tensor_parallel * memory.BF16_BYTES
    total -= 0 if shape.tie_word_embeddings or layout.pipeline_parallel > 1 else embedding
    if not shape.num_experts:
        return total
    expert = memory.expert_bytes(card, layout)
    layers = min(math.ceil(shape.num_hidden_layers / layout.pipeline_parallel), shape.num_moe_layers)
    held = shape.num_experts / layout.expert_ranks
    missed: float = (1 - shape.num_experts_per_tok / shape.num_experts) ** (requests**_ROUTING_POWER)
    touched = held * (1 - missed)
    if layout.expert_ranks > 1:
        touched = min(held, touched * _EXPERT_IMBALANCE)
    return total - layers * expert * (held - touched)


def _cache_read(card: Card, layout: Layout, context: int, dtype: str) -> float:
    """Bytes of KV cache that one rank reads for one token of one request."""
    shape = card.shape
    if card.attention == "dsa":
        # The indexer looks at every token, attention at the best ones.
        index = shape.num_indexer_layers * (shape.index_head_dim + memory.FP32_BYTES) * context
        picked = memory.kv_bytes_per_token(card, layout, dtype) * min(context, shape.index_topk)
        return (index + picked) / layout.decode_context_parallel
    return memory.kv_bytes_per_token(card, layout, dtype) * context / layout.decode_context_parallel


def _flops_per_token(card: Card, context: int) -> float:
    """Two per active weight, and attention's own over the context."""
    shape = card.shape
    whole = Layout()
    attention = shape.num_attention_heads * (shape.head_dim if card.attention == "gqa" else shape.v_head_dim)
    seen = min(context, shape.index_topk) if card.attention == "dsa" else context
    return 2 * active_weights(card, whole) + 4 * shape.num_hidden_layers * attention * seen


def active_weights(card: Card, layout: Layout) -> float:
    """Weights that one token passes: all but the embedding and the experts it is not sent to."""
    shape = card.shape
    attention = shape.hidden_size * shape.num_attention_heads * max(shape.head_dim, shape.v_head_dim) * 2
    if card.attention != "gqa":
        query = shape.qk_nope_head_dim + shape.qk_rope_head_dim
        decompressed = shape.kv_lora_rank * (shape.qk_nope_head_dim + shape.v_head_dim)
        attention = shape.num_attention_heads * (
            (shape.q_lora_rank or shape.hidden_size) * query + decompressed + shape.v_head_dim * shape.hidden_size
        )
    experts = (shape.num_experts_per_tok + shape.n_shared_experts) * shape.moe_intermediate_size
    dense_layers = shape.num_hidden_layers - shape.num_moe_layers
    feed_forward = 3 * shape.hidden_size * (experts * shape.num_moe_layers + shape.intermediate_size * dense_layers)
    total = shape.num_hidden_layers * attention + feed_forward + shape.vocab_size * shape.hidden_size
    return total / layout.ranks


def _arithmetic(place: Place, share: float) -> float:
    return place.rates.bf16_tflops * 1e12 * share


def _exchange(card: Card, layout: Layout, place: Place, tokens: int) -> float:
    """What the ranks of a replica exchange in a step of so many tokens.

    Tensor parallel ranks reduce after attention and after the feed-forward part, and once more where they spread the
    cache. Data parallel ranks compute attention apart, then gather everyone's tokens for the experts and scatter the
    sums back, which sends as much as one all-reduce among all.
    """
    layers, tp, dp = card.shape.num_hidden_layers, layout.tensor_parallel, layout.data_parallel
    own = math.ceil(tokens / dp)
    per_layer = (2 if dp == 1 else 1) + (layout.decode_context_parallel > 1)
    among_few = per_layer * _all_reduce(card, place, tp, own) if tp > 1 else 0.0
    among_all = _all_reduce(card, place, tp * dp, tokens) if dp > 1 else 0.0
    return layers * (among_few + among_all)


def _all_reduce(card: Card, place: Place, ranks: int, tokens: int) -> float:
    """One of them."""
    latency, bandwidth = _ALL_REDUCE[place.link]
    message = tokens * card.shape.hidden_size * memory.BF16_BYTES
    one = latency + message * 2 * (ranks - 1) / ranks / bandwidth
    through_nccl = place.link != "NV" and ranks > CUSTOM_ALL_REDUCE_PCIE_RANKS
    return one + _NCCL_LARGE_SECONDS if through_nccl and message > _NCCL_LARGE_BYTES else one
