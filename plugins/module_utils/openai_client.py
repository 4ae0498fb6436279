"""What a client of an OpenAI-compatible server sees: checks that each end at a deadline.

An open port and a `/health` that says 200 prove nothing: an engine with a wrong configuration passes both and dies at
the first token. So every check here is a request that a client would send, and only tokens that came back count.

The file is used twice. The module `openai_probe` imports it, and it is copied to hosts as a script:

    python3 openai_client.py wait --url http://127.0.0.1:8001 --model M --key-file PATH --deadline-seconds 900
    python3 openai_client.py check --url http://127.0.0.1:8001 --model M --key-file PATH --format json

`wait` is a unit's `ExecStartPost=`: it returns when the first completion brought tokens. A new check is a function
like `check_models` and a line in `CHECKS`.

What a model's card promises (`contract`) is checked where it is given, by `--plan` or the module's option: reasoning
apart from the answer, tool calls that parse, JSON that fits a schema. What cannot be checked is said and never passed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import json
import os
import re
import secrets
import socket
import ssl
import sys
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NoReturn
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

MAX_ANSWER_BYTES = 4 * 1024 * 1024  # far above any answer asked for here; a server that floods is cut off
MODEL_LIST_SECONDS = 10.0  # answered from memory, so `wait` does not spend its whole deadline on a hung list
MAX_SECONDS = 86400  # a day: no deadline or pause is longer, and sockets refuse what is not a real number of seconds
CHAT_TOKENS = 256  # enough to think about a greeting and to give it
FORM_TOKENS = 1024  # enough to think about a tool or a form, and to fill it
EXCERPT_CHARACTERS = 80  # of what a model said, in a sentence that says more than that
CUT_SHORT = "closed the connection in the middle of its answer"
KEY_PATTERN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # a bearer token, RFC 6750 section 2.1; so NAME=KEY is none

# What may pass by itself while a server starts. Everything else is an answer, and asking again will not change it.
RETRYABLE_KINDS = frozenset({"unreachable", "not_ready", "late"})

NEXT_STEPS = {
    "unreachable": "Check that the server runs and listens there: {logs}.",
    "not_ready": "It is still starting, or every slot is taken: wait, then {logs}.",
    "late": "It hangs or is overloaded: {logs}; raise the deadline only if it is known to be this slow.",
    "refused": "Check that the key given here is the one the server was started with.",
    "not_found": "Check the address, the port of the replica meant here and the server's --served-model-name.",
    "open_door": "Start the server with an API key, or close the route at the gateway, before anyone can reach it.",
    "tls": "Check the server's certificate, its name and the CA file, and that this port speaks TLS.",
    "bad_answer": "The server is up but broken for clients: {logs}.",
    "reasoning": (
        "Compare --reasoning-parser ({command}) with engine.reasoning_parser of the model's card: with another model's "
        "parser, or none, reasoning and answer are not told apart."
    ),
    "tools": (
        "Compare --tool-call-parser and --enable-auto-tool-choice ({command}) with engine.tool_parser of the model's "
        "card, and see that the chat template offers tools to the model."
    ),
    "json_schema": (
        "See whether a --structured-outputs-config loosens what the engine forces ({command}), and what it says of the "
        "form: {logs}."
    ),
}

# What reasoning, and a tool call, is wrapped in before the engine's parsers have taken it out of the answer.
REASONING_MARKUP = re.compile(r"</?think>|<\|channel\|>|\[/?THINK\]|[\u25c1]/?think[\u25b7]")
TOOL_MARKUP = re.compile(r"</?[\w:|\u2581\uff5c]*tool[_\u2581]calls?|<invoke |<\uff5cDSML")
# A form that ends by itself whatever weights fill it: an engine that forces it leaves them little to choose.
WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Paris", "Rome"]},
        "fahrenheit": {"type": "boolean"},
    },
    "required": ["city", "fahrenheit"],
    "additionalProperties": False,
}
TOOL_NAME = "get_weather"
DEFAULT_PATHS = ("/v1/models", "/v1/completions", "/v1/chat/completions")
# What an engine serves to anybody, or to who has its key, and a gateway must not pass on unless it says so.
ENGINE_PATHS = ("/metrics", "/version", "/invocations", "/tokenize", "/v1/load_lora_adapter", "/collective_rpc")


class InputError(ValueError):
    """An argument cannot be used; the message says which, why and what to give instead, and never shows the key."""


class DeadlineError(Exception):
    """The deadline has passed."""


class CheckError(Exception):
    """A check failed; `kind` is a key of NEXT_STEPS and `seen` one sentence about what the server did."""

    def __init__(self, kind: str, seen: str) -> None:
        """Keep the kind beside the sentence."""
        super().__init__(seen)
        self.kind = kind
        self.seen = seen


class NotCheckableError(Exception):
    """Nothing can be said: the sentence says why."""


@dataclass(frozen=True)
class Contract:
    """What a model's card promises to clients.

    Attributes:
        reasoning: Its reasoning comes in the field `reasoning`, apart from its answer.
        tools: True: it calls tools; "forced": only where the request forces it to; False: it does not.
        json_schema: Its answer fits the JSON schema that the request gives.

    Raises:
        InputError: A value cannot be used.
    """

    reasoning: bool
    tools: bool | str
    json_schema: bool

    def __post_init__(self) -> None:
        """Refuse what no card says."""
        for name, value in asdict(self).items():
            if not isinstance(value, bool) and (name, value) != ("tools", "forced"):
                raise InputError(
                    "contract: {0} is {1!r}; give true or false{2}.".format(
                        name, value, ', or "forced"' if name == "tools" else ""
                    )
                )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Contract:
        """Read it as a card or a plan has it."""
        known = set(cls.__annotations__)
        if set(data) != known:
            raise InputError(f"contract: has {sorted(data)}; give {', '.join(sorted(known))}, as a model's card does.")
        return cls(**data)


@dataclass(frozen=True)
class Endpoint:
    """A server to probe.

    Attributes:
        url: `http://HOST:PORT` or `https://HOST[:PORT]`, without `/v1`.
        model: The served model name.
        api_key: The key that clients use; never part of a representation or a message.
        ca_file: PEM file of the authority that signed the server's certificate; None takes the system's.
        server_name: The name that the certificate must be valid for, where the url holds an address that clients do not
            use; None is the url's own.
        unit: systemd unit behind the address, named in hints; None when it is unknown.
        contract: What the model's card promises; None where nobody has said.
        gateway_paths: Of a gateway, the paths that it serves; None of an engine.

    Raises:
        InputError: A value cannot be used.
    """

    url: str
    model: str
    api_key: str = field(repr=False)
    ca_file: str | None = None
    unit: str | None = None
    server_name: str | None = None
    contract: Contract | None = None
    gateway_paths: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Refuse what could only fail later, or would show the key in someone else's error message."""
        if "@" in self.url:
            raise InputError("url: holds a user name or password; give http://HOST:PORT and the key by itself.")
        try:
            parts = urlsplit(self.url)
            host, _ = parts.hostname, parts.port
            (host or "").encode("idna")
        except ValueError as error:
            raise InputError(f"url: {self.url!r} is not an address ({error}); give http://HOST:PORT.") from None
        if parts.scheme not in {"http", "https"} or not host:
            raise InputError(f"url: {self.url!r} is not an http or https address; give http://HOST:PORT.")
        if parts.path not in {"", "/"} or parts.query or parts.fragment:
            raise InputError(f"url: {self.url!r} goes on after the port; give the server's root, without /v1.")
        if not self.model:
            raise InputError("model: is empty; give the served model name, as in the server's /v1/models.")
        if not KEY_PATTERN.fullmatch(self.api_key):
            raise InputError(
                "api_key: is empty or not a bearer token (letters, digits, . _ ~ + / -); give the bare key."
            )
        https_only = "ca_file" if self.ca_file is not None else "server_name" if self.server_name is not None else ""
        if https_only and parts.scheme != "https":
            raise InputError(f"{https_only}: given for {self.url!r}, which is not https; drop it or correct the url.")
        if self.ca_file is not None:
            try:
                ssl.create_default_context(cafile=self.ca_file)
            except OSError as error:  # ssl.SSLError is one
                raise InputError(
                    f"ca_file: {self.ca_file} cannot be used ({error}); give a readable PEM file."
                ) from None

    @property
    def logs(self) -> str:
        """Where to look next, as a command when the unit is known."""
        return f"journalctl -u {self.unit} -n 100" if self.unit else "read the log of the server behind this address"

    @property
    def command(self) -> str:
        """Where the server's command line is to be seen."""
        return f"systemctl cat {self.unit}" if self.unit else "the server's command line"

    def excerpt(self, text: str, characters: int = 400) -> str:
        """Text that came from the server, short, on one line and without the key, which a server may echo."""
        line = " ".join(text.replace(self.api_key, "[key]").split())
        return line if len(line) <= characters else line[:characters] + "..."


