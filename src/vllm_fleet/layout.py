"""How a model can be split over GPUs, and the rules of arithmetic that a split must obey.

These rules need the card and the engine version only. What a host adds (memory, NUMA nodes, links) is in memory.py and
placement.py; plan.py asks all three and chooses.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from vllm_fleet.catalog import Card

# From this version vLLM refines 128x128 scale blocks to 64x64 when a shard is not a multiple of 128 (its log says
# "FP8 MoE block scales refined"); read in its source, seen running with one other model, not measured for these.
SCALE_REFINEMENT = (0, 29)
REFINED_BLOCK = 64


@dataclass(frozen=True, order=True)
class Layout:
    """How one replica is split over its ranks; one rank is one GPU."""

    tensor_parallel: int = 1
    expert_parallel: bool = False
    pipeline_parallel: int = 1
    data_parallel: int = 1
    decode_context_parallel: int = 1

    @property
    def ranks(self) -> int:
        """GPUs of one replica."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def expert_ranks(self) -> int:
        """Ranks that whole experts are spread over; 1 when every rank holds a slice of every expert."""
        return self.tensor_parallel * self.data_parallel if self.expert_parallel else 1

    def to_dict(self, replicas: int | None = None) -> dict[str, Any]:
        """The layout as in a plan."""
        return asdict(self) | ({} if replicas is None else {"replicas": replicas})

    def __str__(self) -> str:
        """The field's shorthand: TP4, TP8+EP, DP8+EP, TP4xDP2+EP, TP4xPP2, TP8+DCP8."""
        widths = {"TP": self.tensor_parallel, "DP": self.data_parallel, "PP": self.pipeline_parallel}
        parts = [f"{name}{width}" for name, width in widths.items() if width > 1]
        context = f"+DCP{self.decode_context_parallel}" if self.decode_context_parallel > 1 else ""
        return "x".join(parts or ["TP1"]) + ("+EP" if self.expert_parallel else "") + context


@dataclass(frozen=True)
class Rejection:
    """A layout that was not taken, the rule's name, and one sentence with the numbers."""

    layout: Layout
    rule: str
    reason: str


