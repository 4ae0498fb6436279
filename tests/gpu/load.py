"""A client that keeps an engine exactly as busy as asked, and reads from the engine's own counters what it did.

Requests are token ids drawn at random, so that experts are chosen as by unlike texts and no prefix is shared. They are
not streamed: what is measured is the engine, not this client. Standard library only.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

SETTLE_SECONDS = 1.0
START_SECONDS = 60.0


@dataclass(frozen=True)
class Engine:
    """Where it listens, and what its tokens are."""

    url: str
    model: str
    key: str = field(repr=False)
    vocabulary: int
    max_model_len: int

    def connect(self, timeout_seconds: float = 600) -> http.client.HTTPConnection:
        """A connection of its own."""
        parts = urlsplit(self.url)
        return http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=timeout_seconds)

    def counters(self) -> dict[str, float]:
        """`/metrics`: the engine's counters and gauges, by name without `vllm:`, summed over labels."""
        with contextlib.closing(self.connect(30)) as connection:
            connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {self.key}"})
            text = connection.getresponse().read().decode()
        found: dict[str, float] = {}
        for name, value in re.findall(r"^vllm:(\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def request(self, prompt: list[int], max_tokens: int) -> tuple[bytes, dict[str, str]]:
        """Body and headers of a completion that goes on to its limit."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        return json.dumps(body).encode(), {
            "Authorization": f"Bearer {self.key}",
            "Content-Type": "application/json",
        }

    def prompt(self, tokens: int) -> list[int]:
        """Token ids at random."""
        return random.choices(range(self.vocabulary), k=tokens)  # noqa: S311  # traffic, not secrets


class Held:
    """So many requests at once, for as long as the block runs; then they are cut off."""

    def __init__(self, engine: Engine, requests: int, prompt_tokens: int, max_tokens: int) -> None:
        """Say what to send."""
        self.engine, self.requests = engine, requests
        self.prompt_tokens, self.max_tokens = prompt_tokens, max_tokens
        self.failures: list[str] = []
        self._connections: list[http.client.HTTPConnection] = []

    def _one(self, connection: http.client.HTTPConnection) -> None:
        body, headers = self.engine.request(self.engine.prompt(self.prompt_tokens), self.max_tokens)
        try:
            connection.request("POST", "/v1/completions", body=body, headers=headers)
            response = connection.getresponse()
            text = response.read()
            if response.status != http.client.OK:
                self.failures.append(f"{response.status}: {text[:200].decode(errors='replace')}")
        except (OSError, http.client.HTTPException, ValueError, AttributeError):
            pass  # cut off below

    def __enter__(self) -> Self:
        """Send them all."""
        for _ in range(self.requests):
            connection = self.engine.connect()
            self._connections.append(connection)
            threading.Thread(target=self._one, args=(connection,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Cut them off, and wait until the engine has noticed."""
        for connection in self._connections:
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            seen = self.engine.counters()
            if not seen.get("num_requests_running") and not seen.get("num_requests_waiting"):
                return
            time.sleep(0.1)


def decode(
    engine: Engine, requests: int, *, seconds: float = 4.0, prompt_tokens: int = 128, max_tokens: int = 8192
) -> dict[str, Any]:
    """Tokens per second while exactly so many requests decode.

    Returns:
        `tokens_per_second` of all together, `step_ms`, and the mean `context` that they held meanwhile.
    """
    max_tokens = min(max_tokens, engine.max_model_len - prompt_tokens)
    first_tokens = engine.counters().get("generation_tokens_total", 0.0)
    with Held(engine, requests, prompt_tokens, max_tokens) as held:
        deadline = time.monotonic() + START_SECONDS
        while True:
            seen = engine.counters()
            decoding = seen.get("generation_tokens_total", 0) > first_tokens
            if decoding and seen.get("num_requests_running", 0) >= requests:
                break
            if held.failures or time.monotonic() > deadline:
                return {"requests": requests, "error": (held.failures or ["not all requests came to run"])[0]}
            time.sleep(0.05)
        time.sleep(SETTLE_SECONDS)
        before, start = engine.counters(), time.monotonic()
        time.sleep(seconds)
        after, end = engine.counters(), time.monotonic()
        running = min(before["num_requests_running"], after["num_requests_running"])
    made = after["generation_tokens_total"] - before["generation_tokens_total"]
    rate = made / (end - start)
    already = (before["generation_tokens_total"] - first_tokens + made / 2) / requests
    return {
        "requests": requests,
        "running": running,
        "tokens_per_second": round(rate, 1),
        "step_ms": round(1000 * requests / rate, 3) if rate else None,
        "context": round(prompt_tokens + already),
    }


def prefill(engine: Engine, prompt_tokens: int) -> dict[str, Any]:
    """Seconds until one prompt of so many tokens has its first token, and prompt tokens per second."""
    body, headers = engine.request(engine.prompt(prompt_tokens), 1)
    start = time.monotonic()
    with contextlib.closing(engine.connect()) as connection:
        connection.request("POST", "/v1/completions", body=body, headers=headers)
        response = connection.getresponse()
        text = response.read()
    took = time.monotonic() - start
    if response.status != http.client.OK:
        return {"prompt_tokens": prompt_tokens, "error": f"{response.status}: {text[:200].decode(errors='replace')}"}
    return {
        "prompt_tokens": prompt_tokens,
        "seconds": round(took, 3),
        "tokens_per_second": round(prompt_tokens / took, 1),
    }
