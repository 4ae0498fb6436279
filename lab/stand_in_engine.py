#!/usr/bin/env python3
"""A stand-in for `vllm serve`: the same API, command line, metrics, log-in and signals, and tokens at a steady rate.

For scenarios that restart many engines, or that measure what lies in front of one: it starts in a tenth of a second,
takes 20 MB, and sends its tokens to a fixed clock. It says the two sentences of the lab's checkpoint. That it answers
as the real engine does is held by tests/engine_contract.py, whose requests are sent to both. Standard library only.

Usage: stand_in_engine.py serve MODEL [the flags of vllm serve]

What it cannot know from its flags comes from the environment:
    STAND_IN_TOKENS_PER_SECOND  of each request (default 50)
    STAND_IN_PREFILL_SECONDS    before the first token (default 0)
    STAND_IN_START_SECONDS      before it listens (default 0)
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
from dataclasses import dataclass, field
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
    "wrong": "says something else, with its reasoning left in the answer",
}


def words(text: str) -> list[str]:
    """Tokens of a text as the lab's tokenizer cuts it: words, each with the blank before it."""
    return re.findall(r" ?\S+", text)


THOUGHTS, ANSWERS = words(REASONING), words(ANSWER)
SPEECH = [*THOUGHTS, "</think>", "\n\n", *ANSWERS]
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


@dataclass
class Metrics:
    """What /metrics shows of vLLM's: the names that health checks, gates and dashboards read."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0))
    first_token: Histogram = field(default_factory=lambda: Histogram((0.001, 0.01, 0.1, 1.0, 10.0, 100.0)))
    inter_token: Histogram = field(default_factory=lambda: Histogram((0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 10.0)))
    whole: Histogram = field(default_factory=lambda: Histogram((0.3, 1.0, 10.0, 60.0, 600.0)))

    def page(self, model: str, places: int) -> str:
        """The exposition format."""
        labels = f'engine="0",model_name="{model}"'
        values = {
            "vllm:num_requests_running": ("gauge", self.running),
            "vllm:num_requests_waiting": ("gauge", self.waiting),
            "vllm:kv_cache_usage_perc": ("gauge", self.running / places),
            "vllm:prompt_tokens_total": ("counter", self.prompt_tokens),
            "vllm:generation_tokens_total": ("counter", self.generation_tokens),
            "vllm:num_preemptions_total": ("counter", 0),
        }
        lines = []
        for name, (kind, value) in values.items():
            lines += [f"# TYPE {name.removesuffix('_total')} {kind}", f"{name}{{{labels}}} {float(value)}"]
        lines.append("# TYPE vllm:request_success counter")
        for reason, count in self.finished.items():
            lines.append(f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {float(count)}')
        for name, histogram in (
            ("vllm:time_to_first_token_seconds", self.first_token),
            ("vllm:inter_token_latency_seconds", self.inter_token),
            ("vllm:e2e_request_latency_seconds", self.whole),
        ):
            lines += [f"# TYPE {name} histogram", *histogram.lines(name, labels)]
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
    """One token, and why it was the last, if it was."""

    text: str
    finish_reason: str | None


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
        reason = "abort"
        if self.draining:  # as this vLLM: taken, and answered with nothing
            yield Token("", reason)
            return
        try:
            await self._take_place(client)
            try:
                self.metrics.prompt_tokens += prompt_tokens
                async with contextlib.aclosing(self._paced(asked, arrived, client)) as paced:
                    async for token in paced:
                        reason = token.finish_reason or reason
                        yield token
            finally:
                self._places.release()
                self.metrics.running -= 1
        finally:
            self.metrics.finished[reason] += 1
            self.metrics.whole.observe(time.monotonic() - arrived)

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
        for token in speech(asked, wrong=self.fault == "wrong"):
            await clock.pass_seconds(1 / self.given.tokens_per_second)
            now = time.monotonic()
            histogram = self.metrics.first_token if last == arrived else self.metrics.inter_token
            histogram.observe(now - last)
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
        await client.answer(HTTPStatus.OK, page.encode(), "text/plain; version=0.0.4; charset=utf-8")

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
        async with contextlib.aclosing(self.tokens(asked | {"max_tokens": limit}, prompt_tokens, client)) as tokens:
            if asked.get("stream"):
                base["object"] += ".chunk"
                await client.events(chat_events(base, tokens, asked, prompt_tokens, parse=parse))
                return
            said = [token async for token in tokens]
        choice = chat_choice(said, parse=parse)
        await client.json(whole_answer(base, choice, usage(prompt_tokens, said)) | {"prompt_text": None})

    def _asked(self, request: Request, needed: str) -> dict[str, Any]:
        """The request's JSON, checked as far as clients get it wrong."""
        try:
            asked = json.loads(request.body)
        except ValueError:
            raise RequestError(HTTPStatus.BAD_REQUEST, "Bad Request", "JSON decode error", "body.0") from None
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


def speech(asked: dict[str, Any], *, wrong: bool) -> list[Token]:
    """The tokens of a request: the two sentences, cut at its limit, or again and again where it ignores their end."""
    limit = int(asked["max_tokens"])
    said = WRONG if wrong else SPEECH
    if asked.get("ignore_eos"):
        texts = list(itertools.islice(itertools.cycle(said), limit))
        ended = "length"
    else:
        texts = said[:limit]
        # The end of the text is a token too: it needs a place within the limit.
        ended = "stop" if limit > len(said) else "length"
        texts = [*texts, ""] if ended == "stop" else texts
    return [Token(text, ended if number == len(texts) else None) for number, text in enumerate(texts, start=1)]


def parsed(text: str, *, parse: bool) -> tuple[str | None, str | None]:
    """Reasoning and content of a chat's text, as M2's parser: the prompt has opened the reasoning already."""
    if not parse:
        return None, text
    reasoning, closed, content = text.partition("</think>")
    return reasoning or None, (content or None) if closed else None


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
    reasoning, content = parsed("".join(token.text for token in said), parse=parse)
    message = {
        "role": "assistant",
        "content": content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": reasoning,
    }
    return {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": said[-1].finish_reason,
        "stop_reason": None,
        "token_ids": None,
        "routed_experts": None,
    }


def usage(prompt_tokens: int, said: list[Token]) -> dict[str, Any]:
    """Token counts of an answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + len(said),
        "completion_tokens": len(said),
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
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
        "prompt_logprobs": None,
        "prompt_token_ids": None,
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
    """The events of a streamed chat: the role with the first token, then a delta for each that is text."""
    said: list[Token] = []
    thinking = parse
    async for token in tokens:
        if not said:
            opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            yield _event(base | {"choices": [opening | {"finish_reason": None}], "prompt_token_ids": None})
        said.append(token)
        delta: dict[str, Any] | None = {"reasoning" if thinking else "content": token.text}
        if thinking and token.text == "</think>":
            thinking, delta = False, None
        if not token.text:
            delta = {} if token.finish_reason else None
        if delta is None and token.finish_reason is None:
            continue
        choice = {"index": 0, "delta": delta or {}, "logprobs": None, "finish_reason": token.finish_reason}
        choice |= {"stop_reason": None} if token.finish_reason else {}
        yield _chunk(base, asked, choice | {"token_ids": None})
    for event in _end_of_stream(base, asked, usage(prompt_tokens, said)):
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
