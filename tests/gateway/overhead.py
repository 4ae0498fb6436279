"""What the gateway costs: the same streams sent to a stand-in engine directly and through HAProxy, in turns.

    python tests/gateway/overhead.py [--streams 64] [--rounds 4]

The engine sends each stream's tokens to a fixed clock, so what is late was made late on the way (or by this client, in
both columns alike). Prints a table for docs/measurements.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from conftest import ENGINE_KEY, KEYS, MODEL, Agent, Gateway, Replica, free_port

TOKENS = 60
TOKENS_PER_SECOND = 20
WARM_UP_REQUESTS = 8


@dataclass
class Seen:
    """What the streams of one way brought, in seconds."""

    first_token: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    requests_per_second: list[float] = field(default_factory=list)


def body(max_tokens: int, *, stream: bool) -> bytes:
    """A completion of exactly so many tokens."""
    asked = {"model": MODEL, "prompt": "Hi", "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    return json.dumps(asked).encode()


async def post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str, content: bytes) -> None:
    """Send a request and read the head of its answer."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    answered = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in answered.split(b"\r\n", 1)[0]:
        raise RuntimeError(answered.decode())


async def stream(port: int, address: str, key: str, seen: Seen) -> None:
    """One stream from its request to its end."""
    reader, writer = await asyncio.open_connection(address, port)
    begun = time.monotonic()
    await post(reader, writer, key, body(TOKENS, stream=True))
    last = None
    while b"[DONE]" not in (line := await reader.readline()):
        if not line.startswith(b"data: "):
            continue
        now = time.monotonic()
        if last is None:
            seen.first_token.append(now - begun)
        else:
            seen.gaps.append(now - last)
        last = now
    writer.close()


async def requests(port: int, address: str, key: str, count: int) -> None:
    """Requests of one token, one after another on one connection."""
    reader, writer = await asyncio.open_connection(address, port)
    content = body(1, stream=False)
    for _ in range(count):
        await post(reader, writer, key, content)
        answer = b""
        while not answer.endswith(b"}"):
            answer += await reader.read(65536)
    writer.close()


async def one_round(port: int, address: str, key: str, streams: int, seen: Seen) -> None:
    """All streams at once, spread over half a second as clients are; then short requests as fast as they go."""
    await requests(port, address, key, WARM_UP_REQUESTS)

    async def later(index: int) -> None:
        await asyncio.sleep(0.5 * index / streams)
        await stream(port, address, key, seen)

    await asyncio.gather(*(later(index) for index in range(streams)))
    begun, each = time.monotonic(), 10
    await asyncio.gather(*(requests(port, address, key, each) for _ in range(streams)))
    seen.requests_per_second.append(streams * each / (time.monotonic() - begun))


def spread(values: list[float]) -> str:
    """Median and 99th percentile, in milliseconds."""
    hundredths = statistics.quantiles(values, n=100)
    return f"{1000 * hundredths[49]:.1f} / {1000 * hundredths[98]:.1f}"


def table(ways: dict[str, Seen]) -> str:
    """Markdown."""
    lines = ["| | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|"]
    rows = {
        "first token, p50 / p99, ms": lambda seen: spread(seen.first_token),
        "between tokens, p50 / p99, ms": lambda seen: spread(seen.gaps),
        "requests of one token per second, median": lambda seen: f"{statistics.median(seen.requests_per_second):.0f}",
    }
    lines += [f"| {name} | " + " | ".join(tell(seen) for seen in ways.values()) + " |" for name, tell in rows.items()]
    return "\n".join(lines)


def main() -> None:
    """Measure both ways in turns, so that what else the machine does hits both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    environment = {"STAND_IN_TOKENS_PER_SECOND": str(TOKENS_PER_SECOND)}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as undo:
        folder, address, health_port = Path(scratch), "127.0.0.1", free_port()
        replica = Replica("r-0", address, free_port(address), folder, 2 * given.streams, environment)
        undo.callback(replica.stop)
        replica.start()
        undo.callback(Agent(address, health_port).close)
        gateway = Gateway(folder, [replica], health_port)
        undo.callback(gateway.stop)
        gateway.start()
        ways = {"direct": Seen(), "through the gateway": Seen()}
        for _ in range(given.rounds):
            asyncio.run(one_round(replica.port, address, ENGINE_KEY, given.streams, ways["direct"]))
            asyncio.run(one_round(gateway.port, address, KEYS["alice"], given.streams, ways["through the gateway"]))
    print(table(ways))  # noqa: T201  its result


if __name__ == "__main__":
    main()
