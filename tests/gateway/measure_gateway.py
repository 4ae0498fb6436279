"""Measure what the gateway costs: the same load on stand-in engines directly and through HAProxy, in turns.

The engines send tokens to a fixed clock, so whatever comes later comes from what lies between. Turns are taken so that
other work on the machine weighs on both alike. Prints a table for docs/measurements.md.

    .venv/bin/python tests/gateway/measure_gateway.py --streams 64 --tokens 100 --rate 20 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from conftest import ENGINE_KEY, KEYS, MODEL, Agent, Gateway, Replica, free_port


@dataclass
class Seen:
    """What the clients of one way saw. Times in milliseconds."""

    first_token: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    streams_per_second: list[float] = field(default_factory=list)
    short_per_second: list[float] = field(default_factory=list)
    failed: int = 0


async def stream(port: int, address: str, key: str, tokens: int, seen: Seen) -> None:
    """One streamed completion on a connection of its own."""
    payload = {"model": MODEL, "prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    reader, writer = await asyncio.open_connection(address, port)
    try:
        asked = time.perf_counter()
        writer.write(request(payload, key))
        head = await reader.readuntil(b"\r\n\r\n")
        times = []
        while head.startswith(b"HTTP/1.1 200") and b"[DONE]" not in await reader.readuntil(b"\n\n"):
            times.append(time.perf_counter())
        if len(times) != tokens:
            seen.failed += 1
            return
        seen.first_token.append(1000 * (times[0] - asked))
        seen.gaps += [1000 * (later - earlier) for earlier, later in itertools.pairwise(times)]
    finally:
        writer.close()


async def short(port: int, address: str, key: str, until: float) -> int:
    """Completions of one token, one after another on one connection."""
    done = 0
    reader, writer = await asyncio.open_connection(address, port)
    text = request({"model": MODEL, "prompt": "a", "max_tokens": 1}, key)
    while time.perf_counter() < until:
        writer.write(text)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
        done += head.startswith(b"http/1.1 200")
    writer.close()
    return done


def request(payload: dict[str, object], key: str) -> bytes:
    body = json.dumps(payload).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}"
    return f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + body


async def turn(places: list[tuple[int, str]], key: str, given: argparse.Namespace, seen: Seen) -> None:
    """One turn of one way: the streams all at once, then short requests as fast as they go."""
    targets = list(itertools.islice(itertools.cycle(places), given.streams))
    start = time.perf_counter()
    await asyncio.gather(*(stream(port, address, key, given.tokens, seen) for port, address in targets))
    seen.streams_per_second.append(given.streams / (time.perf_counter() - start))
    until = time.perf_counter() + given.seconds
    done = await asyncio.gather(*(short(port, address, key, until) for port, address in targets))
    seen.short_per_second.append(sum(done) / given.seconds)


def processor_seconds(pid: int) -> float:
    cells = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(cells[11]) + int(cells[12])) / os.sysconf("SC_CLK_TCK")


def table(direct: Seen, through: Seen) -> list[str]:
    """The figures side by side."""

    def percentile(values: list[float], percent: int) -> float:
        return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]

    rows = ["| what | direct | through the gateway |", "|---|---|---|"]
    for name, values in (("first token", "first_token"), ("gap between two tokens", "gaps")):
        for percent in (50, 99):
            cells = [f"{percentile(getattr(seen, values), percent):.2f} ms" for seen in (direct, through)]
            rows.append(f"| {name}, p{percent} | {' | '.join(cells)} |")
    for name, values in (
        ("streams a second", "streams_per_second"),
        ("one-token requests a second", "short_per_second"),
    ):
        cells = [
            f"{statistics.median(getattr(seen, values)):.{1 if values[1] == 't' else 0}f}" for seen in (direct, through)
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    rows.append(f"| failed | {direct.failed} | {through.failed} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the gateway costs.")
    parser.add_argument("--streams", type=int, default=64, help="at once")
    parser.add_argument("--tokens", type=int, default=100, help="of each stream")
    parser.add_argument("--rate", type=float, default=20, help="tokens a second of each stream")
    parser.add_argument("--seconds", type=float, default=5, help="of one-token requests in each turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way")
    given = parser.parse_args()
    direct, through = Seen(), Seen()
    spent = 0.0
    with tempfile.TemporaryDirectory() as place:
        health_port = free_port()
        environment = {"STAND_IN_TOKENS_PER_SECOND": str(given.rate)}
        replicas = [
            Replica(f"r-{index}", f"127.0.0.{index + 1}", free_port(), Path(place), given.streams, environment)
            for index in range(2)
        ]
        agents = [Agent(replica.address, health_port) for replica in replicas]
        gateway = Gateway(Path(place), replicas, health_port)
        try:
            for replica in replicas:
                replica.start()
            gateway.start()
            worker = next(line for line in gateway.command("show info").splitlines() if line.startswith("Pid: "))
            pid = int(worker.removeprefix("Pid: "))
            for _ in range(given.rounds):
                asyncio.run(turn([(r.port, r.address) for r in replicas], ENGINE_KEY, given, direct))
                before = processor_seconds(pid)
                asyncio.run(turn([(gateway.port, "127.0.0.1")], KEYS["alice"], given, through))
                spent += processor_seconds(pid) - before
        finally:
            gateway.stop()
            for replica in replicas:
                replica.stop()
            for agent in agents:
                agent.close()
    events = given.rounds * given.streams * given.tokens + sum(through.short_per_second) * given.seconds
    lines = table(direct, through)
    lines.append(f"| HAProxy's processor time for 1,000 tokens or short requests | | {1e6 * spent / events:.0f} ms |")
    print("\n".join(lines))  # noqa: T201  its result


if __name__ == "__main__":
    main()