@dataclass(frozen=True)
class CheckResult:
    """What one check saw.

    Attributes:
        check: Name in CHECKS.
        ok: Whether the server did what a client needs; None where that cannot be checked.
        kind: "ok", "not_checkable", or the kind of failure, a key of NEXT_STEPS.
        seconds: From the start of the check to its verdict.
        first_token_seconds: From the start of the check to the first text of a streamed answer; None elsewhere, and
            where every token of the answer decoded to no text.
        detail: One sentence on what was seen and, on failure, one on what to do next.
    """

    check: str
    ok: bool | None
    kind: str
    seconds: float
    first_token_seconds: float | None
    detail: str

    @property
    def retryable(self) -> bool:
        """Whether the same check may succeed a little later by itself."""
        return self.kind in RETRYABLE_KINDS

    def as_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Seen:
    """What a successful check saw, in one sentence."""

    sentence: str
    first_token_seconds: float | None = None


class Deadline:
    """A total budget of seconds on the monotonic clock, shared by every step of a check."""

    def __init__(self, seconds: float) -> None:
        """Start counting."""
        self.seconds = seconds
        self._start = time.monotonic()

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def remaining(self) -> float:
        """Seconds left, always above zero.

        Raises:
            DeadlineError: Nothing is left.
        """
        left = self.seconds - self.elapsed()
        if left <= 0:
            raise DeadlineError
        return left


# --- Transport: http.client over a socket whose every read is given only what is left of the deadline ---------------


class _DeadlineReader(io.RawIOBase):
    """The read side of a socket: a server that drips one byte at a time still ends at the deadline."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)  # holds the socket open after http.client closes its own side
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._deadline.remaining())
        try:
            return self._raw.readinto(buffer)
        except socket.timeout:  # not yet TimeoutError in Python 3.9
            raise DeadlineError from None

    def close(self) -> None:
        self._raw.close()
        super().close()


class _DeadlineSocket:
    """The part of a socket that http.client uses."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock = sock
        self._deadline = deadline

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(self._deadline.remaining())  # sendall takes its timeout as a total
        self._sock.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_DeadlineReader(self._sock, self._deadline))

    def close(self) -> None:
        self._sock.close()


