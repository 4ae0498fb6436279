"""What a replica needs of each GPU's memory, and what is left for the KV cache.

The engine divides a GPU like this (vllm/v1/worker/gpu_worker.py, read in 0.32 and 0.33):

    requested    = total seen by CUDA x gpu_memory_utilization
    available_kv = requested - weights - overhead

The CUDA context and NCCL's buffers are allocated before the engine looks, so they live in the slice that
`gpu_memory_utilization` leaves out. Overhead is the activation peak of one profiled step, the CUDA graphs, and small
persistent buffers. docs/memory-model.md derives every term and shows predicted against reported. Bytes per unit are GiB
unless a name says otherwise.
"""

import math
from dataclasses import dataclass, replace

from vllm_fleet.catalog import Card, Quantization
from vllm_fleet.layout import Layout

RECENT = (0, 32)  # the engine's version where none is given
GIB = 2**30
BF16_BYTES = 2
FP32_BYTES = 4

# Bytes of scales beside the weights: float32 per block of FP8, one byte per NVFP4 or MXFP4 group, BF16 per INT4 group.
_FP8_SCALE_BYTES = 4
_FOUR_BIT_SCALE_BYTES = {"nvfp4": 1, "mxfp4": 1, "int4": 2}
_FOUR_BIT_WEIGHT_BYTES = 0.5
# MXFP4 kernels pad the hidden size and the width of a rank's experts to these multiples: gpt-oss-120b takes 64.38 GiB
# on one rank and 17.22 on each of four, where its bare parameters are 60.7 and 15.2. Before 0.11 one rank took 65.97.
_MXFP4_HIDDEN_MULTIPLE = 256
_MXFP4_WIDTH_MULTIPLE = 64
_MXFP4_WIDTH_MULTIPLE_BEFORE = ((0, 11), 128)

# One token in the cache of DeepSeek sparse attention. In FP8 ("fp8_ds_mla"): 512 compressed values, four float32 scales
# and 64 rotary values in BF16. The indexer keeps FP8 keys with a float32 scale per 128.
_FP8_DS_MLA_BYTES = 512 + 4 * 4 + 64 * 2
_INDEX_SCALE_GROUP = 128

# Versions at which the engine's memory steps.
_SAMPLER_SORTS = ((0, 11), (0, 20))  # from, until: in between top-k and top-p sort the vocabulary by default
_CUDA_GRAPHS_COUNTED = (0, 21)
_MODEL_RUNNER_V2 = (0, 27)  # seen in 0.32, not in 0.26

_PERSISTENT_GREW = (0, 16)

# Fitted. What one rank keeps beside the terms below: 0.13 outside PyTorch in eight reports of 0.11; measured on an H200
# with 0.26 and 0.32, 0.22 to 0.25 outside PyTorch and buffers.
_PERSISTENT_GIB = 0.33
_PERSISTENT_BEFORE_GIB = 0.13
# Communicators and their buffers that grow after the engine's snapshot, per rank of the replica.
_COLLECTIVES_PER_RANK_GIB = 0.2
# Copies of the float32 logits at the sampler's warm-up: with FlashInfer (two A100 logs of 0.10.1), and sorting (eight
# reports of 0.11 to 0.15).
_SAMPLER_COPIES = 2.5
_SORTING_SAMPLER_COPIES = 9.6
# CUDA graphs per captured layer and batch size, and copies of the logits that the second model runner captures.
_GRAPH_LAYER_GIB = 0.143e-3
_GRAPH_LOGITS_COPIES = 3.15
# The graphs' memory pool, by model runner.
_GRAPH_POOL_V1_GIB = 0.19
_GRAPH_POOL_V2_GIB = 0.04

# Read in the source, not fitted.
_SPARSE_WORKSPACE_FACTOR = 5  # rows of sparse attention's prefill workspace, in multiples of the context
_SPARSE_LOGITS_GIB = 0.5  # VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
_MLA_PREFILL_ROWS = 64 * 1024  # most rows of context that one chunk of prefill decompresses

# What a plan adds to the estimate: no report known had more overhead than estimate and margin together, except those of
# forks with kernels of their own.
MARGIN_GIB = 0.15
_MULTI_RANK_MARGIN_GIB = 1.2

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
SPARSE_BLOCK_TOKENS = 64
CPU_BLOCK_TOKENS = 128


