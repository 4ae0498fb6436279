"""What engines compute on, and the memory that gives them: GPUs, or for the lab the CPUs beside simulated GPUs."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_fleet import memory, speed
from vllm_fleet.catalog import Card, Speculative
from vllm_fleet.layout import Layout, enumerate_layouts
from vllm_fleet.memory import Footprint, Step
from vllm_fleet.options import Options, parse_version
from vllm_fleet.placement import Group, Pin, farthest_link, pin
from vllm_fleet.target.gpu_topology import format_ranges, parse_ranges
from vllm_fleet.topology import Gpu, Topology

OLDEST_COMPUTE_CAPABILITY = (7, 5)
# What a model asks of a GPU (vllm/platforms/cuda.py, and the backends that it names): BF16 and the weight-only kernels
# of every quantization, a KV cache in FP8, and kernels of sparse attention.
BF16_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)
SPARSE_ATTENTION_GENERATIONS = (9, 10, 12)
BLACKWELL_WORKSTATION = 12  # compute capability 12.x: RTX PRO 6000, RTX 50
# Host memory a GPU rank needs beside the page cache of the weights: pinned buffers, Python, CUDA's host side.
HOST_GIB_PER_RANK = 8.0


class Accelerator(Protocol):
    """What the planner asks of either."""

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of one step."""

    @property
    def compile_seconds(self) -> int:
        """A start less the reading of weights.

        On an H200 56 s with every cache kept, 126 without, 308 with DeepGEMM's kernels to build; 23 to 29 s on one CPU.
        """

    def kind(self, gpu: Gpu) -> tuple[Any, ...]:
        """What the GPUs of one replica must have in common."""

    def unusable(self, gpu: Gpu) -> str | None:
        """Why this GPU cannot be used, as the end of a sentence."""

    def layouts(self, most_ranks: int) -> Iterable[Layout]:
        """The splits worth asking about."""

    def footprint(self, layout: Layout, member: int, max_num_seqs: int) -> Footprint:
        """Memory of a rank on the GPU at this position."""

    def supply(self, layout: Layout, member: int) -> str:
        """What there is to put a rank in, as the end of a sentence."""

    def fraction(self, layout: Layout, member: int) -> float | None:
        """`gpu_memory_utilization`, where the engine goes by it."""

    def kv_cache_dtype(self, member: int) -> str:
        """Element type of the KV cache on this GPU."""

    def speculative(self, layout: Layout) -> Speculative | None:
        """How the model drafts its next tokens in this layout, if it does."""

    def estimate(self, layout: Layout, group: Group, requests: int) -> dict[str, Any] | None:
        """Tokens per second of a replica, where the GPU's rates are known."""

    def pin(self, group: Group, fit: Footprint) -> Pin:
        """CPUs and memory policy of a group."""