def enumerate_layouts(card: Card, max_ranks: int) -> Iterator[Layout]:
    """Yield every split worth asking about, narrow first: 1, 2, 4, 8 ... ranks, and all of an odd number of GPUs."""
    widths = [w for w in (2**i for i in range(max_ranks.bit_length())) if w <= max_ranks]
    if max_ranks and max_ranks not in widths:
        widths.append(max_ranks)
    for ranks in widths:
        parts = [n for n in range(2, ranks + 1) if ranks % n == 0]
        experts = ranks > 1 and card.shape.num_experts > 0
        for expert_parallel in (False, True)[: 1 + experts]:
            for context in (1, *_context_parallel_sizes(card, ranks)):
                yield Layout(ranks, expert_parallel, decode_context_parallel=context)
        if experts:
            yield from (Layout(ranks // n, expert_parallel=True, data_parallel=n) for n in parts)
        yield from (Layout(ranks // stages, pipeline_parallel=stages) for stages in parts)


def _context_parallel_sizes(card: Card, tensor_parallel: int) -> list[int]:
    """How many ways the tokens of the KV cache can be spread over ranks that would otherwise hold the same heads.

    Latent attention has one row for all heads, so all ranks repeat it; grouped-query attention repeats a head once
    there are more ranks than heads (vllm/config/model.py checks the same).
    """
    shape = card.shape
    copies = max(1, tensor_parallel // shape.num_key_value_heads)
    group = shape.num_attention_heads // shape.num_key_value_heads
    return [
        size
        for size in range(2, copies + 1)
        if copies % size == 0 and (card.attention != "gqa" or group % size == 0) and not shape.num_sliding_layers
    ]


def reject_by_shape(card: Card, layout: Layout) -> Rejection | None:
    """Reject a split that the model's shapes forbid in every engine version."""
    shape, tp = card.shape, layout.tensor_parallel
    if shape.num_attention_heads % tp:
        return Rejection(
            layout,
            "heads_divisibility",
            f"{shape.num_attention_heads} attention heads cannot be split over {tp} ranks.",
        )
    if shape.num_key_value_heads % tp and tp % shape.num_key_value_heads:
        return Rejection(
            layout,
            "kv_heads_divisibility",
            f"{shape.num_key_value_heads} key-value heads over {tp} ranks: neither number divides the other.",
        )
    if layout.pipeline_parallel > shape.num_hidden_layers:
        return Rejection(
            layout,
            "layers_divisibility",
            f"{shape.num_hidden_layers} layers cannot be cut into {layout.pipeline_parallel} stages.",
        )
    if layout.expert_parallel and shape.num_experts % layout.expert_ranks:
        return Rejection(
            layout,
            "experts_divisibility",
            f"{shape.num_experts} experts cannot be spread whole over {layout.expert_ranks} ranks.",
        )
    for width in _sharded_widths(card, layout):
        if width % tp:
            return Rejection(
                layout, "width_divisibility", f"A feed-forward width of {width} cannot be split over {tp} ranks."
            )
    return None


def reject_by_blocks(card: Card, layout: Layout, vllm_version: tuple[int, ...]) -> Rejection | None:
    """Reject a split that cuts through the scale blocks of quantized weights, where the engine cannot refine them."""
    rejection = _block_conflict(card, layout)
    if rejection is None or _refined(card, layout, vllm_version):
        return None
    return rejection


def unproven_reason(card: Card, layout: Layout, vllm_version: tuple[int, ...]) -> Rejection | None:
    """Say why a split that the engine accepts is still ranked last: nobody has shown it running."""
    rejection = _block_conflict(card, layout)
    if rejection is None or not _refined(card, layout, vllm_version):
        return None
    return Rejection(
        layout,
        rejection.rule,
        f"{rejection.reason} vLLM 0.29 and later refine the scales to {REFINED_BLOCK}x{REFINED_BLOCK} and start, but "
        "no measurement of this model split so is known: taken only where nothing proven fits.",
    )


def _sharded_widths(card: Card, layout: Layout) -> list[int]:
    """Feed-forward widths that tensor parallelism cuts; experts stay whole under expert parallelism."""
    shape = card.shape
    widths = []
    if shape.num_experts and not layout.expert_parallel:
        widths.append(shape.moe_intermediate_size)
    if shape.n_shared_experts:
        widths.append(shape.moe_intermediate_size * shape.n_shared_experts)
    if shape.num_moe_layers < shape.num_hidden_layers:
        widths.append(shape.intermediate_size)
    return widths


def _block_conflict(card: Card, layout: Layout) -> Rejection | None:
    block, tp = card.quantization.block, layout.tensor_parallel
    if block is None or card.quantization.method == "mxfp4":  # its kernels pad every shard to whole groups
        return None
    if card.quantization.method == "fp8_block":
        rule, what = "fp8_block_divisibility", f"the {block}-wide FP8 block"
    else:
        rule, what = "group_divisibility", f"the {card.quantization.method.upper()} group of {block}"
    for width in _sharded_widths(card, layout):
        if (width // tp) % block:
            needs = "needs expert parallel" if card.shape.num_experts else "needs fewer ranks"
            return Rejection(layout, rule, f"{width} / {tp} = {width // tp} is not a multiple of {what}; {needs}.")
    return None


def _refined(card: Card, layout: Layout, vllm_version: tuple[int, ...]) -> bool:
    return (
        card.quantization.method == "fp8_block"
        and vllm_version >= SCALE_REFINEMENT
        and all((w // layout.tensor_parallel) % REFINED_BLOCK == 0 for w in _sharded_widths(card, layout))
    )
