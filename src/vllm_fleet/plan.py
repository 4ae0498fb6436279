"""From a topology, a model card and options to a plan: what to run on this host, and why.

A pure function of hardware, card and inventory. Memory in use and running units never enter it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_fleet import explain, memory
from vllm_fleet.accelerator import Accelerator, Cpu, Cuda
from vllm_fleet.catalog import Card
from vllm_fleet.errors import BadInputError, NoFeasibleLayoutError, PlanError
from vllm_fleet.feasibility import Feasibility
from vllm_fleet.layout import Layout, Rejection
from vllm_fleet.memory import Footprint
from vllm_fleet.objective import Candidate, rank, why_not
from vllm_fleet.options import Options
from vllm_fleet.placement import Group, Pin
from vllm_fleet.serving import (
    INTERNAL_PORT_FIRST,
    INTERNAL_PORT_STRIDE,
    SHUTDOWN_TIMEOUT_SECONDS,
    Settings,
    serving,
)
from vllm_fleet.topology import Topology

__all__ = ["BadInputError", "NoFeasibleLayoutError", "Plan", "PlanError", "Replica", "make_plan"]

SCHEMA = 1
# First starts build kernels for minutes (FlashInfer, Triton), hence a limit far above the expected start.
FIRST_START_EXTRA_SECONDS = 600
# The engine's own limits must strike first: it says why, systemd only kills.
START_MARGIN_SECONDS = 60
STOP_MARGIN_SECONDS = 30


@dataclass(frozen=True)
class Replica:
    """One engine: its GPUs, its place on the host, its command line, and what it will hold."""

    name: str
    gpus: tuple[str, ...]
    gpu_indices: tuple[int, ...]
    place: Pin
    bind_address: str
    settings: Settings
    args: tuple[str, ...]
    env: Mapping[str, str]
    footprint: Footprint
    kv_cache_tokens: int
    estimate: Mapping[str, Any] | None
    start_seconds: int

    def to_dict(self) -> dict[str, Any]:
        """The replica as in a plan."""
        settings, fit = self.settings, self.footprint
        return {
            "name": self.name,
            "unit": f"vllm-{self.name}.service",
            "gpus": list(self.gpus),
            "gpu_indices": list(self.gpu_indices),
            "numa_nodes": list(self.place.numa_nodes),
            "cpus": self.place.cpus,
            "memory_policy": self.place.memory_policy,
            "bind_address": self.bind_address,
            "port": settings.port,
            "internal_port": settings.internal_port,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "kv_cache_dtype": settings.kv_cache_dtype,
            "start_deadline_seconds": settings.ready_timeout_seconds + START_MARGIN_SECONDS,
            "stop_deadline_seconds": SHUTDOWN_TIMEOUT_SECONDS + STOP_MARGIN_SECONDS,
            "args": list(self.args),
            "env": dict(self.env),
            "expected": {
                "weights_gib": round(fit.weights_gib, 2),
                "overhead_gib": round(fit.overhead_gib, 2),
                "kv_cache_gib": round(fit.kv_cache_gib, 2),
                "kv_cache_tokens": self.kv_cache_tokens,
                "full_length_requests": math.floor(100 * self.kv_cache_tokens / settings.max_model_len) / 100,
                "decode_tokens_per_second": self.estimate,
                "start_seconds": self.start_seconds,
            },
        }


@dataclass(frozen=True)
class Plan:
    """What to run on one host."""

    card: Card
    options: Options
    served_name: str
    layout: Layout
    replicas: tuple[Replica, ...]
    rejected: tuple[Rejection, ...]
    warnings: tuple[str, ...]
    explanation: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, the same for the same input."""
        return {
            "schema": SCHEMA,
            "model": {
                "id": self.card.id,
                "revision": self.card.revision,
                "card": self.card.name,
                "served_name": self.served_name,
                "remote_code": dict(self.card.engine.remote_code),
                "contract": dict(self.card.contract),
            },
            "vllm_version": self.options.vllm_version,
            "accelerator": self.options.accelerator,
            "objective": self.options.objective,
            "layout": self.layout.to_dict(len(self.replicas)),
            "replicas": [replica.to_dict() for replica in self.replicas],
            "rejected": [{"layout": r.layout.to_dict(), "rule": r.rule, "reason": r.reason} for r in self.rejected],
            "warnings": list(self.warnings),
            "explanation": list(self.explanation),
        }


