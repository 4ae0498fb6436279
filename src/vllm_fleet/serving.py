"""The command line and environment of one replica: each flag with the reason it is there.

`args` is what follows `vllm serve PATH`; the service role knows the path. Secrets are never here.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from vllm_fleet.accelerator import BLACKWELL_WORKSTATION
from vllm_fleet.catalog import Card, Speculative
from vllm_fleet.layout import Layout
from vllm_fleet.options import Options, parse_version
from vllm_fleet.placement import farthest_link
from vllm_fleet.speed import CUSTOM_ALL_REDUCE_PCIE_RANKS
from vllm_fleet.topology import Topology

INTERNAL_PORT_FIRST = 21000
INTERNAL_PORT_STRIDE = 1000  # an engine steps up from its own base; wide steps keep neighbours apart
SHUTDOWN_TIMEOUT_SECONDS = 120  # how long running requests may finish after SIGTERM; the unit's stop must allow more

# https://github.com/gardenlinux/gardenlinux/issues/4556 and https://joorklee.github.io/p2p-bench/
HOST_MEMORY_PRICE = (
    "The price: every all-reduce crosses PCIe twice and takes bandwidth of the host's memory, which the estimated "
    "speed does not count. Known reports: 19 GB/s of bus bandwidth on RTX PRO 6000 cards, and 8 to 14 % fewer tokens "
    "on two RTX 5060 Ti."
)
# An engine starts from verified files and asks nobody for more, whatever a card says.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
NUMA_BIND_VERSION = (0, 32, 0)  # the first whose --numa-bind was read; it runs numactl, a package of vllm_runtime
HOPPER = 9
OPEN_REPORTS_ON_WORKSTATIONS = {
    "mla": "An open report has latent attention with an FP8 cache run out of resources (vLLM issue 46721).",
    "dsa": "Sparse attention needs a FlashInfer that not every release brings (vLLM issue 47527).",
}
# First compute capability with arithmetic in a format; older GPUs only store their weights in it.
NATIVE_CAPABILITY = {"fp8_block": (8, 9), "fp8_channel": (8, 9), "nvfp4": (10, 0)}


@dataclass
class Serving:
    """Flags and environment as they are collected, with a sentence for each that is not plain."""

    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    """The numbers of one replica that its command line carries."""

    port: int
    internal_port: int
    served_name: str
    gpu_memory_utilization: float | None
    kv_cache_gib: int | None
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_dtype: str
    speculative: Speculative | None
    ready_timeout_seconds: int
    cpus: str | None


def serving(
    topology: Topology, card: Card, options: Options, *, layout: Layout, members: Sequence[int], settings: Settings
) -> Serving:
    """Build the arguments and environment of one replica."""
    result = Serving(args=_arguments(card, options, layout, settings))
    result.env |= {
        "VLLM_PORT": str(settings.internal_port),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(settings.ready_timeout_seconds),
        "VLLM_NO_USAGE_STATS": "1",
    }
    gpus = ",".join(topology.gpus[m].identity for m in members)
    if options.accelerator == "cpu":
        _cpu(result, settings, gpus)
    else:
        result.env |= {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": gpus,
            # What the engine would choose by itself for serving; said, so that a shell's value cannot change it.
            "OMP_NUM_THREADS": "1",
        }
        _kernels(result, topology, card, members)
        _attention(result, topology, card, layout=layout, members=members, settings=settings)
        _collectives(result, topology, options, members)
        _binding(result, topology, members, options)
    result.args += card.engine.args
    result.env |= {**card.engine.env, **OFFLINE}
    return result


def _arguments(card: Card, options: Options, layout: Layout, settings: Settings) -> list[str]:
    """Flags that follow from the plan's numbers and from the card; a flag whose value is None is left out."""
    engine = card.engine
    valued = {
        "--served-model-name": settings.served_name,
        "--host": options.bind_address,
        "--port": settings.port,
        "--tensor-parallel-size": layout.tensor_parallel,
        "--pipeline-parallel-size": layout.pipeline_parallel if layout.pipeline_parallel > 1 else None,
        "--data-parallel-size": layout.data_parallel if layout.data_parallel > 1 else None,
        "--decode-context-parallel-size": (
            layout.decode_context_parallel if layout.decode_context_parallel > 1 else None
        ),
        "--gpu-memory-utilization": settings.gpu_memory_utilization,
        "--max-model-len": settings.max_model_len,
        "--max-num-seqs": settings.max_num_seqs,
        "--max-num-batched-tokens": settings.max_num_batched_tokens,
        "--kv-cache-dtype": None if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype,
        "--speculative-config": settings.speculative and json.dumps(asdict(settings.speculative)),
        "--tool-call-parser": engine.tool_parser,
        "--reasoning-parser": engine.reasoning_parser,
        "--chat-template": engine.chat_template,
        "--shutdown-timeout": SHUTDOWN_TIMEOUT_SECONDS,
    }
    switches = {
        "--enable-expert-parallel": layout.expert_parallel,
        "--enable-auto-tool-choice": engine.tool_parser is not None,
        "--trust-remote-code": bool(engine.remote_code),
        # The gateway logs who asked for what; here it would be a line for each look of the health agent.
        "--disable-uvicorn-access-log": True,
    }
    pairs = [item for flag, value in valued.items() if value is not None for item in (flag, str(value))]
    return pairs + [flag for flag, on in switches.items() if on]