def _resolve(host: str, port: int, deadline: Deadline) -> list[Any]:
    """Look a name up; getaddrinfo knows no timeout, so it runs in a thread that is left behind when it is late."""
    found: list[Any] = []

    def look_up() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(deadline.remaining())
    if not found:
        raise DeadlineError
    if isinstance(found[0], OSError):
        raise found[0]
    return list(found[0])


def _connect(endpoint: Endpoint, host: str, port: int, deadline: Deadline) -> socket.socket:
    """Connect to the first address that accepts, with TLS where the url says https. Proxy variables are not read."""
    refusal: OSError = OSError("the name has no address")
    for family, kind, protocol, _, address in _resolve(host, port, deadline):
        with contextlib.ExitStack() as undo:
            try:
                sock = undo.enter_context(socket.socket(family, kind, protocol))
                sock.settimeout(deadline.remaining())
                sock.connect(address)
            except OSError as error:
                refusal = error
                continue
            if endpoint.url.startswith("https"):
                context = ssl.create_default_context(cafile=endpoint.ca_file)
                sock.settimeout(deadline.remaining())  # a handshake takes its timeout as a total
                sock = undo.enter_context(context.wrap_socket(sock, server_hostname=endpoint.server_name or host))
            undo.pop_all()
            return sock
    raise refusal


@contextlib.contextmanager
def _exchange(
    endpoint: Endpoint, deadline: Deadline, path: str, payload: dict[str, Any] | None, key: str | None
) -> Iterator[http.client.HTTPResponse]:
    """Send one request on its own connection: GET without a payload, POST of JSON with one."""
    parts = urlsplit(endpoint.url)
    host, port = str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80)
    headers = {"Accept": "application/json, text/event-stream", "Connection": "close"}
    body = None
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    if payload is not None:
        headers["Content-Type"] = "application/json"
        body = json.dumps(payload).encode()
    connection = http.client.HTTPConnection(host, port)
    with contextlib.closing(connection):
        connection.sock = _DeadlineSocket(_connect(endpoint, host, port, deadline), deadline)
        connection.request("GET" if payload is None else "POST", path, body=body, headers=headers)
        with contextlib.closing(connection.getresponse()) as response:
            yield response


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """A connection that ends in the middle of an answer is a broken answer, not a server that is still starting."""
    try:
        yield
    except (ConnectionError, ssl.SSLEOFError, http.client.IncompleteRead):
        raise CheckError("bad_answer", CUT_SHORT) from None


def _body(response: http.client.HTTPResponse) -> bytes:
    with _reading():
        body = response.read(MAX_ANSWER_BYTES + 1)
    if len(body) > MAX_ANSWER_BYTES:
        raise CheckError("bad_answer", f"sent more than {MAX_ANSWER_BYTES} bytes where a short answer was due")
    if response.length:  # what Content-Length promised and read(amount), unlike read(), does not miss
        raise CheckError("bad_answer", CUT_SHORT)
    return body


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The body as it arrives."""
    received = 0
    while True:
        with _reading():
            chunk = response.read1(65536)
        if not chunk:
            return
        received += len(chunk)
        if received > MAX_ANSWER_BYTES:
            raise CheckError("bad_answer", f"streamed more than {MAX_ANSWER_BYTES} bytes where a short answer was due")
        yield chunk


# --- Reading answers: pure functions ---------------------------------------------------------------------------------

_LINE_END = re.compile(rb"\r\n|\n|\r(?=[\s\S])")  # a final CR waits for its LF, which may be in the next chunk


def sse_data(chunks: Iterable[bytes]) -> Iterator[str]:
    """The `data` of each server-sent event, however the bytes were cut into chunks.

    Follows the event stream rules of https://html.spec.whatwg.org/multipage/server-sent-events.html: lines end with
    CRLF, LF or CR; lines of one event are joined with LF; comments and other fields are skipped; an event that its
    blank line does not finish is dropped.
    """
    data: list[str] = []
    for line in _lines(chunks):
        name, _, value = line.partition(":")
        if line == "" and data:
            yield "\n".join(data)
            data = []
        elif name == "data":
            data.append(value.removeprefix(" "))


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """The finished lines of a UTF-8 stream, without the byte order mark that may precede it."""
    pending = b""
    first = True
    for chunk in chunks:
        *lines, pending = _LINE_END.split(pending + chunk)
        for line in lines:
            text = line.decode(errors="replace")
            yield text[1:] if first and text.startswith("\ufeff") else text
            first = False
    if pending.endswith(b"\r"):
        yield pending[:-1].decode(errors="replace")


def stream_chunks(data: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a streamed answer up to its `[DONE]`.

    Raises:
        CheckError: An event is not a JSON object or carries an error, or the stream ended before `[DONE]`.
    """
    for text in data:
        if text.strip() == "[DONE]":
            return
        chunk = _json_object(text)
        if "error" in chunk or chunk.get("object") == "error":
            raise CheckError("bad_answer", f"reported an error inside the stream: {error_message(text)}")
        yield chunk
    raise CheckError("bad_answer", "ended the stream before [DONE], so the answer is cut short")