@dataclass(frozen=True)
class Footprint:
    """One rank's memory, in GiB, and what the KV cache holds. The worst rank of a replica is what counts."""

    budget_gib: float  # what the engine may take: CUDA's total x fraction, or the host memory given to a CPU rank
    weights_gib: float
    overhead_gib: float
    kv_cache_gib: float  # negative when the model does not fit
    kv_bytes_per_token: int
    kv_cache_tokens: int  # of one rank's group; a data-parallel replica holds this many per group


@dataclass(frozen=True)
class Step:
    """What the size of the engine's largest step depends on, beside model and layout."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    version: tuple[int, ...] = RECENT
    cuda_graphs: bool = True


def weight_bytes(quantization: Quantization, module: str) -> float:
    """Bytes per weight of a module, its share of the scales included.

    Block FP8 stores one float32 scale per square block of weights, NVFP4 and MXFP4 one byte per group of 16 or 32, INT4
    a BF16 scale per group. Scales per channel and per tensor are too few to count.
    """
    method = quantization.method
    if not quantization.converts(module):
        return float(BF16_BYTES)
    if method == "fp8_channel":
        return 1.0
    block = quantization.block or 1
    if method == "fp8_block":
        return 1 + _FP8_SCALE_BYTES / block**2
    return _FOUR_BIT_WEIGHT_BYTES + _FOUR_BIT_SCALE_BYTES[method] / block


def weights_gib(card: Card, layout: Layout, *, speculative: bool = False, version: tuple[int, ...] = RECENT) -> float:
    """Weights of the fullest rank.

    Attention, dense layers, embeddings and head are cut by tensor parallelism; experts by tensor parallelism, or spread
    whole by expert parallelism; router, norms, indexer and the compressing projections of latent attention are on every
    rank; key-value heads are repeated once there are more ranks than heads. Reproduces the logged 53.75 GiB of M2.5 at
    TP4 within 0.1 %.

    Args:
        card: The model.
        layout: How it is split.
        speculative: Whether its multi-token-prediction layers are loaded.
        version: The engine's, as numbers.
    """
    shape, quantization, tp = card.shape, card.quantization, layout.tensor_parallel
    hidden = shape.hidden_size
    attention, indexer = _attention_bytes(card, tp), _indexer_bytes(card)
    norms = 2 * hidden * BF16_BYTES
    dense = 3 * hidden * shape.intermediate_size / tp * weight_bytes(quantization, "mlp")
    moe = moe_bytes(card, layout, version)

    layers = math.ceil(shape.num_hidden_layers / layout.pipeline_parallel)
    moe_layers = min(layers, shape.num_moe_layers)
    # With stages, a stage of experts is the fuller one; without, the dense layers come on top.
    dense_layers = layers - moe_layers
    indexer_layers = math.ceil(shape.num_indexer_layers / layout.pipeline_parallel)
    matrix = shape.vocab_size * hidden / tp * BF16_BYTES
    matrices = 1 if shape.tie_word_embeddings or layout.pipeline_parallel > 1 else 2
    total = layers * (attention + norms) + indexer_layers * indexer + moe_layers * moe + dense_layers * dense
    total += matrices * matrix
    if speculative:
        # A layer like the others, and the projection that joins a token's embedding with the hidden state, on every
        # rank. Embedding and head are the model's own.
        joined = 2 * hidden * hidden * BF16_BYTES
        if not quantization.converts("mtp"):
            plain = replace(card, quantization=Quantization("none", None, ()))
            attention, indexer, moe = _attention_bytes(plain, tp), _indexer_bytes(plain), moe_bytes(plain, layout)
        total += shape.num_nextn_predict_layers * (attention + norms + indexer + (moe or dense) + joined)
    return total / GIB


def _attention_bytes(card: Card, tp: int) -> float:
    """Attention weights of one layer on one rank."""
    shape, quantization = card.shape, card.quantization
    hidden, heads = shape.hidden_size, shape.num_attention_heads / tp
    each = weight_bytes(quantization, "self_attn")
    if card.attention == "gqa":
        kv_heads = max(1, shape.num_key_value_heads // tp)
        return hidden * (2 * heads + 2 * kv_heads) * shape.head_dim * each
    query, decompressed = shape.qk_nope_head_dim + shape.qk_rope_head_dim, shape.qk_nope_head_dim + shape.v_head_dim
    compress = hidden * (shape.q_lora_rank + shape.kv_lora_rank + shape.qk_rope_head_dim)
    heads_of = heads * (
        (shape.q_lora_rank or hidden) * query + shape.kv_lora_rank * decompressed + shape.v_head_dim * hidden
    )
    # Decode multiplies by the decompressing matrix in BF16; where the checkpoint's is quantized that is one more copy.
    copy = heads * shape.kv_lora_rank * decompressed * BF16_BYTES if quantization.converts("self_attn") else 0
    return (compress + heads_of) * each + copy


def _indexer_bytes(card: Card) -> float:
    """The indexer of one layer of sparse attention; every rank has all of it."""
    shape = card.shape
    matrices = shape.index_head_dim * (shape.q_lora_rank * shape.index_n_heads + shape.hidden_size)
    return matrices * weight_bytes(card.quantization, "indexer") + shape.hidden_size * shape.index_n_heads * BF16_BYTES


def expert_bytes(card: Card, layout: Layout, version: tuple[int, ...] = RECENT) -> float:
    """One routed expert: whole, or under plain tensor parallelism the slice of one rank."""
    shape, quantization = card.shape, card.quantization
    width = shape.moe_intermediate_size / (1 if layout.expert_parallel else layout.tensor_parallel)
    hidden = float(shape.hidden_size)
    if quantization.method == "mxfp4":
        hidden = math.ceil(hidden / _MXFP4_HIDDEN_MULTIPLE) * _MXFP4_HIDDEN_MULTIPLE
        until, older = _MXFP4_WIDTH_MULTIPLE_BEFORE
        multiple = older if version < until else _MXFP4_WIDTH_MULTIPLE
        width = math.ceil(width / multiple) * multiple
    return 3 * hidden * width * weight_bytes(quantization, "experts")


def moe_bytes(card: Card, layout: Layout, version: tuple[int, ...] = RECENT) -> float:
    """Mixture of experts of one layer on one rank: routed and shared experts, and the router; 0 for a dense model."""
    shape, tp = card.shape, layout.tensor_parallel
    if not shape.num_experts:
        return 0.0
    routed = expert_bytes(card, layout, version) * shape.num_experts / layout.expert_ranks
    shared = 3 * shape.hidden_size * shape.moe_intermediate_size * shape.n_shared_experts / tp
    router = shape.hidden_size * shape.num_experts * FP32_BYTES
    return routed + shared * weight_bytes(card.quantization, "shared_experts") + router


def kv_heads_per_rank(card: Card, layout: Layout) -> int:
    """Key-value heads on one rank: never less than one."""
    return max(1, card.shape.num_key_value_heads // layout.tensor_parallel)


def kv_bytes_per_token(card: Card, layout: Layout, kv_cache_dtype: str, *, speculative: bool = False) -> int:
    """Bytes that one more token takes in one rank's KV cache.

    Grouped-query attention: 2 (key and value) x layers x heads on the rank x head_dim x element size. M2.5 in BF16:
    253,952 at TP1, 63,488 at TP4, 31,744 at TP8. Latent attention: one compressed row per layer, the same on every
    rank; Kimi-K2.5 takes 70,272 in BF16 and 35,136 in FP8. Sparse attention adds the indexer's keys: GLM-5 takes
    100,152 in BF16 and 61,464 in FP8. Layers with a sliding window stop growing; `hybrid_tokens` counts
    them.
    """
    shape = card.shape
    growing = shape.num_hidden_layers - shape.num_sliding_layers
    drafts = shape.num_nextn_predict_layers if speculative else 0
    layers = math.ceil(growing / layout.pipeline_parallel) + drafts
    indexers = math.ceil(shape.num_indexer_layers / layout.pipeline_parallel) + (drafts if shape.index_n_heads else 0)
    index = shape.index_head_dim + FP32_BYTES * math.ceil(shape.index_head_dim / _INDEX_SCALE_GROUP)
    return layers * _layer_token_bytes(card, layout, kv_cache_dtype) + indexers * index


def _layer_token_bytes(card: Card, layout: Layout, kv_cache_dtype: str) -> int:
    """One token in one layer's cache on one rank."""
    quantized = kv_cache_dtype.startswith("fp8")
    element = 1 if quantized else BF16_BYTES
    if card.attention == "dsa" and quantized:
        return _FP8_DS_MLA_BYTES
    if card.attention != "gqa":
        return (card.shape.kv_lora_rank + card.shape.qk_rope_head_dim) * element
    return 2 * kv_heads_per_rank(card, layout) * card.shape.head_dim * element