def _cpu(result: Serving, settings: Settings, uuids: str) -> None:
    result.env |= {
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        # The simulated GPU: the lab's nvidia-smi reads it to show this unit's memory as used.
        "FLEET_GPUS": uuids,
    }
    if settings.cpus:
        result.env["VLLM_CPU_OMP_THREADS_BIND"] = settings.cpus


def _kernels(result: Serving, topology: Topology, card: Card, members: Sequence[int]) -> None:
    """Kernels of block-FP8 models with experts, by GPU generation.

    12.x: DeepGEMM is chosen by itself and fails at start (https://github.com/vllm-project/vllm/issues/47130); no run
    without these two is known. Hopper: DeepGEMM's experts halved an M2's throughput, 288 against 567 tokens/s
    (https://github.com/vllm-project/recipes/pull/112); for the other matrices it wins (docs/measurements.md).
    """
    generation = topology.gpus[members[0]].generation
    native = NATIVE_CAPABILITY.get(card.quantization.method)
    if generation is not None and native is not None and generation < native:
        result.warnings.append(
            f"Compute capability {generation[0]}.{generation[1]} has no units for {card.quantization.method}: the "
            "engine unpacks the weights to BF16 on the fly, which saves memory and costs speed."
        )
    if card.quantization.method != "fp8_block" or not card.shape.num_experts:
        return
    if generation is None or generation[0] not in (BLACKWELL_WORKSTATION, HOPPER):
        return
    result.args += ["--moe-backend", "triton"]
    if generation[0] == HOPPER:
        result.reasons.append(
            "Experts run on Triton, since DeepGEMM's halved MiniMax-M2 on H100, 288 against 567 tokens/s. The other "
            "matrices are left to DeepGEMM: on an H200 that took 0.2 to 0.9 ms off each decode step, 4 % for one "
            "request, and its first start builds kernels for three minutes more."
        )
        return
    result.env["VLLM_USE_DEEP_GEMM"] = "0"
    result.reasons.append(
        "Experts run on Triton with DeepGEMM off: on compute capability 12 DeepGEMM fails at start (vLLM issue 47130)."
    )


def _attention(
    result: Serving, topology: Topology, card: Card, *, layout: Layout, members: Sequence[int], settings: Settings
) -> None:
    """What latent and sparse attention, context parallelism and drafting change, with their evidence."""
    generation = topology.gpus[members[0]].generation
    workstation = generation is not None and generation[0] == BLACKWELL_WORKSTATION
    if settings.kv_cache_dtype != card.engine.kv_cache_dtype:
        result.reasons.append(
            "The KV cache is in FP8: on compute capability 12 vLLM's sparse attention knows no other type."
        )
    if workstation and card.attention != "gqa":
        result.warnings.append(
            "Every public number of this model's attention on compute capability 12 comes from forks of vLLM: run the "
            f"checks before you rely on it. {OPEN_REPORTS_ON_WORKSTATIONS[card.attention]}"
        )
    if layout.data_parallel > 1 and card.attention != "gqa":
        result.reasons.append(
            f"Attention runs data parallel in {layout.data_parallel} groups: tensor parallel ranks would all keep the "
            "same compressed cache, while each group keeps its own requests."
        )
        result.warnings.append(
            f"{layout} is the roofline's choice at this concurrency; no measurement of this model split so is known. "
            "Measure it against the plain split before you rely on the difference."
        )
    if layout.decode_context_parallel > 1:
        result.reasons.append(
            f"Decode context parallel {layout.decode_context_parallel}: each rank keeps that share of the tokens "
            "instead of the same cache, for one more exchange per layer. Kimi-K2.6 on eight RTX PRO 6000 decoded a "
            "single request at 72.7 tokens/s so, and at 86.9 without."
        )
    if settings.speculative:
        result.reasons.append(
            f"The model drafts {settings.speculative.num_speculative_tokens} token(s) per step with its own layer: "
            "GLM-5.1 on eight RTX PRO 6000 went from 50.0 to 90.6 tokens/s for one request, and from 1,069 to 1,165 "
            "for 64."
        )