def make_plan(topology: Mapping[str, Any], card: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Plan:
    """Plan one model on one host.

    Args:
        topology: The `gpu_topology` fact.
        card: A model card, as read from `models/NAME.yml`.
        options: See `Options`; what is left out or null is the planner's choice.

    Returns:
        The plan.

    Raises:
        BadInputError: Something given is wrong.
        NoFeasibleLayoutError: Nothing given is wrong, and the model does not fit; `reasons` holds every reason.
    """
    host = Topology.from_dict(topology)
    model = Card.from_dict(card)
    wanted = Options.from_dict(options or {})
    accelerator: Accelerator = Cpu(host, model, wanted) if wanted.accelerator == "cpu" else Cuda(host, model, wanted)
    feasibility = Feasibility(host, model, wanted, accelerator)

    feasibility.check_request()
    fleets, warnings = feasibility.fleets()
    candidates, rejected = feasibility.candidates(fleets)
    if not candidates:
        raise feasibility.refusal(fleets, rejected)
    question = (wanted.objective, wanted.expected_concurrency)
    chosen, *others = rank(candidates, *question)
    rejected += [why_not(other, chosen, *question) for other in others]

    builder = _Builder(host, model, wanted, accelerator, wanted.served_model_name or model.served_name)
    replicas = []
    for (group, fit), estimate in zip(chosen.groups, chosen.estimates, strict=True):
        replica, reasons, warned = builder.replica(chosen, group, fit, estimate)
        replicas.append((replica, reasons))
        warnings += [w for w in warned if w not in warnings]
    _check_ports([replica for replica, _ in replicas])
    idle = sum(len(f.usable) for f in fleets) - chosen.replicas * chosen.layout.ranks - wanted.keep_free_gpus
    warnings += builder.warnings(chosen, idle, [fleet.name for fleet in fleets])
    engine_reasons = list(dict.fromkeys(reason for _, reasons in replicas for reason in reasons))
    return Plan(
        card=model,
        options=wanted,
        served_name=builder.served_name,
        layout=chosen.layout,
        replicas=tuple(replica for replica, _ in replicas),
        rejected=tuple(rejected),
        warnings=tuple(warnings),
        explanation=tuple(
            explain.sentences(
                host, model, wanted, chosen=chosen, replicas=[r for r, _ in replicas], engine_reasons=engine_reasons
            )
        ),
    )


def _check_ports(replicas: Sequence[Replica]) -> None:
    """Refuse a first port whose replicas would listen where engines talk among themselves."""
    for listening in replicas:
        for talking in replicas:
            first = talking.settings.internal_port
            if first <= listening.settings.port < first + INTERNAL_PORT_STRIDE:
                raise BadInputError(
                    f"Plan option first_port puts {listening.name} on port {listening.settings.port}, and ports "
                    f"{first} to {first + INTERNAL_PORT_STRIDE - 1} are for what {talking.name} says within itself. "
                    f"Choose a first_port below {INTERNAL_PORT_FIRST - len(replicas)}, such as {Options.first_port}."
                )


@dataclass(frozen=True)
class _Builder:
    """Turns chosen groups of GPUs into replicas."""

    host: Topology
    card: Card
    options: Options
    accelerator: Accelerator
    served_name: str

    def replica(
        self, chosen: Candidate, group: Group, fit: Footprint, estimate: Mapping[str, Any] | None
    ) -> tuple[Replica, list[str], list[str]]:
        """One replica, the reasons behind its flags, and warnings."""
        place = self.accelerator.pin(group, fit)
        fraction = self.accelerator.fraction(chosen.layout, group.members[0])
        reading = math.ceil(self.card.checkpoint_gib * 1024 / self.host.read_mib_s)
        start_seconds = reading + self.accelerator.compile_seconds
        settings = Settings(
            port=self.options.first_port + group.slot,
            # Two models on one host differ in first_port, and so do their engines' own ports.
            internal_port=INTERNAL_PORT_FIRST
            + INTERNAL_PORT_STRIDE * group.slot
            + (self.options.first_port - Options.first_port) % INTERNAL_PORT_STRIDE,
            served_name=self.served_name,
            gpu_memory_utilization=fraction,
            kv_cache_gib=round(fit.kv_cache_gib) if fraction is None else None,
            max_model_len=chosen.max_model_len,
            max_num_seqs=chosen.max_num_seqs,
            max_num_batched_tokens=self.accelerator.max_num_batched_tokens,
            kv_cache_dtype=self.accelerator.kv_cache_dtype(group.members[0]),
            speculative=self.accelerator.speculative(chosen.layout),
            ready_timeout_seconds=start_seconds + FIRST_START_EXTRA_SECONDS,
            cpus=place.cpus,
        )
        command = serving(
            self.host, self.card, self.options, layout=chosen.layout, members=group.members, settings=settings
        )
        slug = re.sub(r"[^a-z0-9]+", "-", self.served_name.lower()).strip("-")
        replica = Replica(
            name=f"{slug}-{group.slot}",
            gpus=tuple(self.host.gpus[m].identity for m in group.members),
            gpu_indices=tuple(self.host.gpus[m].index for m in group.members),
            place=place,
            bind_address=self.options.bind_address,
            settings=settings,
            args=tuple(command.args),
            env=command.env,
            footprint=fit,
            kv_cache_tokens=fit.kv_cache_tokens * chosen.layout.data_parallel,
            estimate=estimate,
            start_seconds=start_seconds,
        )
        return replica, command.reasons, command.warnings

    def warnings(self, chosen: Candidate, idle: int, kinds: list[str]) -> list[str]:
        """What the reader of a plan must know before deploying it."""
        found = []
        planned = [self.host.gpus[m] for group, _ in chosen.groups for m in group.members]
        if any(gpu.uuid is None for gpu in planned):
            found.append(
                f"The driver is {self.host.driver_state}, so GPUs are named by PCI bus id and their memory comes from "
                "a table: a plan to judge feasibility by, not to serve with."
            )
        if idle > 0 and not self.options.max_replicas:
            advice = (
                f" The host mixes {', '.join(kinds)}, and one deploy serves one plan per host: choose which kind with "
                "exclude_gpus."
            )
            found.append(
                f"{idle} usable GPU(s) stay idle: they do not make another {chosen.layout}."
                f"{advice if len(kinds) > 1 else ''}"
            )
        unreported = [gpu for gpu in planned if gpu.memory_reserved_mib is None]
        if unreported and self.options.accelerator == "cuda":
            guess = memory.reserved_mib(unreported[0].memory_total_mib or 0, None)
            found.append(
                f"nvidia-smi did not report the memory it reserves; {guess} MiB per GPU are assumed, more than on any "
                "card seen."
            )
        if self.card.revision is None:
            found.append(
                f"The card {self.card.name} pins no commit, since no source states one, and a deployment downloads "
                f"pinned commits only. Review https://huggingface.co/{self.card.id}/commits/main and write the 40 hex "
                "digits as `revision` into a copy of the card."
            )
        if chosen.unproven:
            found.append(chosen.unproven.reason)
        if chosen.spanning:
            found.append(f"{chosen.spanning} replica(s) span NUMA nodes: their all-reduces cross the socket link.")
        if isinstance(self.accelerator, Cpu) and any(
            self.accelerator.host_share_gib(group.members[0]) is None for group, _ in chosen.groups
        ):
            found.append("The memory of the NUMA nodes is unknown, so it was not checked that the replicas fit.")
        return found
