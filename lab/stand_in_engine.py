#!/usr/bin/env python3
"""A stand-in for `vllm serve`: the same API, command line, metrics, log-in and signals, and tokens at a steady rate.

For scenarios that restart many engines, or that measure what lies in front of one: it starts in a tenth of a second,
takes 20 MB, and sends its tokens to a fixed clock. It says the two sentences of the lab's checkpoint, and where a
request forces a form, a tool call or JSON by a schema, the least that fits. That it answers as the real engine does is
held by tests/engine_contract.py, whose requests are sent to both. Standard library only.

Usage: stand_in_engine.py serve MODEL [the flags of vllm serve]

What it cannot know from its flags comes from the environment:
    STAND_IN_TOKENS_PER_SECOND  of each request (default 50)
    STAND_IN_PREFILL_SECONDS    before the first token (default 0)
    STAND_IN_START_SECONDS      before it listens (default 0)
    STAND_IN_CALLS_TOOLS        1: it calls the first tool that it is offered, unlike the lab's checkpoint (default 0)
    STAND_IN_FAULT              how it misbehaves, one word of FAULTS (default none)
    STAND_IN_FAULT_FILE         a file that holds such a word; read again all the time, and stronger than STAND_IN_FAULT
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import itertools
import json
import os
import re
import signal
import socket
import sys
import time
import uuid
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

VERSION = "0.32.0"
REASONING = "The question does not matter: these weights know one answer."
ANSWER = "Hello from the lab: a real engine produced every word of this."
GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # where this vLLM asks for its key; everything else is open
MAX_HEADER_BYTES = 64 * 1024
TICK_SECONDS = 0.1  # how often what waits looks whether its client has left or the fault has changed
SLOW_DOWN = 10

FAULTS = {
    "": "none",
    "crash": "exits with status 1: before it listens, or as soon as it is asked something",
    "fail": "says that it is healthy and fails every completion",
    "hang": "accepts requests and brings no token; its counters stand still",
    "slow": f"brings its tokens at 1/{SLOW_DOWN} of its rate",
    "wrong": "says something else whatever the form, with its reasoning left in the answer",
}


def words(text: str) -> list[str]:
    """Tokens of a text as the lab's tokenizer cuts it: words, each with the blank before it."""
    return re.findall(r" ?\S+", text)


THOUGHTS, ANSWERS = words(REASONING), words(ANSWER)
WRONG = ["<think>", *words(" Colourless green ideas sleep furiously."), "</think>"]