def _collectives(result: Serving, topology: Topology, options: Options, members: Sequence[int]) -> None:
    """How the ranks of a replica talk, from what a real transfer on the host showed, or from the owner's word.

    NCCL_P2P_DISABLE alone is not enough: custom all-reduce still goes peer to peer, and two ranks then hang while
    FlashInfer tunes its kernels (https://github.com/local-inference-lab/rtx6kpro/issues/15).
    """
    if len(members) == 1:
        return
    # One host: a network card must not be tried for what PCIe carries.
    result.env["NCCL_IB_DISABLE"] = "1"
    link = farthest_link(topology, members)
    verdict = {"measured": topology.p2p_verdict, "allow": "ok", "forbid": "broken"}[options.peer_to_peer]
    if options.peer_to_peer == "allow" and topology.p2p_verdict == "broken":
        result.warnings.append(
            f"peer_to_peer says allow, against what a real transfer showed here: {topology.p2p_detail or 'it failed'}. "
            "Expect a hang at the first all-reduce."
        )
    if verdict == "broken":
        result.args += ["--disable-custom-all-reduce"]
        result.env["NCCL_P2P_DISABLE"] = "1"
        result.reasons.append(f"Transfers between GPUs go through host memory. {HOST_MEMORY_PRICE}")
        if options.peer_to_peer == "measured":
            result.warnings.append(
                f"GPU peer-to-peer transfers are broken on this host: {topology.p2p_detail or 'measured'}. NCCL goes "
                "through host memory; vLLM's custom all-reduce, which would still go peer to peer and hang, is off. "
                "Turn the IOMMU to passthrough and PCIe ACS redirection off to get them back (docs/tuning.md)."
            )
    elif link != "NV":
        _pcie(result, topology, verdict, len(members), link)


def _binding(result: Serving, topology: Topology, members: Sequence[int], options: Options) -> None:
    """Who pins a replica that spans NUMA nodes: the engine, each rank to its GPU's node (by numactl).

    A unit has one place for all its processes. A replica on a single node is pinned by its unit, and never by both.
    """
    nodes = [topology.gpus[m].numa_node for m in members]
    spanned = [topology.numa_nodes.get(node) for node in set(nodes) if node is not None]
    if len(spanned) < 2 or None in nodes or not all(node and node.bindable for node in spanned):  # noqa: PLR2004  spans
        return
    if parse_version(options.vllm_version) < NUMA_BIND_VERSION:
        return
    result.args += ["--numa-bind", "--numa-bind-nodes", *map(str, nodes)]
    result.reasons.append(f"The engine itself binds each rank to its GPU's NUMA node ({', '.join(map(str, nodes))}).")


def _pcie(result: Serving, topology: Topology, verdict: str, ranks: int, link: str | None) -> None:
    """Custom all-reduce and NCCL's peer-to-peer range.

    vLLM's custom all-reduce supports two ranks over PCIe and switches itself off above; with two it can hang where the
    IOMMU or ACS redirects transfers (https://github.com/vllm-project/vllm/issues/33041).
    """
    if ranks > CUSTOM_ALL_REDUCE_PCIE_RANKS:
        result.args += ["--disable-custom-all-reduce"]
        result.reasons.append(f"vLLM's custom all-reduce is off: it does not support {ranks} ranks over PCIe.")
    elif topology.iommu == "translated" or topology.acs_redirect:
        result.args += ["--disable-custom-all-reduce"]
        result.reasons.append(
            "vLLM's custom all-reduce is off: the IOMMU or ACS redirects transfers, and it hangs then."
        )
    if verdict != "ok":
        why = f" ({topology.p2p_detail})" if topology.p2p_detail else ""
        result.warnings.append(
            f"Peer-to-peer between the GPUs has not been tested{why}, so NCCL keeps its own defaults. If the first "
            "all-reduce hangs, IOMMU translation or PCIe ACS is the usual cause."
        )
    elif link is not None:
        # NCCL's PHB means "on the same NUMA node", which covers what nvidia-smi calls PIX, PXB, PHB and NODE.
        level = "SYS" if link == "SYS" else "PHB"
        result.env["NCCL_P2P_LEVEL"] = level
        proof = "a real transfer worked" if topology.p2p_verdict == "ok" else "peer_to_peer says allow"
        result.reasons.append(f"NCCL may go peer to peer up to {level}: {proof} over {link}.")