def error_message(text: str) -> str:
    """The message in an error body: OpenAI's and vLLM's `error.message`, FastAPI's `detail`, or the text itself."""
    try:
        answer = json.loads(text)
    except ValueError:
        return text
    for key in ("error", "message", "detail"):
        while isinstance(answer, dict) and key in answer:
            answer = answer[key]
    return answer if isinstance(answer, str) else json.dumps(answer)


def message_text(message: Any) -> str:
    """All text of a chat message or delta: content, reasoning under either of its names, tool call arguments."""
    if not isinstance(message, dict):
        return ""
    texts = [message.get(key) for key in ("content", "reasoning", "reasoning_content")]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        texts += [function.get("name"), function.get("arguments")] if isinstance(function, dict) else []
    return "".join(text for text in texts if isinstance(text, str))


@dataclass
class ChatAnswer:
    """A chat's answer, put together from a message or from the deltas of a stream."""

    text: str = ""  # all that came, wherever it stood
    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name and arguments of each tool call
    finish_reason: str | None = None
    tokens: int | None = None

    def add(self, choice: dict[str, Any]) -> None:
        """Take a choice in: of a whole answer, or of one event."""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        message = choice.get("delta", choice.get("message"))
        self.text += message_text(message)
        if not isinstance(message, dict):
            return
        for name in ("content", "reasoning"):
            if isinstance(message.get(name), str):
                setattr(self, name, getattr(self, name) + message[name])
        calls = message.get("tool_calls")
        for position, call in enumerate(calls if isinstance(calls, list) else []):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict):
                continue
            index = call.get("index", position)
            if not isinstance(index, int) or not 0 <= index <= len(self.calls):
                continue
            if index == len(self.calls):
                self.calls.append(["", ""])
            for part, name in enumerate(("name", "arguments")):
                if isinstance(function.get(name), str):
                    self.calls[index][part] += function[name]