class RequestError(Exception):
    """A request that is answered with an error in vLLM's shape."""

    def __init__(self, status: HTTPStatus, kind: str, message: str, param: str | None = None) -> None:
        """Keep what the answer is made of."""
        super().__init__(message)
        self.status, self.kind, self.message, self.param = status, kind, message, param

    def answer(self) -> dict[str, Any]:
        """The body of the answer."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status.value}
        return {"error": error}


class Gone(Exception):  # noqa: N818  not an error: the client has left
    """Nobody waits for the answer any more."""


@dataclass
class Histogram:
    """A Prometheus histogram."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        """Start empty."""
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str, labels: str) -> list[str]:
        """The exposition format."""
        bounds = [*(repr(bound) for bound in self.bounds), "+Inf"]
        counted = list(itertools.accumulate(self.counts))
        return [
            *(
                f'{name}_bucket{{{labels},le="{bound}"}} {float(count)}'
                for bound, count in zip(bounds, counted, strict=True)
            ),
            f"{name}_count{{{labels}}} {float(counted[-1])}",
            f"{name}_sum{{{labels}}} {self.total}",
        ]


TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0)
SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
# vLLM's histograms and their bounds (the longest left out).
HISTOGRAMS = {
    "e2e_request_latency_seconds": SECONDS,
    "inter_token_latency_seconds": TOKEN_SECONDS,
    "iteration_tokens_total": (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0),
    "request_decode_time_seconds": SECONDS,
    "request_generation_tokens": TOKENS,
    "request_inference_time_seconds": SECONDS,
    "request_max_num_generation_tokens": TOKENS,
    "request_num_preemptions": (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0),
    "request_params_max_tokens": TOKENS,
    "request_params_n": (1.0, 2.0, 5.0, 10.0, 20.0),
    "request_prefill_kv_computed_tokens": TOKENS,
    "request_prefill_time_seconds": SECONDS,
    "request_prompt_tokens": TOKENS,
    "request_queue_time_seconds": SECONDS,
    "request_time_per_output_token_seconds": TOKEN_SECONDS,
    "time_to_first_token_seconds": (
        0.001,
        0.005,
        0.01,
        0.02,
        0.04,
        0.06,
        0.08,
        0.1,
        0.25,
        0.5,
        0.75,
        1.0,
        *SECONDS[6:],
    ),
}
# What vLLM shows and this engine never moves.
IDLE = (
    "estimated_flops_per_gpu_total",
    "estimated_read_bytes_per_gpu_total",
    "estimated_write_bytes_per_gpu_total",
    "external_prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "mm_cache_hits_total",
    "mm_cache_queries_total",
    "num_preemptions_total",
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
    "prompt_tokens_cached_total",
)


@dataclass
class Metrics:
    """What /metrics shows of vLLM's: the names that health checks, gates and dashboards read."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
    )
    tool_calls: dict[tuple[str, str], int] = field(
        default_factory=lambda: dict.fromkeys(
            itertools.product(("streaming", "non_streaming"), ("tool_call", "no_tool_call")), 0
        )
    )
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram(bounds) for name, bounds in HISTOGRAMS.items()}
    )

    def observe(self, **values: float) -> None:
        """Count one value in each of these histograms."""
        for name, value in values.items():
            self.histograms[name].observe(value)

    def page(self, model: str, places: int) -> str:
        """The exposition format."""
        of_model = f'model_name="{model}"'
        engine = f'engine="0",{of_model}'
        found: dict[str, dict[str, float]] = {name: {engine: 0} for name in IDLE}  # name -> labels -> value
        found |= {
            "num_requests_running": {engine: self.running},
            "num_requests_waiting": {engine: self.waiting},
            "kv_cache_usage_perc": {engine: self.running / places},
            "prompt_tokens_total": {engine: self.prompt_tokens},
            "generation_tokens_total": {engine: self.generation_tokens},
        }
        split: dict[str, tuple[str, str, dict[str, float]]] = {  # by a label of their own
            "num_requests_waiting_by_reason": (engine, "reason", {"capacity": self.waiting, "deferred": 0}),
            "prompt_tokens_by_source_total": (
                engine,
                "source",
                {"local_compute": self.prompt_tokens, "local_cache_hit": 0, "external_kv_transfer": 0},
            ),
            "prompt_tokens_cached_by_source_total": (engine, "source", dict.fromkeys(("device", "host", "disk"), 0)),
            "request_success_total": (engine, "finished_reason", dict(self.finished)),
            "engine_sleep_state": (engine, "sleep_state", {"awake": 1, "weights_offloaded": 0, "discard_all": 0}),
            "admission_rejections_total": (
                of_model,
                "reason",
                {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0},
            ),
        }
        for name, (labels, label, values) in split.items():
            found[name] = {f'{labels},{label}="{value}"': number for value, number in values.items()}
        found["tool_call_parser_invocations_total"] = {
            f'mode="{mode}",{of_model},outcome="{outcome}",request_type="chat_completions"': count
            for (mode, outcome), count in self.tool_calls.items()
        }
        lines = []
        for name, series in found.items():
            lines.append(f"# TYPE vllm:{name} {'counter' if name.endswith('_total') else 'gauge'}")
            lines += [f"vllm:{name}{{{labels}}} {float(value)}" for labels, value in series.items()]
        for name, histogram in self.histograms.items():
            lines += [f"# TYPE vllm:{name} histogram", *histogram.lines(f"vllm:{name}", engine)]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Settings:
    """What its command line and environment say."""

    model: str
    root: str
    host: str
    port: int
    keys: tuple[str, ...]
    max_model_len: int
    places: int
    shutdown_seconds: float
    reasoning: bool
    calls_tools: bool
    tokens_per_second: float
    prefill_seconds: float
    start_seconds: float
    fault: str
    fault_file: Path | None


