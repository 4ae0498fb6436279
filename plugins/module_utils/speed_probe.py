"""How fast a server of OpenAI's API answers: a few streams of a fixed length, and what came back when.

Small enough to run before and after a replica is switched, and measured the same way by whoever asks: gates compare its
numbers, benchmarks repeat it with more.

Standard library, Python 3.9.
"""

from __future__ import annotations

import http.client
import json
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Optional
from urllib.parse import urlsplit

from .openai_client import CheckError, completion_tokens, sse_data, stream_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .openai_client import Endpoint


class SpeedError(Exception):
    """A request did not end well; the text says how."""


@dataclass(frozen=True)
class Stream:
    """One request: when it was sent, when its first token came, when it ended, and how many tokens came."""

    sent: float
    first: float
    ended: float
    tokens: int


@dataclass(frozen=True)
class Speed:
    """What was measured.

    Attributes:
        model: The served model name.
        streams: How many requests ran at once.
        tokens: How many tokens each was asked for.
        tokens_per_second: Of all streams together, from the first that was sent to the last that ended.
        first_token_seconds: Median wait for the first token.
        token_seconds: Median time between two tokens of a stream.
    """

    model: str
    streams: int
    tokens: int
    tokens_per_second: float
    first_token_seconds: float
    token_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def summarize(model: str, asked_tokens: int, streams: Sequence[Stream]) -> Speed:
    """Bring the streams into one set of numbers."""
    seconds = max(stream.ended for stream in streams) - min(stream.sent for stream in streams)
    return Speed(
        model=model,
        streams=len(streams),
        tokens=asked_tokens,
        tokens_per_second=round(sum(stream.tokens for stream in streams) / seconds, 2),
        first_token_seconds=round(statistics.median(stream.first - stream.sent for stream in streams), 4),
        token_seconds=round(
            statistics.median((stream.ended - stream.first) / max(stream.tokens - 1, 1) for stream in streams), 5
        ),
    )


def measure(endpoint: Endpoint, *, streams: int, tokens: int, deadline_seconds: float, rounds: int = 2) -> Speed:
    """Run the streams, a first time to warm up, and return the fastest of the rounds after that.

    The fastest, since whatever else a host does only slows an engine down.

    Args:
        endpoint: The server.
        streams: How many requests run at once.
        tokens: How many tokens each asks for; the end of the text is ignored.
        deadline_seconds: Longest silence on a connection.
        rounds: How many rounds count.

    Raises:
        SpeedError: A request failed.
    """
    run_round(endpoint, streams, min(tokens, 8), deadline_seconds)
    measured = [
        summarize(endpoint.model, tokens, run_round(endpoint, streams, tokens, deadline_seconds)) for _ in range(rounds)
    ]
    return max(measured, key=lambda speed: speed.tokens_per_second)


def run_round(endpoint: Endpoint, streams: int, tokens: int, deadline_seconds: float) -> list[Stream]:
    """Run so many requests at once.

    Raises:
        SpeedError: One failed.
    """
    done: list[Stream] = []
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            done.append(run_stream(endpoint, number, tokens, deadline_seconds))
        except SpeedError as error:
            wrong.append(str(error))
        except (OSError, CheckError, http.client.HTTPException) as error:
            wrong.append("{0} broke off: {1!r}".format(endpoint.url, error))

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise SpeedError("{0} of {1} requests failed; {2}".format(len(wrong), streams, endpoint.excerpt(wrong[0])))
    return done


def run_stream(endpoint: Endpoint, number: int, tokens: int, deadline_seconds: float) -> Stream:
    """Send one request and read its stream to the end."""
    parts = urlsplit(endpoint.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=deadline_seconds)
    body = {
        "model": endpoint.model,
        "prompt": "Count from {0} on.".format(number),
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Authorization": "Bearer " + endpoint.api_key, "Content-Type": "application/json"}
    first: Optional[float] = None
    came = 0
    sent = time.monotonic()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise SpeedError("{0} answered {1}".format(endpoint.url, response.status))
        for chunk in stream_chunks(sse_data(_pieces(response))):
            if first is None and chunk.get("choices"):
                first = time.monotonic()
            came = completion_tokens(chunk) or came
        ended = time.monotonic()
    finally:
        connection.close()
    if first is None or not came:
        raise SpeedError("{0} streamed no token".format(endpoint.url))
    return Stream(sent, first, ended, came)


def _pieces(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while True:
        piece = response.read1(65536)
        if not piece:
            return
        yield piece