def gpu_block_tokens(card: Card) -> int:
    """Tokens of one block of the KV cache on a GPU."""
    return SPARSE_BLOCK_TOKENS if card.attention == "dsa" else GPU_BLOCK_TOKENS


def overhead_gib(card: Card, layout: Layout, step: Step, *, margin: bool = True) -> float:
    """What the engine takes beside weights and KV cache on one GPU.

    The largest step and the sampler's warm-up do not overlap: the larger counts.

    Args:
        card: The model.
        layout: How it is split.
        step: The engine's limits.
        margin: Add what reports scatter by, so that a plan errs on the safe side; without it the estimate is unbiased.
    """
    # Every rank samples from the whole vocabulary.
    logits = step.max_num_seqs * card.shape.vocab_size * FP32_BYTES / GIB
    sorts = _SAMPLER_SORTS[0] <= step.version < _SAMPLER_SORTS[1]
    sampler = (_SORTING_SAMPLER_COPIES if sorts else _SAMPLER_COPIES) * logits
    persistent = _PERSISTENT_GIB if step.version >= _PERSISTENT_GREW else _PERSISTENT_BEFORE_GIB
    total = persistent + max(_step_gib(card, layout, step), sampler)
    second_runner = step.version >= _MODEL_RUNNER_V2
    if second_runner:
        total += logits * (1 + 1 / 32)  # how often each sequence has produced each token, and a bit for its prompt
    if step.cuda_graphs and step.version >= _CUDA_GRAPHS_COUNTED:
        layers = math.ceil(card.shape.num_hidden_layers / layout.pipeline_parallel)
        total += _GRAPH_LAYER_GIB * layers * _graph_sizes(step.max_num_seqs)
        total += _GRAPH_POOL_V2_GIB + _GRAPH_LOGITS_COPIES * logits if second_runner else _GRAPH_POOL_V1_GIB
    if layout.ranks > 1:
        total += _COLLECTIVES_PER_RANK_GIB * layout.ranks
    if margin:
        total += MARGIN_GIB + (_MULTI_RANK_MARGIN_GIB if layout.ranks > 1 else 0)
    return total