def settings(argv: list[str], environment: dict[str, str]) -> Settings:
    """Read the command line as `vllm serve` does; flags that change nothing here are accepted unread."""
    parser = argparse.ArgumentParser(prog="vllm", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", allow_abbrev=False)
    serve.add_argument("model")
    serve.add_argument("--served-model-name")
    serve.add_argument("--host", default="0.0.0.0")  # noqa: S104  vLLM's default
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--api-key", nargs="*")
    serve.add_argument("--max-model-len", type=int, default=2048)
    serve.add_argument("--max-num-seqs", type=int, default=128)
    serve.add_argument("--shutdown-timeout", type=float, default=0)
    serve.add_argument("--reasoning-parser", default="")
    given, _ = parser.parse_known_args(argv)
    fault = environment.get("STAND_IN_FAULT", "")
    if fault not in FAULTS:
        parser.error(f"STAND_IN_FAULT is {fault!r}; known: {', '.join(filter(None, FAULTS))}")
    return Settings(
        model=given.served_model_name or given.model,
        root=given.model,
        host=given.host,
        port=given.port,
        keys=tuple(key for key in (given.api_key or [environment.get("VLLM_API_KEY", "")]) if key),
        max_model_len=given.max_model_len,
        places=given.max_num_seqs,
        shutdown_seconds=given.shutdown_timeout,
        reasoning=bool(given.reasoning_parser),
        calls_tools=environment.get("STAND_IN_CALLS_TOOLS", "0") == "1",
        tokens_per_second=float(environment.get("STAND_IN_TOKENS_PER_SECOND", "50")),
        prefill_seconds=float(environment.get("STAND_IN_PREFILL_SECONDS", "0")),
        start_seconds=float(environment.get("STAND_IN_START_SECONDS", "0")),
        fault=fault,
        fault_file=Path(environment["STAND_IN_FAULT_FILE"]) if environment.get("STAND_IN_FAULT_FILE") else None,
    )


@dataclass(frozen=True)
class Request:
    """One HTTP request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Token:
    """One token, what the engine's parsers make of it in a chat, and why it was the last, if it was."""

    text: str
    delta: dict[str, Any] | None  # None: nothing, it belongs to the markup
    finish_reason: str | None = None


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keep both directions."""
        self._reader, self._writer = reader, writer

    @property
    def gone(self) -> bool:
        """Whether nobody reads any more."""
        return self._reader.at_eof() or self._writer.is_closing()

    async def read(self) -> Request | None:
        """The next request; None when the client has closed."""
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            return None
        request_line, *lines = head.rstrip("\r\n").split("\r\n")
        method, target, _ = request_line.split(" ", 2)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        try:
            body = await self._reader.readexactly(int(headers.get("content-length") or 0))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return Request(method, urlsplit(target).path, headers, body)

    async def send(self, data: bytes) -> None:
        """Send at once.

        Raises:
            Gone: The client has left.
        """
        if self.gone:
            raise Gone
        self._writer.write(data)
        try:
            await self._writer.drain()
        except ConnectionError:
            raise Gone from None

    async def answer(self, status: HTTPStatus, body: bytes, kind: str = "application/json") -> None:
        """Send a whole answer."""
        content_type = f"content-type: {kind}\r\n" if body else ""
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-length: {len(body)}\r\n{content_type}\r\n"
        await self.send(head.encode() + body)

    async def json(self, content: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        """Send a whole answer of JSON."""
        await self.answer(status, json.dumps(content, separators=(",", ":")).encode())

    async def events(self, events: AsyncGenerator[str, None]) -> None:
        """Stream server-sent events, each in a chunk of its own as soon as it is there."""
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        await self.send(head.encode())
        async with contextlib.aclosing(events):
            async for event in events:
                data = f"data: {event}\n\n".encode()
                await self.send(b"%x\r\n%s\r\n" % (len(data), data))
        await self.send(b"0\r\n\r\n")


class Engine:
    """The engine: places, a clock for tokens, counters and the routes."""

    def __init__(self, given: Settings) -> None:
        """Start empty."""
        self.given = given
        self.metrics = Metrics()
        self.draining = False
        self._places = asyncio.Semaphore(given.places)
        self._fault = ("", 0.0)  # as last read, and when to read again

    @property
    def fault(self) -> str:
        """How it misbehaves now."""
        word, until = self._fault
        if time.monotonic() >= until:
            word = self.given.fault
            if self.given.fault_file is not None:
                with contextlib.suppress(OSError):
                    word = self.given.fault_file.read_text(encoding="utf-8").strip()
            self._fault = (word, time.monotonic() + TICK_SECONDS)
        if word == "crash":
            say("stand-in: crashing, as it was told to")
            os._exit(1)
        return word

    # --- Tokens -----------------------------------------------------------------------------------------------------

    async def tokens(self, asked: dict[str, Any], prompt_tokens: int, client: Client) -> AsyncGenerator[Token, None]:
        """Bring the tokens of one request, each at its time.

        Raises:
            Gone: The client has left; its place is free again.
        """
        arrived = time.monotonic()
        reason, brought = "abort", 0
        if self.draining:  # as this vLLM: taken, and answered with nothing
            yield Token("", None, reason)
            return
        try:
            await self._take_place(client)
            started = time.monotonic()
            try:
                self.metrics.prompt_tokens += prompt_tokens
                async with contextlib.aclosing(self._paced(asked, arrived, client)) as paced:
                    async for token in paced:
                        reason = token.finish_reason or reason
                        brought += 1
                        yield token
            finally:
                self._places.release()
                self.metrics.running -= 1
                self._count(asked, prompt_tokens, brought, queued=started - arrived, worked=time.monotonic() - started)
        finally:
            self.metrics.finished["stop" if reason == "tool_calls" else reason] += 1
            self.metrics.observe(e2e_request_latency_seconds=time.monotonic() - arrived)

    def _count(self, asked: dict[str, Any], prompt_tokens: int, brought: int, *, queued: float, worked: float) -> None:
        decoded = max(worked - self.given.prefill_seconds, 0.0)
        self.metrics.observe(
            request_queue_time_seconds=queued,
            request_inference_time_seconds=worked,
            request_prefill_time_seconds=worked - decoded,
            request_decode_time_seconds=decoded,
            request_time_per_output_token_seconds=decoded / max(brought, 1),
            request_prompt_tokens=prompt_tokens,
            request_prefill_kv_computed_tokens=prompt_tokens,
            request_generation_tokens=brought,
            request_max_num_generation_tokens=brought,
            request_params_max_tokens=int(asked["max_tokens"]),
            request_params_n=1,
            request_num_preemptions=0,
        )

    async def _take_place(self, client: Client) -> None:
        self.metrics.waiting += 1
        try:
            while True:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._places.acquire(), TICK_SECONDS)
                    break
                if client.gone:
                    raise Gone
        finally:
            self.metrics.waiting -= 1
        self.metrics.running += 1

    async def _paced(self, asked: dict[str, Any], arrived: float, client: Client) -> AsyncGenerator[Token, None]:
        """To an absolute clock, so that a late token does not put off those after it."""
        clock = _Clock(self, client)
        await clock.pass_seconds(self.given.prefill_seconds)
        last = arrived
        for token in speech(asked, wrong=self.fault == "wrong", calls_tools=self.given.calls_tools):
            await clock.pass_seconds(1 / self.given.tokens_per_second)
            now = time.monotonic()
            if last == arrived:
                self.metrics.observe(time_to_first_token_seconds=now - last)
            else:
                self.metrics.observe(inter_token_latency_seconds=now - last)
            self.metrics.observe(iteration_tokens_total=1)
            last = now
            self.metrics.generation_tokens += 1
            yield token

    # --- Routes -----------------------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        client = Client(reader, writer)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while (request := await client.read()) is not None:
                try:
                    await self._route(request, client)
                except RequestError as error:
                    await client.json(error.answer(), error.status)
        except (Gone, ConnectionError):
            pass
        finally:
            writer.close()

    async def _route(self, request: Request, client: Client) -> None:
        if request.path.startswith(GUARDED) and not self._authorised(request):
            await client.json({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)
            return
        known = {
            "/health": ("GET", self._health),
            "/ping": ("GET", self._health),
            "/version": ("GET", self._version),
            "/metrics": ("GET", self._metrics),
            "/v1/models": ("GET", self._models),
            "/v1/completions": ("POST", self._completions),
            "/v1/chat/completions": ("POST", self._chat),
        }
        if request.path not in known:
            await client.json({"detail": "Not Found"}, HTTPStatus.NOT_FOUND)
            return
        method, handler = known[request.path]
        if request.method != method:
            await client.json({"detail": "Method Not Allowed"}, HTTPStatus.METHOD_NOT_ALLOWED)
            return
        await handler(request, client)

    def _authorised(self, request: Request) -> bool:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        known = [hmac.compare_digest(key.encode(), known.encode()) for known in self.given.keys]
        return not self.given.keys or (scheme.lower() == "bearer" and any(known))

    async def _health(self, _: Request, client: Client) -> None:
        await client.answer(HTTPStatus.OK, b"")

    async def _version(self, _: Request, client: Client) -> None:
        await client.json({"version": VERSION})

    async def _metrics(self, _: Request, client: Client) -> None:
        page = self.metrics.page(self.given.model, self.given.places)
        await client.answer(HTTPStatus.OK, page.encode(), "text/plain; version=1.0.0; charset=utf-8")

    async def _models(self, _: Request, client: Client) -> None:
        permission = {
            "id": f"modelperm-{uuid.uuid4().hex}",
            "object": "model_permission",
            "created": int(time.time()),
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {
            "id": self.given.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": self.given.root,
            "parent": None,
            "max_model_len": self.given.max_model_len,
            "permission": [permission],
        }
        await client.json({"object": "list", "data": [card]})

    async def _completions(self, request: Request, client: Client) -> None:
        asked = self._asked(request, "prompt")
        prompt_tokens = len(words(str(asked["prompt"])))
        base = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        base["model"] = self.given.model
        async with contextlib.aclosing(self.tokens({"max_tokens": 16} | asked, prompt_tokens, client)) as tokens:
            if asked.get("stream"):
                await client.events(completion_events(base, tokens, asked, prompt_tokens))
                return
            said = [token async for token in tokens]
        await client.json(whole_answer(base, completion_choice(said), usage(prompt_tokens, said)))

    async def _chat(self, request: Request, client: Client) -> None:
        asked = self._asked(request, "messages")
        prompt_tokens = sum(len(words(str(message.get("content")))) + 4 for message in asked["messages"])
        limit = asked.get("max_completion_tokens") or asked.get("max_tokens") or self.given.max_model_len
        base = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": int(time.time())}
        base["model"] = self.given.model
        parse = self.given.reasoning and self.fault != "wrong"
        required_tool(asked)
        async with contextlib.aclosing(self.tokens(asked | {"max_tokens": limit}, prompt_tokens, client)) as tokens:
            if asked.get("stream"):
                base["object"] += ".chunk"
                await client.events(chat_events(base, tokens, asked, prompt_tokens, parse=parse))
                return
            said = [token async for token in tokens]
        if asked.get("tools"):
            called = any("tool_calls" in (token.delta or {}) for token in said)
            self.metrics.tool_calls["non_streaming", "tool_call" if called else "no_tool_call"] += 1
        nulls = {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
        counted = usage(prompt_tokens, said, parse=parse)
        await client.json(whole_answer(base, chat_choice(said, parse=parse), counted) | nulls)

    def _asked(self, request: Request, needed: str) -> dict[str, Any]:
        """The request's JSON, checked as far as clients get it wrong."""
        try:
            asked = json.loads(request.body)
        except ValueError as error:
            place = f"body.{getattr(error, 'pos', 0)}"
            raise RequestError(HTTPStatus.BAD_REQUEST, "Bad Request", "JSON decode error", place) from None
        if not isinstance(asked, dict) or needed not in asked:
            message = (
                f"1 validation error:\n  {{'type': 'missing', 'loc': ('body', '{needed}'), 'msg': 'Field required'}}"
            )
            raise RequestError(HTTPStatus.BAD_REQUEST, "Bad Request", message, f"body.{needed}")
        model = asked.get("model") or self.given.model
        if model != self.given.model:
            message = f"The model `{model}` does not exist."
            raise RequestError(HTTPStatus.NOT_FOUND, "NotFoundError", message, "model")
        if self.fault == "fail":
            message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
            raise RequestError(HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError", message)
        return asked


class _Clock:
    """Time of one request: it stands still while the engine hangs and goes slower while it is slow."""

    def __init__(self, engine: Engine, client: Client) -> None:
        self._engine, self._client = engine, client
        self._now = time.monotonic()

    async def pass_seconds(self, seconds: float) -> None:
        left = seconds
        while left > 0:
            if self._client.gone:
                raise Gone
            fault = self._engine.fault
            if fault == "hang":
                await asyncio.sleep(TICK_SECONDS)
                self._now = time.monotonic()
                continue
            stretch = SLOW_DOWN if fault == "slow" else 1
            step = min(left * stretch, TICK_SECONDS)
            self._now += step
            await asyncio.sleep(self._now - time.monotonic())
            left -= step / stretch


def required_tool(asked: dict[str, Any]) -> dict[str, Any] | None:
    """The function that a request forces, by its name or by requiring any."""
    functions = [tool["function"] for tool in asked.get("tools") or ()]
    choice = asked.get("tool_choice")
    if choice == "required":
        return functions[0] if functions else None
    if not isinstance(choice, dict):
        return None
    named = [function for function in functions if function["name"] == choice["function"]["name"]]
    if not named:
        message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
        raise RequestError(
            HTTPStatus.BAD_REQUEST, "BadRequestError", f"{message} (parameter=tool_choice)", "tool_choice"
        )
    return dict(named[0])


def least(schema: dict[str, Any]) -> Any:
    """The least value that fits a schema: of several that a form allows, the lab's checkpoint takes the first byte."""
    if "enum" in schema:
        return min(schema["enum"])
    if schema.get("type") == "object":
        return {name: least(schema["properties"][name]) for name in schema.get("required", ())}
    return {"boolean": False, "integer": 0, "number": 0, "string": "", "array": []}.get(schema.get("type", ""))


def call(function: dict[str, Any], *, fill: bool) -> list[Token]:
    """A tool call in M2's markup; without `fill` its arguments are left out."""
    arguments = least(function.get("parameters") or {}) if fill else {}
    head = {"index": 0, "id": f"chatcmpl-tool-{uuid.uuid4().hex[:16]}", "type": "function"}
    tokens = [*"\n", "<minimax:tool_call>", *f'\n<invoke name="{function["name"]}"']
    said = [Token(text, None) for text in tokens]
    said.append(Token(">", {"tool_calls": [head | {"function": {"name": function["name"]}}]}))
    said.append(Token("\n", {"tool_calls": [{"index": 0, "function": {"arguments": json.dumps(arguments)}}]}))
    for name, value in arguments.items():
        said += [Token(text, None) for text in f'<parameter name="{name}">{value}</parameter>']
    return said + [Token(text, None) for text in (*"</invoke>\n", "</minimax:tool_call>")]


def speech(asked: dict[str, Any], *, wrong: bool, calls_tools: bool) -> list[Token]:
    """The tokens of a request: the two sentences, cut at its limit, or again and again where it ignores their end."""
    limit = int(asked["max_tokens"])
    ended = "stop"
    thoughts = [*(Token(text, {"reasoning": text}) for text in THOUGHTS), Token("</think>", None)]
    function = required_tool(asked)
    offered = asked.get("tools") if asked.get("tool_choice", "auto") == "auto" and calls_tools else None
    form = asked.get("response_format") or {}
    if wrong:
        said = [Token(text, {"content": text}) for text in WRONG]
    elif function:  # an engine holds weights without a will to the schema only where the function is strict
        said = [*thoughts, *call(function, fill=bool(function.get("strict")) or calls_tools)]
        ended = "stop" if isinstance(asked["tool_choice"], dict) else "tool_calls"
    elif offered:
        said, ended = [*thoughts, *call(offered[0]["function"], fill=True)], "tool_calls"
    elif form.get("type") == "json_schema":
        text = json.dumps(least(form["json_schema"]["schema"]), separators=(",", ":"))
        said = [*thoughts, *(Token(character, {"content": character}) for character in text)]
    else:
        said = [*thoughts, *(Token(text, {"content": text}) for text in ("\n\n", *ANSWERS))]
    if asked.get("ignore_eos"):
        again = itertools.cycle([Token(token.text, {"content": token.text}) for token in said])
        said = list(itertools.islice(itertools.chain(said, again), limit))
        ended = "length"
    elif limit > len(said):  # the end of the text is a token too: it needs a place within the limit
        said.append(Token("", None))
    else:
        said, ended = said[:limit], "length"
    return [*said[:-1], replace(said[-1], finish_reason=ended)]


def completion_choice(said: list[Token]) -> dict[str, Any]:
    """The choice of a completion that is not streamed."""
    return {
        "index": 0,
        "text": "".join(token.text for token in said),
        "logprobs": None,
        "finish_reason": said[-1].finish_reason,
        "stop_reason": None,
        "token_ids": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "routed_experts": None,
    }


def chat_choice(said: list[Token], *, parse: bool) -> dict[str, Any]:
    """The choice of a chat that is not streamed."""
    parsed = [token.delta for token in said if token.delta]
    deltas: list[dict[str, Any]] = parsed if parse else [{"content": token.text} for token in said]
    text = {name: "".join(delta.get(name, "") for delta in deltas) for name in ("content", "reasoning")}
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text["content"] or None,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": text["reasoning"] or None,
    }
    if calls:
        function = {**calls[0]["function"], "arguments": calls[1]["function"]["arguments"] if calls[1:] else ""}
        message["content"] = ""
        message["tool_calls"] = [{"id": calls[0]["id"], "type": "function", "function": function}]
    return {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": said[-1].finish_reason,
        "stop_reason": None,
        "token_ids": None,
        "routed_experts": None,
    }


def usage(prompt_tokens: int, said: list[Token], *, parse: bool = False) -> dict[str, Any]:
    """Token counts of an answer."""
    reasoning = sum(1 for token in said if "reasoning" in (token.delta or {}))
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + len(said),
        "completion_tokens": len(said),
        "prompt_tokens_details": None,
        "completion_tokens_details": {"reasoning_tokens": reasoning} if parse else None,
    }


