"""Which of the feasible layouts to take, and one honest sentence for each that was not."""

from dataclasses import dataclass
from typing import Any

from vllm_fleet.layout import Layout, Rejection
from vllm_fleet.memory import Footprint
from vllm_fleet.placement import Group

# A request of the public benchmarks that the evidence below comes from: 1,024 tokens in, 1,024 out.
TYPICAL_REQUEST_TOKENS = 2048


@dataclass(frozen=True)
class Candidate:
    """A feasible layout on one host: its groups of GPUs, each with its footprint."""

    layout: Layout
    groups: tuple[tuple[Group, Footprint], ...]
    spanning: int  # groups whose traffic crosses NUMA nodes without NVLink
    max_model_len: int
    max_num_seqs: int
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

    def __str__(self) -> str:
        """As people say it: "2 x TP4"."""
        return f"{self.replicas} x {self.layout}"


def rank(candidates: list[Candidate], objective: str, expected_concurrency: int) -> list[Candidate]:
    """Order candidates, best first.

    What nobody has run and what idles by design (pipeline stages at low depth, replicated attention) always come last.

    - throughput: narrow groups on one node, replicated, as long as their KV cache holds the expected requests. M2.5 on
      H100 gave 72.2 tokens/s per GPU with four ranks and 53.4 with eight
      (https://github.com/SemiAnalysisAI/InferenceX/pull/832). One source saw the wider group ahead over PCIe below 128
      streams (NVFP4, TP4 against 2 x TP2: 2,472 to 2,222 at 64, 2,496 to 3,995 at 128).
    - latency: the widest group that stays on NVLink or one NUMA node (first source: 9.0 ms per token with eight ranks
      on NVLink, 13.3 with four; over PCIe eight did not beat four even for a single stream).
    - context: the longest context, then the most such requests at once.
    """
    wanted = expected_concurrency * TYPICAL_REQUEST_TOKENS

    def key(c: Candidate) -> tuple[Any, ...]:
        last = (c.unproven is not None, c.layout.pipeline_parallel, c.layout.data_parallel > 1)
        if objective == "latency":
            preference: tuple[Any, ...] = (c.spanning_share, -c.layout.tensor_parallel)
        elif objective == "context":
            preference = (-c.max_model_len, -c.kv_cache_tokens, c.spanning_share)
        else:
            short = max(0, wanted - c.kv_cache_tokens)
            preference = (c.spanning_share, short, c.layout.ranks)
        return (*last, *preference, c.layout.expert_parallel, c.layout)

    return sorted(candidates, key=key)


def why_not(candidate: Candidate, chosen: Candidate, objective: str, expected_concurrency: int) -> Rejection:
    """The reason that a feasible layout lost against the chosen one: the first of these that applies, as in `rank`."""
    layout, better = candidate.layout, chosen.layout
    fit, best = candidate.groups[0][1], chosen.groups[0][1]
    wanted = expected_concurrency * TYPICAL_REQUEST_TOKENS
    if candidate.unproven is not None and chosen.unproven is None:
        return candidate.unproven
    reasons = (
        (
            layout.pipeline_parallel > better.pipeline_parallel,
            "pipeline_parallel",
            f"{layout.pipeline_parallel} stages wait for each other on every token; {chosen} has fewer.",
        ),
        (
            layout.data_parallel > 1 and better.data_parallel == 1,
            "data_parallel",
            (
                f"Every rank repeats attention and all its key-value heads: {fit.kv_bytes_per_token:,} bytes per token "
                f"and GPU, where {better} takes {best.kv_bytes_per_token:,}."
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
                f"which {chosen} avoids. Over PCIe eight ranks did not beat four even for a single stream; nobody has "
                "published 2 x TP4 against TP8+EP on such a host."
            ),
        ),
        (
            layout.expert_parallel and not better.expert_parallel and layout.ranks == better.ranks,
            "expert_parallel",
            f"{better} already cuts experts into whole blocks; keeping them whole makes the ranks' load uneven.",
        ),
        (
            objective == "latency",
            "latency",
            f"{layout.ranks} rank(s) read the weights of each token where {better} has {better.ranks}.",
        ),
        (
            candidate.kv_cache_tokens < min(wanted, chosen.kv_cache_tokens),
            "concurrency",
            (
                f"{candidate} holds {candidate.kv_cache_tokens:,} tokens where {expected_concurrency} requests of "
                f"{TYPICAL_REQUEST_TOKENS:,} need {wanted:,}; {chosen} holds {chosen.kv_cache_tokens:,}."
            ),
        ),
    )
    default = (
        "throughput",
        (
            f"{chosen} reduces over fewer ranks than {candidate}. MiniMax-M2.5 on H100 gave 72.2 tokens/s per GPU with "
            "4 ranks and 53.4 with 8."
        ),
    )
    rule, reason = next(((rule, reason) for applies, rule, reason in reasons if applies), default)
    return Rejection(layout, rule, reason)