def _step_gib(card: Card, layout: Layout, step: Step) -> float:
    """Activation peak of the largest step.

    Per token: two MoE workspaces of top-k rows, each as wide as the larger of the hidden size and the two joined expert
    halves (`TritonExperts.workspace_shapes`), five rows of the hidden size, and attention's own. At 16,384 tokens this
    gives 2.06 GiB for an M2.5 TP4 rank where the log says 2.08.
    """
    shape, tp, tokens = card.shape, layout.tensor_parallel, step.max_num_batched_tokens
    row = 5 * shape.hidden_size + _attention_row(card, layout)
    workspace = 0.0
    if shape.num_experts:
        width = shape.moe_intermediate_size if layout.expert_parallel else shape.moe_intermediate_size // tp
        # Data-parallel ranks gather each other's tokens before the experts.
        rows = 2 * shape.num_experts_per_tok * layout.data_parallel
        workspace = tokens * rows * max(2 * width, shape.hidden_size) * BF16_BYTES / GIB
    else:
        row = max(row, 3 * shape.intermediate_size // tp)
    extra = 0.0
    if card.attention == "dsa":
        compressed = shape.kv_lora_rank + shape.qk_rope_head_dim
        # Sparse attention and the experts take turns in one workspace.
        workspace = max(workspace, _SPARSE_WORKSPACE_FACTOR * step.max_model_len * compressed * BF16_BYTES / GIB)
        extra = _SPARSE_LOGITS_GIB
    elif card.attention == "mla":
        rows = min(_MLA_PREFILL_ROWS, 8 * step.max_model_len)
        heads = shape.num_attention_heads // tp * (shape.qk_nope_head_dim + shape.v_head_dim)
        extra = rows * (heads + shape.kv_lora_rank + shape.qk_rope_head_dim) * BF16_BYTES / GIB
    return tokens * row * BF16_BYTES / GIB + workspace + extra


def _attention_row(card: Card, layout: Layout) -> int:
    """Values per token that attention holds at once on one rank: queries, keys, values, output."""
    shape = card.shape
    heads = shape.num_attention_heads // layout.tensor_parallel
    if card.attention == "gqa":
        return (2 * heads + 2 * kv_heads_per_rank(card, layout)) * shape.head_dim
    query, compressed = shape.qk_nope_head_dim + shape.qk_rope_head_dim, shape.kv_lora_rank + shape.qk_rope_head_dim
    row = shape.q_lora_rank + compressed + heads * (query + shape.v_head_dim)
    if card.attention == "mla":
        return row + heads * (query + shape.qk_nope_head_dim + shape.v_head_dim)
    # Sparse attention stays compressed in prefill too; the indexer's queries and its picks (32 bits each) come on top.
    picks = 2 * shape.index_topk
    return row + heads * (compressed + shape.kv_lora_rank) + shape.index_n_heads * shape.index_head_dim + picks


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
    card: Card,
    layout: Layout,
    *,
    budget_gib: float,
    overhead: float,
    kv_cache_dtype: str | None = None,
    speculative: bool = False,
    max_num_batched_tokens: int = 0,
    block_tokens: int | None = None,
) -> Footprint:
    """Divide a rank's budget into weights, overhead and KV cache.

    Tokens are whole blocks, as the engine allocates them. Decode context parallel ranks each hold a part of every
    sequence, which multiplies the tokens. Layers with a sliding window take a fixed number of blocks per request, so
    the tokens of such a model are counted as the engine does: full-length requests times their length.

    Args:
        card: The model.
        layout: How it is split.
        budget_gib: What the engine may take.
        overhead: What `overhead_gib` says.
        kv_cache_dtype: The cache's element type, as the engine is told; the card's where not given.
        speculative: Whether multi-token-prediction layers are loaded.
        max_num_batched_tokens: What a sliding window must hold beside itself while a step runs.
        block_tokens: Where it is not the GPU's.
    """
    weights = weights_gib(card, layout, speculative=speculative)
    kv_gib = budget_gib - weights - overhead
    per_token = kv_bytes_per_token(card, layout, kv_cache_dtype or card.engine.kv_cache_dtype, speculative=speculative)
    size = block_tokens or gpu_block_tokens(card)
    blocks = max(0, math.floor(kv_gib * GIB / (per_token * size)))
    tokens = blocks * size * layout.decode_context_parallel
    if card.shape.num_sliding_layers:
        tokens = hybrid_tokens(card, blocks, size, max_num_batched_tokens)
    return Footprint(
        budget_gib=budget_gib,
        weights_gib=weights,
        overhead_gib=overhead,
        kv_cache_gib=kv_gib,
        kv_bytes_per_token=per_token,
        kv_cache_tokens=tokens,
    )


def hybrid_tokens(card: Card, blocks: int, size: int, max_num_batched_tokens: int) -> int:
    """Tokens of a cache whose blocks are shared by full layers and groups of sliding ones.

    A block is `size` tokens of as many layers as attend in full; each group of sliding layers takes the window and one
    step's tokens per request (vllm/v1/kv_cache_interface.py, SlidingWindowSpec). A public gpt-oss-120b start with
    330,018 blocks reported 284.25 requests of 16,384 tokens; so does this.
    """
    shape = card.shape
    longest = shape.max_position_embeddings
    groups = shape.num_sliding_layers // (shape.num_hidden_layers - shape.num_sliding_layers)
    window = min(shape.sliding_window - 1 + max_num_batched_tokens, longest)
    fixed = groups * (math.ceil(window / size) + 1)
    full_request = math.ceil(longest / size) + fixed
    if blocks < full_request:
        return max(0, blocks - fixed) * size
    return math.floor(blocks / full_request * longest)