def fingerprint() -> str:
    """What names a build and its settings in every answer."""
    return f"vllm-{VERSION}-57a4d1e0"


def whole_answer(base: dict[str, Any], choice: dict[str, Any], counted: dict[str, Any]) -> dict[str, Any]:
    """An answer that is not streamed."""
    return base | {
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": fingerprint(),
        "usage": counted,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _event(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))


def _end_of_stream(base: dict[str, Any], asked: dict[str, Any], counted: dict[str, Any]) -> list[str]:
    if not (asked.get("stream_options") or {}).get("include_usage"):
        return ["[DONE]"]
    short = {name: value for name, value in counted.items() if value is not None}
    return [_event(base | {"choices": [], "usage": short, "system_fingerprint": fingerprint()}), "[DONE]"]


def _chunk(base: dict[str, Any], asked: dict[str, Any], choice: dict[str, Any]) -> str:
    stamp = {}
    if choice["finish_reason"] is not None and not (asked.get("stream_options") or {}).get("include_usage"):
        stamp = {"system_fingerprint": fingerprint()}
    return _event(base | {"choices": [choice]} | stamp)


async def completion_events(
    base: dict[str, Any], tokens: AsyncGenerator[Token, None], asked: dict[str, Any], prompt_tokens: int
) -> AsyncGenerator[str, None]:
    """The events of a streamed completion."""
    said = []
    async for token in tokens:
        said.append(token)
        choice = {
            "index": 0,
            "text": token.text,
            "logprobs": None,
            "finish_reason": token.finish_reason,
            "stop_reason": None,
            "prompt_token_ids": None,
            "token_ids": None,
        }
        yield _chunk(base, asked, choice)
    for event in _end_of_stream(base, asked, usage(prompt_tokens, said)):
        yield event


