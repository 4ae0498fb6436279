"""Which layouts of a model this host can serve, and for each that it cannot, the rule and its numbers."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_fleet import memory
from vllm_fleet.accelerator import Accelerator
from vllm_fleet.catalog import Card
from vllm_fleet.errors import BadInputError, NoFeasibleLayoutError
from vllm_fleet.layout import Layout, Rejection, reject_by_blocks, reject_by_shape, unproven_reason
from vllm_fleet.memory import Footprint
from vllm_fleet.objective import TYPICAL_REQUEST_TOKENS, Candidate
from vllm_fleet.options import OLDEST_VLLM_VERSION, Options, parse_version
from vllm_fleet.placement import Group, farthest_link, form_groups, spans
from vllm_fleet.topology import Topology

# A replica that cannot hold one request of this length is no use to anyone; min_context overrides it.
LEAST_CONTEXT = 8192
# Requests that run at once in one replica. The engine's own default is 1024, whose sampler warm-up costs GiBs.
DEFAULT_MAX_NUM_SEQS = 128
MOST_MAX_NUM_SEQS = 1024
# Names that `list_registered()` gave, by version.
PARSERS = Path(__file__).with_name("parsers.json")
HYPOTHETICAL_RANKS = 64  # how far a refusal looks for what would fit


@dataclass(frozen=True)
class Fleet:
    """The GPUs of one kind, as positions in the topology: all of them, and those that may be used."""

    name: str
    members: list[int] = field(default_factory=list)
    usable: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Feasibility:
    """Answers for one host, one card and one set of options."""

    host: Topology
    card: Card
    options: Options
    accelerator: Accelerator

    @property
    def context(self) -> int:
        """The shortest context worth serving."""
        return self.options.min_context or min(LEAST_CONTEXT, self.card.shape.max_position_embeddings)

    @property
    def version(self) -> tuple[int, ...]:
        """The engine's version as numbers."""
        return parse_version(self.options.vllm_version)

    def check_request(self) -> None:
        """Refuse versions and contexts that cannot be.

        Raises:
            BadInputError: With what to set instead.
        """
        version, needed = self.options.vllm_version, self.card.engine.minimum_version
        if self.version < parse_version(OLDEST_VLLM_VERSION):
            raise BadInputError(
                f"vLLM {version} is older than {OLDEST_VLLM_VERSION}, the first that accepts GPUs by UUID, which keeps "
                "a replica on its own GPUs when indices move. Set vllm_version to a newer one."
            )
        if self.version < parse_version(needed):
            raise BadInputError(
                f"vLLM {version} is older than {needed}, which the card {self.card.name} needs. Set vllm_version to "
                "that or a newer one."
            )
        self._check_parsers()
        longest = self.card.shape.max_position_embeddings
        if self.context > longest:
            raise BadInputError(
                f"min_context {self.context:,} is more than {self.card.id} was made for ({longest:,} tokens). Lower "
                "min_context or choose another model."
            )

    def _check_parsers(self) -> None:
        """Refuse parser names that this engine does not have; a version whose names are not known is not checked."""
        version, engine = self.options.vllm_version, self.card.engine
        known = json.loads(PARSERS.read_text(encoding="utf-8")).get(version)
        for kind, name in (("tool", engine.tool_parser), ("reasoning", engine.reasoning_parser)):
            if known and name and name not in known[kind]:
                from difflib import get_close_matches  # noqa: PLC0415  only a wrong name needs it

                close = get_close_matches(name, known[kind], n=3, cutoff=0.4)
                raise BadInputError(
                    f"vLLM {version} has no {kind} parser {name!r}, which the card {self.card.name} names in "
                    f"engine.{kind}_parser. Closest: {', '.join(close) or 'none'}."
                )

    def fleets(self) -> tuple[list[Fleet], list[str]]:
        """The host's GPUs by kind, most usable ones first, and a warning for each that is left out.

        Raises:
            BadInputError: exclude_gpus names a GPU that is not there.
            NoFeasibleLayoutError: There is none, or none may be used.
        """
        if not self.host.gpus:
            raise NoFeasibleLayoutError(
                "No GPU was found on this host. The probe looked for PCI devices of vendor 10de (NVIDIA) with class "
                f"0300 or 0302 under /sys/bus/pci/devices, and asked nvidia-smi (driver: {self.host.driver_state}). "
                "Check that the card is seated and powered (lspci -d 10de:), or take the host out of the GPU group.",
                ("The topology lists no GPU.",),
            )
        excluded = self._excluded()
        fleets: dict[tuple[Any, ...], Fleet] = {}
        left_out = []
        for position, gpu in enumerate(self.host.gpus):
            fleet = fleets.setdefault(self.accelerator.kind(gpu), Fleet(gpu.name))
            fleet.members.append(position)
            reason = "exclude_gpus names it" if position in excluded else self.accelerator.unusable(gpu)
            if reason:
                left_out.append(f"GPU {gpu.index} ({gpu.name}) is left out: {reason}.")
            else:
                fleet.usable.append(position)
        if len(left_out) == len(self.host.gpus):
            raise NoFeasibleLayoutError(f"No GPU of this host can be used. {' '.join(left_out)}", tuple(left_out))
        return sorted(fleets.values(), key=lambda fleet: -len(fleet.usable)), left_out

    def _excluded(self) -> set[int]:
        excluded = set()
        for name in self.options.exclude_gpus:
            found = [i for i, g in enumerate(self.host.gpus) if name in (g.uuid, g.pci_bus_id, str(g.index))]
            if not found:
                known = ", ".join(f"{g.index} ({g.identity})" for g in self.host.gpus)
                raise BadInputError(f"exclude_gpus names {name!r}, and the host has no such GPU. It has: {known}.")
            excluded.update(found)
        return excluded

    def candidates(self, fleets: list[Fleet]) -> tuple[list[Candidate], list[Rejection]]:
        """Try every layout: the feasible ones, and a reason for each of the others."""
        most = max(len(fleet.usable) for fleet in fleets)
        found = [self._evaluate(layout, fleets) for layout in self.accelerator.layouts(most)]
        return (
            [entry for entry in found if isinstance(entry, Candidate)],
            [entry for entry in found if isinstance(entry, Rejection)],
        )

    def _evaluate(self, layout: Layout, fleets: list[Fleet]) -> Candidate | Rejection:
        """A layout's groups of GPUs with their footprints, or the first rule that forbids it."""
        broken = reject_by_shape(self.card, layout) or reject_by_blocks(self.card, layout, self.version)
        if broken:
            return broken
        groups = list(_groups(self.host, layout, fleets))
        most = min(len(groups), self._most_replicas(layout, fleets))
        if most == 0:
            reason = f"Fewer than {layout.ranks} GPUs are left with keep_free_gpus = {self.options.keep_free_gpus}."
            return Rejection(layout, "keep_free_gpus", reason)
        share = self._share(layout, fleets)
        max_num_seqs = self._max_num_seqs(share)
        fits = [(group, self.accelerator.footprint(layout, group.members[0], max_num_seqs)) for group in groups]
        fitting = [(group, fit) for group, fit in fits if fit.kv_cache_tokens >= self.context]
        if not fitting:
            return Rejection(layout, "memory", self._shortage(layout, *fits[0]))
        fitting.sort(key=lambda placed: (spans(self.host, placed[0].members), placed[0].slot))
        placed = sorted(fitting[:most], key=lambda placed: placed[0].slot)
        return Candidate(
            layout=layout,
            groups=tuple(placed),
            spanning=sum(spans(self.host, group.members) for group, _ in placed),
            max_model_len=min(self.card.shape.max_position_embeddings, *(fit.kv_cache_tokens for _, fit in placed)),
            max_num_seqs=max_num_seqs,
            expected=self.options.expected_concurrency,
            requests=share,
            estimates=tuple(
                # As many requests as the replica's cache and limit allow at once.
                self.accelerator.estimate(
                    layout, group, max(1, min(share, max_num_seqs, fit.kv_cache_tokens // TYPICAL_REQUEST_TOKENS))
                )
                for group, fit in placed
            ),
            whole_context=self.card.shape.max_position_embeddings,
            poor_data_parallel=layout.data_parallel > 1
            and (self.card.attention == "gqa" or farthest_link(self.host, placed[0][0].members) != "NV"),
            unproven=unproven_reason(self.card, layout, self.version),
        )

    def _share(self, layout: Layout, fleets: list[Fleet]) -> int:
        """Requests that each replica gets while the host is whole: a GPU taken away must not change the others."""
        whole = sum(len(fleet.members) // layout.ranks for fleet in fleets)
        return math.ceil(self.options.expected_concurrency / max(1, min(whole, self.options.max_replicas or whole)))

    def _most_replicas(self, layout: Layout, fleets: list[Fleet]) -> int:
        """How many replicas the inventory allows."""
        free = sum(len(fleet.usable) for fleet in fleets) - self.options.keep_free_gpus
        by_gpus = max(0, free) // layout.ranks
        return min(by_gpus, self.options.max_replicas or by_gpus)

    def _max_num_seqs(self, share: int) -> int:
        return self.options.max_num_seqs or max(DEFAULT_MAX_NUM_SEQS, min(share, MOST_MAX_NUM_SEQS))

    def _shortage(self, layout: Layout, group: Group, fit: Footprint) -> str:
        kv = self.context * fit.kv_bytes_per_token / memory.GIB
        return (
            f"{fit.weights_gib:.1f} GiB of weights + {fit.overhead_gib:.1f} overhead + {kv:.1f} for a context of "
            f"{self.context:,} tokens = {fit.weights_gib + fit.overhead_gib + kv:.1f} GiB "
            f"{self.accelerator.supply(layout, group.members[0])}."
        )

    def refusal(self, fleets: list[Fleet], rejected: list[Rejection]) -> NoFeasibleLayoutError:
        """Say that nothing fits: the closest layout with its arithmetic, and what would fit."""
        reasons = tuple(f"{r.layout} ({r.rule}): {r.reason}" for r in rejected)
        here = ", ".join(f"{len(fleet.usable)} x {fleet.name}" for fleet in fleets)
        sentences = [f"{self.card.id} does not fit this host ({here})."]
        if len(fleets) > 1:
            unlike = f"Unlike GPUs ({here}) never share a replica: all would wait for the slowest, cut to the smallest."
            sentences.append(unlike)
            reasons = (f"unlike_gpus: {unlike}", *reasons)
        if self.options.keep_free_gpus:
            sentences.append(f"keep_free_gpus takes {self.options.keep_free_gpus} away.")
        # Of those short of memory the widest is the closest; a plain split reads better than one with expert parallel.
        plain = [r for r in rejected if r.layout.pipeline_parallel == r.layout.data_parallel == 1]
        closest = max(plain, key=lambda r: (r.rule == "memory", r.layout.ranks, not r.layout.expert_parallel))
        sentences += [f"The closest layout is {closest.layout}: {closest.reason}", self._what_would_fit(fleets)]
        sentences += self._what_could_give()
        return NoFeasibleLayoutError(" ".join(sentences), reasons)

    def _what_could_give(self) -> Iterator[str]:
        """For each constraint of the inventory the nearest value with which this host would do, if any would."""
        if self.options.min_context:
            found = self._candidates_with(min_context=1)
            if found:
                longest = max(candidate.max_model_len for candidate in found)
                yield f"Here min_context could be {longest:,} at most."
        for kept in range(self.options.keep_free_gpus - 1, -1, -1):
            if self._candidates_with(keep_free_gpus=kept):
                yield f"With keep_free_gpus: {kept} it would fit."
                break
        if self.options.exclude_gpus and self._candidates_with(exclude_gpus=()):
            yield "It would fit if exclude_gpus named no GPU."

    def _candidates_with(self, **changed: Any) -> list[Candidate]:
        relaxed = replace(self, options=replace(self.options, **changed))
        try:
            return relaxed.candidates(relaxed.fleets()[0])[0]
        except NoFeasibleLayoutError:
            return []

    def _what_would_fit(self, fleets: list[Fleet]) -> str:
        """The smallest number of this host's GPUs that would hold the model."""
        member, name = fleets[0].usable[0], fleets[0].name
        for layout in self.accelerator.layouts(HYPOTHETICAL_RANKS):
            plain = layout.pipeline_parallel == layout.data_parallel == 1
            if not plain or reject_by_shape(self.card, layout) or reject_by_blocks(self.card, layout, self.version):
                continue
            fit = self.accelerator.footprint(layout, member, self._max_num_seqs(self.options.expected_concurrency))
            if fit.kv_cache_tokens >= self.context:
                return (
                    f"What would fit: {layout.ranks} x {name} as {layout}, with {fit.weights_gib:.1f} GiB of weights "
                    f"and {fit.kv_cache_gib:.1f} GiB of KV cache per GPU ({fit.kv_cache_tokens:,} tokens)."
                )
        return f"No split over up to {HYPOTHETICAL_RANKS} of them would fit: lower min_context or choose another model."


def _groups(host: Topology, layout: Layout, fleets: list[Fleet]) -> Iterator[Group]:
    """Groups of like GPUs, numbered over the whole host."""
    first_slot = 0
    # In bus order, not by what is usable now: a GPU taken away must not renumber the others' groups.
    for fleet in sorted(fleets, key=lambda fleet: fleet.members):
        for group in form_groups(host, fleet.members, fleet.usable, layout.ranks):
            yield Group(first_slot + group.slot, group.members)
        first_slot += len(fleet.members) // layout.ranks
