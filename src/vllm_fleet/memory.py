"""What a replica needs of each GPU's memory, and what is left for the KV cache.

The engine divides a GPU like this (vllm/v1/worker/gpu_worker.py, read in 0.32 and 0.33):

    requested    = total seen by CUDA x gpu_memory_utilization
    available_kv = requested - weights - overhead

The CUDA context and NCCL's buffers are allocated before the engine looks, so they live in the slice that
`gpu_memory_utilization` leaves out. Overhead is the activation peak of one profiled step, the CUDA graphs, and small
persistent buffers. Bytes per unit are GiB unless a name says otherwise.
"""

import math
from dataclasses import dataclass

from vllm_fleet.catalog import Card, Quantization
from vllm_fleet.layout import Layout

GIB = 2**30
BF16_BYTES = 2
FP32_BYTES = 4

# Measured on one H200 with single-rank engines 0.26 and 0.32 (tests/fixtures/memory): what remains of the overhead
# when the activation terms are taken off.
_PERSISTENT_GIB = 0.33
# Two public multi-rank starts (M2.5 TP4 on H100; GLM-5.1 TP8 on H200) show 1.5 to 1.9 GiB per rank beyond the terms
# below: all-reduce buffers, communicator growth, larger GEMM workspaces. Not told apart, so rounded up.
_MULTI_RANK_GIB = 2.0
# Warm-up of a sampler that sorts: logits, their float copy, sorted values and indices. Fitted as 9.6 x sequences x
# vocabulary x 4 bytes on four models; an upper bound for engines that sample with FlashInfer.
_SAMPLER_COPIES = 9.6
# CUDA graphs: a pool, and 0.15 MiB per captured layer and batch size. H200, 0.26: 0.50 GiB with 62 layers and 0.33
# GiB with 28 at 35 sizes. 0.32 took 0.85 GiB at 51 sizes and full vocabulary: two copies of the logits more.
_GRAPH_POOL_GIB = 0.25
_GRAPH_LAYER_GIB = 0.15 / 1024
_GRAPH_LOGITS_COPIES = 2

# Left outside gpu_memory_utilization: the CUDA context and cuBLAS handles (0.51 GiB on an H200), NCCL's buffers per
# peer, and room for an allocator that fragments. A public M2.5 TP4 start on H100 ran with 3.96 GiB left out; this
# leaves 4.5.
_CONTEXT_RESERVE_GIB = 1.5
_NCCL_RESERVE_PER_RANK_GIB = 0.75
# No report shows an engine running with more.
MAX_GPU_MEMORY_UTILIZATION = 0.95
# nvidia-smi's "reserved" was 0.43 to 0.65 % of the total on the cards seen (H200 616 MiB, RTX PRO 6000 636 MiB).
_RESERVED_SHARE = 0.01
_RESERVED_FLOOR_MIB = 640

# The engine's three processes on the CPU build: 1.7 + 0.6 + 0.6 GiB resident with a model of a few MiB.
CPU_PROCESS_GIB = 3.0
GPU_BLOCK_TOKENS = 16
CPU_BLOCK_TOKENS = 128

# Bytes per weight including its share of the scales.
_FP8_SCALE_BYTES = 4
_NVFP4_WEIGHT_BYTES = 0.5


@dataclass(frozen=True)
class Footprint:
    """One rank's memory, in GiB, and what the KV cache holds. The worst rank of a replica is what counts."""

    budget_gib: float  # what the engine may take: CUDA's total x fraction, or the host memory given to a CPU rank
    weights_gib: float
    overhead_gib: float
    kv_cache_gib: float  # negative when the model does not fit
    kv_bytes_per_token: int
    kv_cache_tokens: int  # of one rank's group; a data-parallel replica holds this many per group


def weight_bytes(quantization: Quantization, module: str) -> float:
    """Bytes per weight of a module.

    Block FP8 stores one float32 scale per square block of weights, NVFP4 one byte per group of 16.
    """
    if not quantization.converts(module):
        return float(BF16_BYTES)
    block = quantization.block or 1
    if quantization.method == "fp8_block":
        return 1 + _FP8_SCALE_BYTES / block**2
    return _NVFP4_WEIGHT_BYTES + 1 / block


def weights_gib(card: Card, layout: Layout) -> float:
    """Weights of the fullest rank.

    Attention, dense layers, embeddings and head are cut by tensor parallelism; experts by tensor parallelism, or spread
    whole by expert parallelism; router and norms are on every rank; key-value heads are repeated once there are more
    ranks than heads. Reproduces the logged 53.75 GiB of M2.5 at TP4 within 0.1 %.
    """
    shape, quantization, tp = card.shape, card.quantization, layout.tensor_parallel
    hidden = shape.hidden_size

    heads = shape.num_attention_heads // tp + 2 * kv_heads_per_rank(card, layout) + shape.num_attention_heads // tp
    attention = hidden * heads * shape.head_dim * weight_bytes(quantization, "self_attn")
    norms = 2 * hidden * BF16_BYTES
    dense = 3 * hidden * shape.intermediate_size / tp * weight_bytes(quantization, "mlp")
    moe = 0.0
    if shape.num_experts:
        expert = 3 * hidden * shape.moe_intermediate_size * weight_bytes(quantization, "experts")
        share = layout.expert_ranks if layout.expert_parallel else tp
        router = hidden * shape.num_experts * FP32_BYTES
        moe = expert * (shape.num_experts / share + shape.n_shared_experts / tp) + router

    layers = math.ceil(shape.num_hidden_layers / layout.pipeline_parallel)
    moe_layers = min(layers, shape.num_moe_layers)
    # With stages, a stage of experts is the fuller one; without, the dense layers come on top.
    dense_layers = layers - moe_layers
    matrix = shape.vocab_size * hidden / tp * BF16_BYTES
    matrices = 1 if shape.tie_word_embeddings or layout.pipeline_parallel > 1 else 2
    total = layers * (attention + norms) + moe_layers * moe + dense_layers * dense + matrices * matrix
    return total / GIB