def schema_problem(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    """How a value does not fit a JSON schema, None when it does; knows no more than WEATHER_SCHEMA needs."""
    kinds: dict[str, type] = {"object": dict, "string": str, "boolean": bool}
    if not isinstance(value, kinds[schema["type"]]):
        return f"{where} is {json.dumps(value)}, which is no {schema['type']}"
    if value not in schema.get("enum", [value]):
        return f"{where} is {json.dumps(value)}, which is none of {', '.join(schema['enum'])}"
    if not isinstance(value, dict):
        return None
    missing = [name for name in schema["required"] if name not in value]
    unknown = [name for name in value if name not in schema["properties"]]
    if missing or unknown:
        wrong = f"{missing[0]!r} is missing" if missing else f"{unknown[0]!r} was not asked for"
        return f"{where}: {wrong}"
    problems = (schema_problem(value[name], schema["properties"][name], f"{name!r}") for name in value)
    return next((problem for problem in problems if problem), None)


def completion_tokens(answer: dict[str, Any]) -> int | None:
    """`usage.completion_tokens`, None where the answer does not say."""
    usage = answer.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else None


def _json_object(text: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise CheckError("bad_answer", f"sent something that is not a JSON object: {text}")
    return answer


def _choices(answer: dict[str, Any]) -> list[dict[str, Any]]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise CheckError("bad_answer", f"sent an answer without choices: {json.dumps(answer)}")
    return choices


def _require_tokens(text: str, tokens: int | None) -> str:
    """How much came back, in words. Text or the token count is proof; a token may decode to no text at all."""
    if not text and not tokens:
        raise CheckError("bad_answer", "accepted the request but no token came back")
    return "an unknown number of tokens" if tokens is None else f"{tokens} token{'' if tokens == 1 else 's'}"


# --- Checks ----------------------------------------------------------------------------------------------------------


def _fail(endpoint: Endpoint, status: int, body: bytes) -> NoReturn:
    kinds = {401: "refused", 403: "refused", 404: "not_found"}
    kind = kinds.get(status, "not_ready" if status in {429, 502, 503, 504} else "bad_answer")
    said = endpoint.excerpt(error_message(body.decode(errors="replace"))) or "nothing more"
    raise CheckError(kind, f"answered {status}: {said}")


def _ask(endpoint: Endpoint, deadline: Deadline, path: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
    with _exchange(endpoint, deadline, path, payload, endpoint.api_key) as response:
        body = _body(response)
    if response.status != http.client.OK:
        _fail(endpoint, response.status, body)
    return _json_object(body.decode(errors="replace"))


def _completion_request(endpoint: Endpoint) -> dict[str, Any]:
    return {"model": endpoint.model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}


def _chat_request(endpoint: Endpoint) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Say hello."}]
    request = {"model": endpoint.model, "messages": messages, "max_tokens": CHAT_TOKENS, "temperature": 0}
    if endpoint.contract and endpoint.contract.reasoning:
        # Families whose reasoning is a choice name it in one of two ways; the others' templates read neither.
        request["chat_template_kwargs"] = {"thinking": True, "enable_thinking": True}
    return request


def _tool_request(endpoint: Endpoint, choice: str | dict[str, Any], *, strict: bool) -> dict[str, Any]:
    function = {"name": TOOL_NAME, "description": "The weather of this hour.", "parameters": WEATHER_SCHEMA}
    question = f"How warm is it in Oslo now, in degrees Celsius? Call {TOOL_NAME} to find out."
    return {
        **_chat_request(endpoint),
        "messages": [{"role": "user", "content": question}],
        "max_tokens": FORM_TOKENS,
        "tools": [{"type": "function", "function": {**function, "strict": True} if strict else function}],
        "tool_choice": choice,
    }


def _ask_chat(endpoint: Endpoint, deadline: Deadline, request: dict[str, Any]) -> ChatAnswer:
    whole = _ask(endpoint, deadline, "/v1/chat/completions", request)
    answer = ChatAnswer(tokens=completion_tokens(whole))
    for choice in _choices(whole):
        answer.add(choice)
    return answer


def _stream_chat(endpoint: Endpoint, deadline: Deadline, request: dict[str, Any]) -> tuple[ChatAnswer, float | None]:
    """The answer of a stream that arrives whole, and when its first text came."""
    request = {**request, "stream": True, "stream_options": {"include_usage": True}}
    answer, first = ChatAnswer(), None
    try:
        with _exchange(endpoint, deadline, "/v1/chat/completions", request, endpoint.api_key) as response:
            if response.status != http.client.OK:
                _fail(endpoint, response.status, _body(response))
            content_type = response.headers.get_content_type()
            if content_type != "text/event-stream":
                raise CheckError("bad_answer", f"answered a streaming request with {content_type}")
            for chunk in stream_chunks(sse_data(_chunks(response))):
                answer.tokens = completion_tokens(chunk) or answer.tokens
                for choice in _choices(chunk):
                    answer.add(choice)
                if answer.text and first is None:
                    first = round(deadline.elapsed(), 3)
    except DeadlineError:
        progress = "no text" if first is None else f"{len(answer.text)} characters, the first after {first:.1f} s,"
        raise CheckError("late", f"had streamed {progress} by the deadline of {deadline.seconds:g} s") from None
    if not answer.finish_reason:
        raise CheckError("bad_answer", "ended the stream with [DONE] but without a finish reason")
    return answer, first


def _quote(endpoint: Endpoint, text: str) -> str:
    return f'"{endpoint.excerpt(text, EXCERPT_CHARACTERS)}"'


def _require_reasoning(endpoint: Endpoint, answer: ChatAnswer) -> str:
    """Reasoning and answer are where the contract wants them; the same for a plain answer and for a stream.

    Returns:
        What was seen, as the end of a sentence; nothing where no contract is known.

    Raises:
        CheckError: They are not.
    """
    if endpoint.contract is None:
        return ""
    content, reasoning = answer.content.strip(), answer.reasoning.strip()
    markup = REASONING_MARKUP.search(answer.content)
    if markup:
        start = max(markup.start() - EXCERPT_CHARACTERS // 2, 0)
        around = _quote(endpoint, answer.content[start:])
        raise CheckError("reasoning", f"left {markup.group()} in `content`, where clients read the answer: {around}")
    if not endpoint.contract.reasoning:
        if reasoning:
            said = _quote(endpoint, reasoning)
            raise CheckError("reasoning", f"put text into `reasoning`, and the card promises none: {said}")
        return ", no reasoning among it"
    if not reasoning:
        said = _quote(endpoint, content) if content else "nothing came in `content` either"
        raise CheckError("reasoning", f"sent no text in `reasoning`, which the card promises; in `content`: {said}")
    if content:
        return ", its reasoning apart from its answer"
    if answer.finish_reason == "length":
        return f", its reasoning apart, though {CHAT_TOKENS} tokens were too few to see the answer after it"
    said = _quote(endpoint, reasoning)
    raise CheckError("reasoning", f"ended with no text in `content`: the answer went into `reasoning` too: {said}")


def _require_call(endpoint: Endpoint, answer: ChatAnswer) -> str:
    """One call of the tool that was offered, with arguments that fit.

    Raises:
        CheckError: There is none, or something is wrong with it.
    """
    markup = TOOL_MARKUP.search(answer.content)
    if markup:
        raise CheckError("tools", f"left a tool call's markup in `content`: {_quote(endpoint, answer.content)}")
    if not answer.calls:
        if answer.finish_reason == "length":
            raise CheckError("tools", f"had called no tool after {FORM_TOKENS} tokens: {_quote(endpoint, answer.text)}")
        said = _quote(endpoint, answer.content or answer.reasoning)
        raise CheckError("tools", f"called no tool, and said instead: {said}")
    name, arguments = answer.calls[0]
    if name != TOOL_NAME:
        raise CheckError("tools", f"called {_quote(endpoint, name)}, and the tool offered is {TOOL_NAME!r}")
    _require_fit(endpoint, arguments, "tools", "the tool's arguments")
    return f"called {TOOL_NAME} with {arguments}"


def _require_fit(endpoint: Endpoint, text: str, part: str, what: str) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        raise CheckError(part, f"sent {what} as no JSON: {_quote(endpoint, text)}") from None
    problem = schema_problem(value, WEATHER_SCHEMA, what)
    if problem:
        raise CheckError(part, f"does not hold to the schema: {problem}; it sent {_quote(endpoint, text)}")


def _contract(endpoint: Endpoint) -> Contract:
    if endpoint.contract is None:
        raise NotCheckableError("what the model's card promises was not given")
    return endpoint.contract


def _require_tools(endpoint: Endpoint, *, forced: bool) -> None:
    tools = _contract(endpoint).tools
    if not tools:
        raise NotCheckableError("the model's card promises no tool calls")
    if tools == "forced" and not forced:
        raise NotCheckableError("the model's card says that its weights call a tool only where they are forced to")


def check_models(endpoint: Endpoint, deadline: Deadline) -> Seen:
    """The model list names the served model."""
    listed = _ask(endpoint, deadline, "/v1/models").get("data")
    names = [entry.get("id") for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    if endpoint.model not in names:
        raise CheckError("not_found", f"lists {names} and not {endpoint.model!r}")
    return Seen(f"lists {endpoint.model!r}")


def check_completion(endpoint: Endpoint, deadline: Deadline) -> Seen:
    """A one-token completion brings a token: the engine computes."""
    answer = _ask(endpoint, deadline, "/v1/completions", _completion_request(endpoint))
    texts = [choice.get("text") for choice in _choices(answer)]
    text = "".join(text for text in texts if isinstance(text, str))
    return Seen(f"completed a prompt with {_require_tokens(text, completion_tokens(answer))}")


def check_chat(endpoint: Endpoint, deadline: Deadline) -> Seen:
    """A plain chat completion brings tokens, and the contract's reasoning: template and parser work too."""
    answer = _ask_chat(endpoint, deadline, _chat_request(endpoint))
    came = _require_tokens(answer.text, answer.tokens)
    return Seen(f"answered a chat with {came}{_require_reasoning(endpoint, answer)}")


def check_chat_stream(endpoint: Endpoint, deadline: Deadline) -> Seen:
    """A streamed chat completion arrives whole: the same kind of answer, a finish reason, its usage, `[DONE]`."""
    answer, first = _stream_chat(endpoint, deadline, _chat_request(endpoint))
    came = _require_tokens(answer.text, answer.tokens)
    seen = "none of which decoded to text" if first is None else f"the first text after {first:.3f} s"
    return Seen(f"streamed {came}, {seen}{_require_reasoning(endpoint, answer)}", first)


def check_tool_call(endpoint: Endpoint, deadline: Deadline) -> Seen:
    """Asked what only the tool knows, the model calls it."""
    _require_tools(endpoint, forced=False)
    answer = _ask_chat(endpoint, deadline, _tool_request(endpoint, "auto", strict=False))
    return Seen(_require_call(endpoint, answer))


def check_tool_call_stream(endpoint: Endpoint, deadline: Deadline) -> Seen:
    """The same, streamed: a call comes in pieces."""
    _require_tools(endpoint, forced=False)
    answer, first = _stream_chat(endpoint, deadline, _tool_request(endpoint, "auto", strict=False))
    return Seen(f"{_require_call(endpoint, answer)}, streamed", first)


def check_tool_named(endpoint: Endpoint, deadline: Deadline) -> Seen:
    """A request that names the tool forces its call."""
    _require_tools(endpoint, forced=True)
    choice = {"type": "function", "function": {"name": TOOL_NAME}}
    answer = _ask_chat(endpoint, deadline, _tool_request(endpoint, choice, strict=True))
    return Seen(f"{_require_call(endpoint, answer)}, as it was forced to by name")


def check_tool_required(endpoint: Endpoint, deadline: Deadline) -> Seen:
    """A request that requires a tool forces the call of one; streamed."""
    _require_tools(endpoint, forced=True)
    answer, first = _stream_chat(endpoint, deadline, _tool_request(endpoint, "required", strict=True))
    return Seen(f"{_require_call(endpoint, answer)}, streamed, as a call was required", first)


def check_json_schema(endpoint: Endpoint, deadline: Deadline) -> Seen:
    """An answer holds to the JSON schema that came with the question."""
    if not _contract(endpoint).json_schema:
        raise NotCheckableError("the model's card promises no JSON by a schema")
    schema = {"name": "weather", "strict": True, "schema": WEATHER_SCHEMA}
    question = "Somebody asks for the weather in Oslo in degrees Celsius. Write this question down as JSON."
    request = {
        **_chat_request(endpoint),
        "messages": [{"role": "user", "content": question}],
        "max_tokens": FORM_TOKENS,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    answer = _ask_chat(endpoint, deadline, request)
    if not answer.content and answer.finish_reason == "length":
        said = _quote(endpoint, answer.text)
        raise CheckError("json_schema", f"had written no JSON after {FORM_TOKENS} tokens: {said}")
    _require_fit(endpoint, answer.content, "json_schema", "its answer")
    return Seen(f"held to a JSON schema: {endpoint.excerpt(answer.content)}")


def check_key_required(endpoint: Endpoint, deadline: Deadline) -> Seen:
    """No route answers a request without a key or with a wrong one."""
    known = {"/v1/completions": _completion_request(endpoint), "/v1/chat/completions": _chat_request(endpoint)}
    paths = DEFAULT_PATHS if endpoint.gateway_paths is None else endpoint.gateway_paths
    for path in paths:
        payload = None if path == "/v1/models" else known.get(path, {})
        for words, key in (("no key", None), ("a wrong key", secrets.token_hex(16))):
            with _exchange(endpoint, deadline, path, payload, key) as response:
                body = _body(response)
            if response.status == http.client.OK:
                raise CheckError("open_door", f"served {path} to a request with {words}")
            if response.status not in {http.client.UNAUTHORIZED, http.client.FORBIDDEN}:
                _fail(endpoint, response.status, body)
    return Seen(f"refused requests with no key and with a wrong key on {', '.join(paths)}")


def check_unknown_routes(endpoint: Endpoint, deadline: Deadline) -> Seen:
    """A path that nobody promised is not there, with a key either; of a gateway also what only its engines serve."""
    exposed = endpoint.gateway_paths
    paths = [f"/v1/{secrets.token_hex(8)}"]
    if exposed is not None:
        paths += [path for path in ENGINE_PATHS if path not in exposed]
    for path in paths:
        with _exchange(endpoint, deadline, path, None, endpoint.api_key) as response:
            body = _body(response)
        if response.status in {http.client.UNAUTHORIZED, http.client.TOO_MANY_REQUESTS} or response.status in range(
            http.client.BAD_GATEWAY, http.client.GATEWAY_TIMEOUT + 1
        ):
            _fail(endpoint, response.status, body)
        if response.status not in {http.client.NOT_FOUND, http.client.FORBIDDEN}:
            raise CheckError("open_door", f"answered {response.status} to {path}, which it should not serve")
    beyond = "a path that nobody knows" if exposed is None else f"an unknown path and {', '.join(paths[1:])}"
    return Seen(f"refused {beyond}, with the right key")


CHECKS: dict[str, Callable[[Endpoint, Deadline], Seen]] = {
    "models": check_models,
    "completion": check_completion,
    "chat": check_chat,
    "chat_stream": check_chat_stream,
    "tool_call": check_tool_call,
    "tool_call_stream": check_tool_call_stream,
    "tool_named": check_tool_named,
    "tool_required": check_tool_required,
    "json_schema": check_json_schema,
    "key_required": check_key_required,
    "unknown_routes": check_unknown_routes,
}


# Exchanges that brought no answer: the first row that fits. RemoteDisconnected is a ConnectionError.
TRANSPORT_FAILURES: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str, str], ...] = (
    ((DeadlineError, socket.timeout), "late", "had not answered in full by the deadline of {seconds:.3g} s"),
    (socket.gaierror, "unreachable", "has a host name that cannot be resolved ({error})"),
    (ConnectionRefusedError, "unreachable", "refused the connection"),
    ((ConnectionError, ssl.SSLEOFError), "unreachable", "closed the connection without an answer"),
    (ssl.SSLError, "tls", "failed the TLS handshake ({error})"),
    (http.client.HTTPException, "bad_answer", "did not speak HTTP ({error!r})"),
    (OSError, "unreachable", "could not be reached ({error})"),
)


def run_check(name: str, endpoint: Endpoint, deadline_seconds: float) -> CheckResult:
    """Run one check to its verdict.

    Args:
        name: A key of CHECKS.
        endpoint: The server.
        deadline_seconds: Total for the check, from looking the name up to the last byte.
    """
    deadline = Deadline(deadline_seconds)
    first = None
    try:
        seen = CHECKS[name](endpoint, deadline)
        kind, sentence, first = "ok", seen.sentence, seen.first_token_seconds
    except NotCheckableError as reason:
        return CheckResult(name, None, "not_checkable", 0.0, None, f"Not checkable: {reason}.")
    except CheckError as error:
        kind, sentence = error.kind, error.seen
    except (DeadlineError, OSError, http.client.HTTPException) as error:
        matches = (row for row in TRANSPORT_FAILURES if isinstance(error, row[0]))
        _, kind, template = next(matches)
        sentence = template.format(error=error, seconds=deadline_seconds)
    detail = f"{endpoint.url} {endpoint.excerpt(sentence)}."
    if kind != "ok":
        detail += " " + NEXT_STEPS[kind].format(logs=endpoint.logs, command=endpoint.command)
    return CheckResult(name, kind == "ok", kind, round(deadline.elapsed(), 3), first, detail)


def run_checks(
    endpoint: Endpoint, names: Sequence[str], deadline_seconds: float, *, retries: int = 0, wait_seconds: float = 0
) -> list[CheckResult]:
    """Run checks in order; `retries` are shared, so a dead server costs its waiting once and not once per check.

    Args:
        endpoint: The server.
        names: Keys of CHECKS.
        deadline_seconds: Total for each try of a check.
        retries: How many more tries all checks together get after a retryable failure.
        wait_seconds: Pause before each of them.
    """
    results = []
    for name in names:
        result = run_check(name, endpoint, deadline_seconds)
        while result.retryable and retries > 0:
            retries -= 1
            time.sleep(wait_seconds)
            result = run_check(name, endpoint, deadline_seconds)
        results.append(result)
    return results


def failure_summary(endpoint: Endpoint, results: Sequence[CheckResult]) -> str:
    """One paragraph on the failed checks, empty when all passed. A reason shared by several is said once."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.ok is False:
            reasons.setdefault(result.detail, []).append(result.check)
    if not reasons:
        return ""
    failed = "; ".join(f"{', '.join(checks)}: {detail}" for detail, checks in reasons.items())
    return f"{endpoint.url} does not serve {endpoint.model!r} as its clients need it. {failed}"


# --- Script ----------------------------------------------------------------------------------------------------------


def process_alive(pid: int) -> bool:
    """Whether a process still runs (Linux); one that is dead and not yet reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in {"Z", "X"}


def wait_until_serving(
    endpoint: Endpoint,
    deadline_seconds: float,
    say: Callable[[str], None],
    *,
    interval_seconds: float = 2.0,
    main_pid: int | None = None,
) -> bool:
    """Wait for the first completion that brings tokens.

    Args:
        endpoint: The server.
        deadline_seconds: Total. The first completion may use all that is left of it: it may compile kernels, and
            cutting it off would only start it again.
        say: Takes one line per change of state.
        interval_seconds: Pause between tries.
        main_pid: Stop early when this process has ended.

    Returns:
        Whether the server serves; False at the deadline, on an answer that asking again will not change, and when the
        main process has ended.
    """
    deadline = Deadline(deadline_seconds)
    state = ("", "")
    while True:
        result = run_check("models", endpoint, min(MODEL_LIST_SECONDS, deadline_seconds - deadline.elapsed()))
        if result.ok:
            if state != ("models", "ok"):
                say(f"{result.detail} Waiting for its first completion.")
                state = ("models", "ok")
            result = run_check("completion", endpoint, deadline_seconds - deadline.elapsed())
        if result.ok:
            say(f"Serving after {deadline.elapsed():.1f} s: {result.detail}")
            return True
        if not result.retryable:
            say(f"Gave up after {deadline.elapsed():.1f} s: {result.detail}")
            return False
        if main_pid is not None and not process_alive(main_pid):
            say(
                f"Gave up after {deadline.elapsed():.1f} s: process {main_pid} ended before it served: {endpoint.logs}."
            )
            return False
        if deadline_seconds - deadline.elapsed() <= interval_seconds:  # no time for another try
            say(f"Gave up at the deadline of {deadline_seconds:g} s: {result.detail}")
            return False
        if state != (result.check, result.kind):
            say(f"Waiting: {result.detail}")
            state = (result.check, result.kind)
        time.sleep(interval_seconds)


def read_key(path: str) -> str:
    """The key in a file: the bare key on the first line, without a variable name before it.

    Raises:
        InputError: The file cannot be read, or its first line is not a bare key.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise InputError(
            f"key file {path}: {reason}; give a readable file with the bare key on its first line."
        ) from None
    key = lines[0].strip() if lines else ""
    if not KEY_PATTERN.fullmatch(key):
        raise InputError(f"key file {path}: the first line is not a bare key; write only the key on it, no NAME=.")
    return key


def read_contract(path: str) -> Contract:
    """The contract in a plan.

    Raises:
        InputError: The file is no plan, or one from before plans had a contract.
    """
    try:
        plan = json.loads(Path(path).read_text(encoding="utf-8"))
        return Contract.from_dict(plan["model"]["contract"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"plan {path}: holds no contract of its model ({error!r}); give plan.json of a release, and deploy anew if "
            "it is an old one."
        ) from None


def _table(results: Sequence[CheckResult]) -> str:
    width = max(len(result.check) for result in results)
    verdicts = {True: "ok", False: "FAILED", None: "-"}
    rows = [f"{r.check:{width}}  {verdicts[r.ok]:6}  {r.seconds:8.3f} s  {r.detail}" for r in results]
    return "\n".join(rows)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= MAX_SECONDS:  # nan is neither
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most {MAX_SECONDS}")
    return value


def _check_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown check {unknown[0]!r}; known: {', '.join(CHECKS)}")
    return names


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ask an OpenAI-compatible server what a client would ask.")
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--url", required=True, help="http://HOST:PORT, without /v1")
    common.add_argument("--model", required=True, help="served model name")
    common.add_argument("--key-file", required=True, help="file with the bare API key on its first line")
    common.add_argument("--ca-file", help="PEM file of the authority behind an https url")
    common.add_argument("--unit", help="systemd unit to name in hints")
    wait = commands.add_parser("wait", parents=[common], help="return when the first completion brought tokens")
    wait.add_argument("--deadline-seconds", type=_seconds, required=True, help="total")
    wait.add_argument("--interval-seconds", type=_seconds, default=2.0, help="pause between tries (default 2)")
    wait.add_argument(
        "--main-pid",
        type=int,
        default=os.environ.get("MAINPID") or None,
        help="stop when this process has ended (default: MAINPID, which systemd sets)",
    )
    check = commands.add_parser("check", parents=[common], help="run the checks once and print them")
    check.add_argument("--deadline-seconds", type=_seconds, default=30.0, help="for each check (default 30)")
    check.add_argument("--checks", type=_check_names, default=list(CHECKS), help="comma-separated (default: all)")
    check.add_argument("--plan", help="plan.json of the release: what its model's card promises is checked too")
    check.add_argument(
        "--gateway-paths",
        type=lambda text: tuple(text.split(",")),
        help="comma-separated, for a gateway: the paths that it serves",
    )
    check.add_argument("--format", choices=["table", "json"], default="table")
    return parser.parse_args(argv)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script: exit 0 when the server serves, 1 when it does not, 2 for bad input."""
    arguments = _arguments(argv)
    try:
        key = read_key(arguments.key_file)
        endpoint = Endpoint(arguments.url, arguments.model, key, arguments.ca_file, arguments.unit)
        if arguments.command == "check":
            contract = read_contract(arguments.plan) if arguments.plan else None
            endpoint = replace(endpoint, contract=contract, gateway_paths=arguments.gateway_paths)
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if arguments.command == "wait":
        serving = wait_until_serving(
            endpoint,
            arguments.deadline_seconds,
            _say,
            interval_seconds=arguments.interval_seconds,
            main_pid=arguments.main_pid,
        )
        return 0 if serving else 1
    results = run_checks(endpoint, arguments.checks, arguments.deadline_seconds)
    as_json = json.dumps([result.as_dict() for result in results], indent=2)
    _say(as_json if arguments.format == "json" else _table(results))
    return 1 if any(result.ok is False for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