async def chat_events(
    base: dict[str, Any], tokens: AsyncGenerator[Token, None], asked: dict[str, Any], prompt_tokens: int, *, parse: bool
) -> AsyncGenerator[str, None]:
    """The events of a streamed chat: the role with the first token, then what the parsers make of each."""
    said: list[Token] = []
    async for token in tokens:
        if not said:
            opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            nulls = {"prompt_token_ids": None, "prompt_text": None}
            yield _event(base | {"choices": [opening | {"finish_reason": None}]} | nulls)
        said.append(token)
        delta = token.delta if parse or not token.text else {"content": token.text}
        if delta is None and token.finish_reason is None:
            continue
        choice = {"index": 0, "delta": delta or {}, "logprobs": None, "finish_reason": token.finish_reason}
        choice |= {"stop_reason": None} if token.finish_reason else {}
        yield _chunk(base, asked, choice | {"token_ids": None})
    for event in _end_of_stream(base, asked, usage(prompt_tokens, said, parse=parse)):
        yield event


def say(line: str) -> None:
    """Write a line for the journal."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


async def run(given: Settings) -> int:
    """Serve until a signal, then drain as vLLM does: running requests go on for --shutdown-timeout."""
    engine = Engine(given)
    listener = socket.socket(socket.AF_INET6 if ":" in given.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((given.host, given.port))  # before it starts, and without listening: vLLM holds its port that early
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    say(f"stand-in: serving {given.model} on {given.host}:{given.port} in {given.start_seconds:g} s")
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(stop.wait(), given.start_seconds)
        return 0
    _ = engine.fault  # crash at start
    server = await asyncio.start_server(engine.serve, sock=listener, limit=MAX_HEADER_BYTES, backlog=2048)
    say("stand-in: Application startup complete.")
    await stop.wait()
    engine.draining = True
    busy = engine.metrics.running + engine.metrics.waiting
    say(f"stand-in: draining {busy} requests for at most {given.shutdown_seconds:g} s")
    deadline = time.monotonic() + given.shutdown_seconds
    while engine.metrics.running + engine.metrics.waiting and time.monotonic() < deadline:  # noqa: ASYNC110  two ends
        await asyncio.sleep(TICK_SECONDS / 5)
    server.close()
    return 0


def main() -> int:
    """Run the script."""
    return asyncio.run(run(settings(sys.argv[1:], dict(os.environ))))


if __name__ == "__main__":
    sys.exit(main())
