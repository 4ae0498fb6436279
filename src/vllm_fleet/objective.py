"""Which of the feasible layouts to take, and one honest sentence for each that was not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_fleet.layout import Layout, Rejection
from vllm_fleet.memory import Footprint
from vllm_fleet.placement import Group

# A request of the public benchmarks that the evidence below comes from: 1,024 tokens in, 1,024 out.
TYPICAL_REQUEST_TOKENS = 2048
# A layout that cannot take one request of this length comes after those that can.
ROOMY_CONTEXT = 32_768
# Layouts whose estimates are closer than this count as equally fast: then narrower ones win, whose loss costs less.
TIE = 0.05


@dataclass(frozen=True)
class Candidate:
    """A feasible layout on one host: its groups of GPUs, each with its footprint."""

    layout: Layout
    groups: tuple[tuple[Group, Footprint], ...]
    spanning: int  # groups whose traffic crosses NUMA nodes without NVLink
    max_model_len: int
    max_num_seqs: int
    expected: int  # requests at once on the host
    requests: int  # of those, each replica's share while the host is whole
    estimates: tuple[Mapping[str, Any] | None, ...]  # tokens per second, one per group
    whole_context: int  # what the model was made for
    # Data parallel attention that repeats key-value heads, which tensor parallel ranks share out, or that would
    # exchange every token over PCIe: it has been shown for latent attention over NVLink only.
    poor_data_parallel: bool
    unproven: Rejection | None

    @property
    def replicas(self) -> int:
        """How many replicas the host gets."""
        return len(self.groups)

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that all replicas hold together."""
        return sum(fit.kv_cache_tokens * self.layout.data_parallel for _, fit in self.groups)

    @property
    def spanning_share(self) -> float:
        """Share of the replicas that span nodes: one wide replica across them is no better than two narrow ones."""
        return self.spanning / self.replicas

    @property
    def single(self) -> float | None:
        """Estimated tokens per second of one request alone, on the slowest replica."""
        rates = [e["single"] for e in self.estimates if e]
        return min(rates) if len(rates) == self.replicas else None

    @property
    def together(self) -> float | None:
        """Estimated tokens per second of all replicas at the expected concurrency."""
        rates = [e["at_concurrency"] for e in self.estimates if e]
        # Shares are rounded up: three requests on two replicas are not four.
        real = min(1.0, self.expected / (self.requests * self.replicas))
        return sum(rates) * real if len(rates) == self.replicas else None

    @property
    def cramped(self) -> bool:
        """Whether one request cannot be as long as people expect of any model."""
        return self.max_model_len < min(ROOMY_CONTEXT, self.whole_context)

    def __str__(self) -> str:
        """As people say it: "2 x TP4"."""
        return f"{self.replicas} x {self.layout}"


def rank(candidates: list[Candidate], objective: str, expected_concurrency: int) -> list[Candidate]:
    """Order candidates, best first.

    What nobody has run, what leaves no room for a request of ordinary length, and what idles by design (pipeline stages
    at low depth, poor data parallel) come last, in this order; groups that leave their NUMA node without NVLink come
    after those that do not. Among equals:

    - throughput: the most tokens per second that the roofline (speed.py) expects of all replicas at the expected
      concurrency, as far as their KV cache holds it.
    - latency: the most tokens per second of one request alone.
    - context: the longest context, however the model is split; of those with the same, the least idle, then the most
      such requests at once, wherever the GPUs are.

    Estimates within 5 % are a tie, and the narrower groups win it. Where the GPU's rates are unknown the KV cache
    decides (throughput), or the width (latency).
    """
    wanted = expected_concurrency * TYPICAL_REQUEST_TOKENS

    def last(c: Candidate) -> tuple[Any, ...]:
        return (c.unproven is not None, c.cramped, c.layout.pipeline_parallel, c.poor_data_parallel)

    def near(c: Candidate) -> tuple[Any, ...]:
        return (*last(c), c.spanning_share)

    front = min(near(c) for c in candidates)
    best = max((_rate(c, objective) for c in candidates if near(c) == front), default=0.0)

    def key(c: Candidate) -> tuple[Any, ...]:
        split = c.layout
        narrow = (split.ranks, split.data_parallel, split.decode_context_parallel, split.expert_parallel, split)
        if objective == "context":
            return (c.unproven is not None, -c.max_model_len, *last(c), -c.kv_cache_tokens, c.spanning_share, *narrow)
        if best == 0:
            unknown = -c.layout.tensor_parallel if objective == "latency" else max(0, wanted - c.kv_cache_tokens)
            return (*near(c), unknown, *narrow)
        return (*near(c), _rate(c, objective) < (1 - TIE) * best, *narrow)

    return sorted(candidates, key=key)