@dataclass(frozen=True)
class Cuda:
    """NVIDIA GPUs."""

    host: Topology
    card: Card
    options: Options
    max_num_batched_tokens: int = 8192
    compile_seconds: int = 120

    def kind(self, gpu: Gpu) -> tuple[Any, ...]:
        """The same model with the same memory; a GPU whose memory cannot be read any more stays with its siblings."""
        if gpu.memory_total_mib is None:
            siblings = (g for g in self.host.gpus if g.pci_device == gpu.pci_device and g.memory_total_mib is not None)
            return next(siblings, gpu).kind
        return gpu.kind

    def unusable(self, gpu: Gpu) -> str | None:
        """MIG, errors, unknown or shared memory, too old for CUDA or for this model."""
        reason = None
        if gpu.mig_enabled:
            reason = (
                f"it is in MIG mode with {gpu.mig_instances} instance(s), and replicas take whole GPUs; stop what uses "
                f"it and run `nvidia-smi -i {gpu.index} -mig 0`, or name it in exclude_gpus"
            )
        elif gpu.errors:
            reason = "; ".join(gpu.errors).rstrip(".")
        elif gpu.unified_memory:
            reason = "it shares its memory with the host, and this planner divides dedicated memory only"
        elif gpu.memory_total_mib is None:
            reason = "its memory size is unknown, so it cannot be divided; the probe's problems say why"
        elif gpu.generation is not None and gpu.generation < OLDEST_COMPUTE_CAPABILITY:
            reason = f"its compute capability {gpu.compute_capability} is older than 7.5, which CUDA 13 needs"
        elif gpu.generation is not None:
            reason = self._unsupported(gpu.generation)
        return reason

    def _unsupported(self, generation: tuple[int, int]) -> str | None:
        """Why this model has no kernels on GPUs of this generation, as the end of a sentence."""
        has = f"has compute capability {generation[0]}.{generation[1]}"
        if generation < BF16_CAPABILITY:
            return f"it {has}, and {self.card.id} computes in BF16, which needs 8.0"
        if generation < FP8_CAPABILITY and self.card.engine.kv_cache_dtype.startswith("fp8"):
            return f"it {has}, and the card's FP8 KV cache needs 8.9"
        if self.card.attention == "dsa" and generation[0] not in SPARSE_ATTENTION_GENERATIONS:
            return f"it {has}, and vLLM has sparse attention for 9.x, 10.x and 12.x only"
        return None

    def layouts(self, most_ranks: int) -> Iterable[Layout]:
        """Every split of the model over so many GPUs."""
        return enumerate_layouts(self.card, most_ranks)

    def footprint(self, layout: Layout, member: int, max_num_seqs: int) -> Footprint:
        """A share of the GPU's memory by `gpu_memory_utilization`."""
        step = Step(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=self.card.shape.max_position_embeddings,
            version=parse_version(self.options.vllm_version),
        )
        return memory.footprint(
            self.card,
            layout,
            budget_gib=self._total_gib(member) * self.fraction(layout, member),
            overhead=memory.overhead_gib(self.card, layout, step),
            kv_cache_dtype=self.kv_cache_dtype(member),
            speculative=self.speculative(layout) is not None,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def kv_cache_dtype(self, member: int) -> str:
        """The card's; sparse attention on 12.x knows FP8 only (FLASHINFER_MLA_SPARSE_SM120)."""
        wanted, generation = self.card.engine.kv_cache_dtype, self.host.gpus[member].generation
        workstation = generation is not None and generation[0] == BLACKWELL_WORKSTATION
        return "fp8" if wanted == "auto" and self.card.attention == "dsa" and workstation else wanted

    def speculative(self, layout: Layout) -> Speculative | None:
        """For latency, where the checkpoint has the weights, and neither stages nor a spread cache are in the way."""
        wanted = self.options.objective == "latency" and layout.decode_context_parallel == layout.pipeline_parallel == 1
        return self.card.speculative if wanted else None

    def supply(self, layout: Layout, member: int) -> str:
        """The fraction and what it is of."""
        total, fraction = self._total_gib(member), self.fraction(layout, member)
        return f"per GPU, and the engine gets {fraction:.2f} x {total:.1f} = {fraction * total:.1f}"

    def fraction(self, layout: Layout, member: int) -> float:
        """`gpu_memory_utilization`, of what CUDA sees as the GPU's total."""
        return memory.memory_fraction(self._total_gib(member), layout, self.card.engine.max_gpu_memory_utilization)

    def estimate(self, layout: Layout, group: Group, requests: int) -> dict[str, Any] | None:
        """A roofline over the group's slowest link."""
        rates = self.host.gpus[group.members[0]].rates
        if rates is None:
            return None
        place = speed.place_of(rates, farthest_link(self.host, group.members))
        return speed.estimate(self.card, layout, place, requests, self.kv_cache_dtype(group.members[0]))

    def pin(self, group: Group, fit: Footprint) -> Pin:  # noqa: ARG002  host memory does not follow from the GPU's
        """The group's NUMA node, with room for the page cache of the whole checkpoint."""
        return pin(self.host, group.members, self.card.checkpoint_gib + HOST_GIB_PER_RANK * len(group.members))

    def _total_gib(self, member: int) -> float:
        gpu = self.host.gpus[member]
        return memory.cuda_total_gib(gpu.memory_total_mib or 0, gpu.memory_reserved_mib)


@dataclass(frozen=True)
class Cpu:
    """The CPU build of the engine: one replica per simulated GPU, in the memory and on the CPUs of its NUMA node."""

    host: Topology
    card: Card
    options: Options
    max_num_batched_tokens: int = 2048
    compile_seconds: int = 45

    def kind(self, gpu: Gpu) -> tuple[Any, ...]:  # noqa: ARG002  they only stand for GPUs
        """All alike."""
        return ("simulated",)

    def unusable(self, gpu: Gpu) -> str | None:  # noqa: ARG002
        """None is."""
        return None

    def layouts(self, most_ranks: int) -> Iterable[Layout]:  # noqa: ARG002
        """One rank."""
        return [Layout()]

    def footprint(self, layout: Layout, member: int, max_num_seqs: int) -> Footprint:
        """Weights, the engine's processes, and whole GiB of KV cache, enough for the expected requests."""
        requests = min(max_num_seqs, self.options.expected_concurrency)
        per_token = memory.kv_bytes_per_token(self.card, layout, self.card.engine.kv_cache_dtype)
        wanted = requests * self.card.shape.max_position_embeddings * per_token / memory.GIB
        kv_gib = max(1, math.ceil(wanted))
        fixed = memory.weights_gib(self.card, layout) + memory.CPU_PROCESS_GIB
        share = self.host_share_gib(member)
        if share is not None:
            kv_gib = min(kv_gib, math.floor(share - fixed))
        return memory.footprint(
            self.card,
            layout,
            budget_gib=fixed + kv_gib,
            overhead=memory.CPU_PROCESS_GIB,
            block_tokens=memory.CPU_BLOCK_TOKENS,
        )

    def supply(self, layout: Layout, member: int) -> str:  # noqa: ARG002
        """The node's memory."""
        return f"of host memory, and its share of the NUMA node is {self.host_share_gib(member) or 0:.1f}"

    def fraction(self, layout: Layout, member: int) -> None:  # noqa: ARG002
        """The KV cache's size is given in GiB instead."""
        return

    def kv_cache_dtype(self, member: int) -> str:  # noqa: ARG002
        """The card's."""
        return self.card.engine.kv_cache_dtype

    def speculative(self, layout: Layout) -> Speculative | None:  # noqa: ARG002
        """Never."""
        return None

    def estimate(self, layout: Layout, group: Group, requests: int) -> None:  # noqa: ARG002
        """Nothing is known of a CPU's speed."""
        return

    def pin(self, group: Group, fit: Footprint) -> Pin:
        """The node's CPUs, divided among its replicas: engines that compute on CPUs must not share them."""
        place = pin(self.host, group.members, fit.budget_gib)
        neighbours = self._neighbours(group.members[0])
        cpus = parse_ranges(place.cpus or "") or []
        if len(neighbours) == 1 or len(cpus) < len(neighbours):
            return place
        own = format_ranges(cpus[neighbours.index(group.members[0]) :: len(neighbours)])
        return Pin(place.numa_nodes, own, place.memory_policy, f"{place.reason}; of these it gets {own}")

    def host_share_gib(self, member: int) -> float | None:
        """Host memory for one simulated GPU: its node's, divided by the GPUs on it; None when unknown."""
        numa_node = self.host.gpus[member].numa_node
        node = None if numa_node is None else self.host.numa_nodes.get(numa_node)
        if node is None or node.memory_total_mib is None:
            return None
        return node.memory_total_mib / 1024 / len(self._neighbours(member))

    def _neighbours(self, member: int) -> list[int]:
        """Positions of the GPUs on this one's NUMA node, itself included."""
        node = self.host.gpus[member].numa_node
        return [
            i for i, gpu in enumerate(self.host.gpus) if i == member or (node is not None and gpu.numa_node == node)
        ]