def kv_heads_per_rank(card: Card, layout: Layout) -> int:
    """Key-value heads on one rank: never less than one."""
    return max(1, card.shape.num_key_value_heads // layout.tensor_parallel)


def kv_bytes_per_token(card: Card, layout: Layout, kv_cache_dtype: str) -> int:
    """Bytes that one token takes in one rank's KV cache.

    Grouped-query attention: 2 (key and value) x layers x heads on the rank x head_dim x element size. M2.5 in BF16:
    253,952 at TP1, 63,488 at TP4, 31,744 at TP8.
    """
    element = 1 if kv_cache_dtype.startswith("fp8") else BF16_BYTES
    layers = math.ceil(card.shape.num_hidden_layers / layout.pipeline_parallel)
    return 2 * layers * kv_heads_per_rank(card, layout) * card.shape.head_dim * element


def overhead_gib(
    card: Card, layout: Layout, *, max_num_batched_tokens: int, max_num_seqs: int, cuda_graphs: bool = True
) -> float:
    """What the engine takes beside weights and KV cache on one GPU: an upper estimate.

    Activation peak per token of a step: two MoE workspaces of top-k rows, each as wide as the larger of the hidden size
    and the two joined expert halves (vLLM's Triton experts), five rows of the hidden size, and the attention's
    queries, keys, values and output. At 16,384 tokens this gives 2.39 GiB for an M2.5 TP4 rank where 2.30 (0.26) and
    2.40 (0.32) were measured. The step and the sampler's warm-up do not overlap: the larger counts.
    """
    shape, tp = card.shape, layout.tensor_parallel
    heads = 2 * (shape.num_attention_heads // tp) + 2 * kv_heads_per_rank(card, layout)
    row = 5 * shape.hidden_size + heads * shape.head_dim
    if shape.num_experts:
        width = shape.moe_intermediate_size if layout.expert_parallel else shape.moe_intermediate_size // tp
        # Data-parallel ranks gather each other's tokens before the experts.
        row += 2 * shape.num_experts_per_tok * max(2 * width, shape.hidden_size) * layout.data_parallel
    row = max(row, 3 * shape.intermediate_size // tp)
    step = max_num_batched_tokens * row * BF16_BYTES / GIB
    logits = max_num_seqs * shape.vocab_size * FP32_BYTES / GIB
    total = _PERSISTENT_GIB + max(step, _SAMPLER_COPIES * logits)
    if cuda_graphs:
        layers = math.ceil(shape.num_hidden_layers / layout.pipeline_parallel)
        total += (
            _GRAPH_POOL_GIB + _GRAPH_LAYER_GIB * layers * _graph_sizes(max_num_seqs) + _GRAPH_LOGITS_COPIES * logits
        )
    return total + (_MULTI_RANK_GIB if layout.ranks > 1 else 0)


def _graph_sizes(max_num_seqs: int) -> int:
    """Batch sizes that the engine captures: 1, 2, 4, every 8 below 256, every 16 from there; to twice the sequences."""
    largest = min(2 * max_num_seqs, 512)
    return sum(size <= largest for size in [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)])


def reserved_mib(memory_total_mib: int, memory_reserved_mib: int | None) -> int:
    """Memory that CUDA does not see: nvidia-smi's "reserved", or a careful estimate where it is not reported."""
    if memory_reserved_mib is not None:
        return memory_reserved_mib
    return max(_RESERVED_FLOOR_MIB, math.ceil(memory_total_mib * _RESERVED_SHARE))


def cuda_total_gib(memory_total_mib: int, memory_reserved_mib: int | None) -> float:
    """What CUDA reports as a GPU's total: nvidia-smi's total minus reserved (95.0 GiB of 97,887 MiB)."""
    return (memory_total_mib - reserved_mib(memory_total_mib, memory_reserved_mib)) / 1024


def memory_fraction(total_gib: float, layout: Layout, ceiling: float | None) -> float:
    """`gpu_memory_utilization`: of CUDA's total, minus the static reserve, rounded down to a hundredth.

    Args:
        total_gib: What CUDA sees.
        layout: The more ranks, the more NCCL buffers.
        ceiling: The card's, where it has one.

    Returns:
        Between 0 and the ceiling.
    """
    reserve = _CONTEXT_RESERVE_GIB + (_NCCL_RESERVE_PER_RANK_GIB * layout.ranks if layout.ranks > 1 else 0)
    share = math.floor((1 - reserve / total_gib) * 100) / 100
    return max(0.0, min(share, ceiling or MAX_GPU_MEMORY_UTILIZATION))


def footprint(
    card: Card, layout: Layout, *, budget_gib: float, overhead: float, block_tokens: int = GPU_BLOCK_TOKENS
) -> Footprint:
    """Divide a rank's budget into weights, overhead and KV cache.

    Tokens are whole blocks, as the engine allocates them. Decode context parallel ranks each hold a part of every
    sequence, which multiplies the tokens.
    """
    weights = weights_gib(card, layout)
    kv_gib = budget_gib - weights - overhead
    per_token = kv_bytes_per_token(card, layout, card.engine.kv_cache_dtype)
    blocks = max(0, math.floor(kv_gib * GIB / (per_token * block_tokens)))
    return Footprint(
        budget_gib=budget_gib,
        weights_gib=weights,
        overhead_gib=overhead,
        kv_cache_gib=kv_gib,
        kv_bytes_per_token=per_token,
        kv_cache_tokens=blocks * block_tokens * layout.decode_context_parallel,
    )