def _rate(candidate: Candidate, objective: str) -> float:
    """The estimate that an objective goes by; 0 where there is none."""
    return (candidate.single if objective == "latency" else candidate.together) or 0.0


def why_not(candidate: Candidate, chosen: Candidate, objective: str, expected_concurrency: int) -> Rejection:
    """The reason that a feasible layout lost against the chosen one: the first of these that applies, as in `rank`."""
    layout, better = candidate.layout, chosen.layout
    fit, best = candidate.groups[0][1], chosen.groups[0][1]
    wanted = expected_concurrency * TYPICAL_REQUEST_TOKENS
    if candidate.unproven is not None and chosen.unproven is None:
        return candidate.unproven
    reasons = (
        (
            layout.pipeline_parallel > better.pipeline_parallel and candidate.max_model_len <= chosen.max_model_len,
            "pipeline_parallel",
            f"{layout.pipeline_parallel} stages wait for each other on every token; {chosen} has fewer.",
        ),
        (
            candidate.poor_data_parallel and not chosen.poor_data_parallel,
            "data_parallel",
            (
                f"Every rank repeats attention and all its key-value heads: {fit.kv_bytes_per_token:,} bytes per token "
                f"and GPU, where {better} takes {best.kv_bytes_per_token:,}."
                if fit.kv_bytes_per_token > best.kv_bytes_per_token
                else "Every rank would exchange every token over PCIe for the experts; data parallel attention has "
                "been shown over NVLink only."
            ),
        ),
        (
            objective == "context",
            "context",
            (
                f"Holds {candidate.kv_cache_tokens:,} tokens, one request up to {candidate.max_model_len:,}; {chosen} "
                f"holds {chosen.kv_cache_tokens:,}, one up to {chosen.max_model_len:,}."
            ),
        ),
        (
            candidate.spanning_share > chosen.spanning_share,
            "numa",
            (
                f"{layout.ranks} GPUs span NUMA nodes: both all-reduces of every layer would cross the socket link, "
                f"which {chosen} avoids. Over PCIe eight ranks of M2.5 did not beat four even for a single stream"
                f"{'; nobody has published 2 x TP4 against TP8+EP on such a host' if layout.expert_parallel else ''}."
            ),
        ),
        (
            layout.expert_parallel
            and not better.expert_parallel
            and (layout.ranks, layout.data_parallel) == (better.ranks, better.data_parallel),
            "expert_parallel",
            f"{better} already cuts experts into whole blocks; keeping them whole makes the ranks' load uneven.",
        ),
        (
            candidate.cramped and not chosen.cramped,
            "cramped",
            (
                f"One request could be {candidate.max_model_len:,} tokens long at most; {chosen} takes "
                f"{chosen.max_model_len:,}."
            ),
        ),
        (
            objective == "throughput" and candidate.kv_cache_tokens < min(wanted, chosen.kv_cache_tokens),
            "concurrency",
            (
                f"{candidate} holds {candidate.kv_cache_tokens:,} tokens where {expected_concurrency} requests of "
                f"{TYPICAL_REQUEST_TOKENS:,} need {wanted:,}; {chosen} holds {chosen.kv_cache_tokens:,}."
            ),
        ),
    )
    default = (objective, _slower(candidate, chosen, objective, expected_concurrency))
    rule, reason = next(((rule, reason) for applies, rule, reason in reasons if applies), default)
    return Rejection(layout, rule, reason)


def _slower(candidate: Candidate, chosen: Candidate, objective: str, expected_concurrency: int) -> str:
    """What the roofline says of a layout that lost by it."""
    rate, best = _rate(candidate, objective), _rate(chosen, objective)
    if not rate or not best:
        widths = f"{candidate.layout.ranks} rank(s) share a request where {chosen} has {chosen.layout.ranks}"
        return f"{widths}; the speed of this GPU is not known, so none is estimated."
    what = "one request alone" if objective == "latency" else f"{expected_concurrency} requests"
    figures = f"{rate:,.0f} tokens/s are estimated for {what}, {best:,.0f} for {chosen}"
    if rate < (1 - TIE) * best:
        return f"{figures}."
    return (
        f"{figures}: no difference that such an estimate can tell, and then smaller groups win, whose loss costs less."
    )
