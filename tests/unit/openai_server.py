"""A stand-in for an OpenAI-compatible server on loopback that misbehaves on demand. Shared by the probe's tests."""

from __future__ import annotations

import json
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import ssl

MODEL = "tiny"
KEY = "sk-canary-5f1c"
DRIP_SECONDS = 0.05
DRIPS = 200  # then the fault ends, so that a client without a deadline fails its test and does not hang it

CALL = {"name": "get_weather", "arguments": '{"city": "Oslo", "fahrenheit": false}'}
FORM = CALL["arguments"]
STREAM_TEXT = ["I greet", " you.", "Hel", "lo"]
# What a model says that breaks its contract, by fault: fields of a message instead of the good ones.
WRONG_CHATS: dict[str, dict[str, str | None]] = {
    "leaks_tags": {"reasoning": "I greet.", "content": "so</think>Hi"},
    "no_reasoning": {"reasoning": None, "content": "<hm> Hi"},
    "all_reasoning": {"reasoning": "I greet. Hi", "content": None},
}
WRONG_CALLS: dict[str, dict[str, Any]] = {
    "no_call": {"content": "It is warm."},
    "call_markup": {"content": '<minimax:tool_call><invoke name="get_weather">'},
    "call_other": {"tool_calls": [{"function": CALL | {"name": "get_time"}}]},
    "call_no_json": {"tool_calls": [{"function": CALL | {"arguments": "city=Oslo"}}]},
    "call_unfit": {"tool_calls": [{"function": CALL | {"arguments": '{"city": "Oslo"}'}}]},
}
WRONG_FORMS = {
    "prose": "Warm.",
    "form_unfit": '{"city": "Bonn", "fahrenheit": false}',
    "form_extra": FORM[:-1] + ', "x": 1}',
}
PATHS = ("/v1/models", "/v1/completions", "/v1/chat/completions")


def stream_events(error: dict[str, Any] | None = None, deltas: list[dict[str, Any]] | None = None) -> list[str]:
    """A chat stream in vLLM's shape: the role, the text, the finish reason, the usage, then the end mark."""
    if deltas is None:
        names = ("reasoning", "reasoning", "content", "content")
        deltas = [{name: text} for name, text in zip(names, STREAM_TEXT, strict=True)]
    deltas = [{"role": "assistant", "content": ""}, *deltas]
    events = [{"model": MODEL, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if error is not None:
        return [json.dumps(event) for event in (*events, {"error": error})] + ["[DONE]"]
    end = {"model": MODEL, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    usage = {"model": MODEL, "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    return [json.dumps(event) for event in (*events, end, usage)] + ["[DONE]"]


class OpenAIServer:
    """The server, serving while its `with` block runs.

    `fault` may be changed at any time: None behaves. Faults of the transport (hang, drip, drip_headers, reset,
    not_http, starting, leak, redirect, garbage, flood) hit every route; the others hit where their name says. Whatever
    the fault, `/health` says 200.
    """

    def __init__(self, fault: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.fault = fault
        self.requests: list[str] = []
        self.stopping = threading.Event()
        server = self

        class Handler(_Handler):
            openai = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        self.port = self._http.server_address[1]
        self.url = f"{scheme}://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    openai: OpenAIServer

    def log_message(self, *_: object) -> None:
        """Keep the test output clean."""

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, OSError):  # the client left at its deadline
            self.close_connection = True

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, asked: dict[str, Any]) -> None:
        self.openai.requests.append(self.path)
        fault = self.openai.fault
        if self.path == "/health":
            self._json(200, {})
        elif fault in {"hang", "drip", "drip_headers", "reset", "not_http", "starting", "leak", "redirect", "garbage"}:
            getattr(self, f"_{fault}")()
        elif fault == "flood":
            self._json(200, {"filler": "x" * 5_000_000})
        elif fault != "unauthenticated" and self.headers["Authorization"] != f"Bearer {KEY}":
            self._json(401, {"error": "Unauthorized"})
        elif self.path not in PATHS:
            self._json(200 if fault == "serves_anything" else 404, {"detail": "Not Found"})
        else:
            self._serve(asked, fault)

    def _serve(self, asked: dict[str, Any], fault: str | None) -> None:
        if self.path == "/v1/models":
            self._json(200, {"object": "list", "data": [{"id": "other" if fault == "wrong_model" else MODEL}]})
        elif fault == "wrong_model":
            self._json(404, {"error": {"message": f"The model `{asked['model']}` does not exist.", "code": 404}})
        elif fault == "engine_dead":
            self._json(500, {"error": {"message": "EngineCore encountered an issue.", "code": 500}})
        elif fault == "compiling":
            self.openai.stopping.wait(0.5)
            self._generate(asked, None)
        elif fault == "hang_generation":
            self._hang()
        else:
            self._generate(asked, fault)

    def _generate(self, asked: dict[str, Any], fault: str | None) -> None:
        tokens = 0 if fault in {"no_token", "no_usage"} else asked["max_tokens"]
        text = "" if fault in {"no_token", "textless"} else "Hi"
        usage = {} if fault == "no_usage" else {"usage": {"completion_tokens": tokens}}
        message = self._message(asked, text, fault)
        if asked.get("stream"):
            self._stream(fault, self._deltas(message) if asked.get("tools") or fault in WRONG_CHATS else None)
        elif self.path == "/v1/completions":
            self._json(200, {"model": MODEL, "choices": [{"text": text}], **usage}, cut=fault == "cut")
        else:
            choice = {"message": message, "finish_reason": "length" if fault == "cut_thinking" else "stop"}
            self._json(200, {"model": MODEL, "choices": [choice], **usage}, cut=fault == "cut")

    def _message(self, asked: dict[str, Any], text: str, fault: str | None) -> dict[str, Any]:
        if asked.get("tools"):
            return {"content": "", **WRONG_CALLS.get(fault or "", {"tool_calls": [{"function": CALL}]})}
        if asked.get("response_format"):
            return {"reasoning": "JSON.", "content": WRONG_FORMS.get(fault or "", FORM)}
        if fault == "cut_thinking":
            return {"reasoning": "I", "content": None}
        return {"reasoning": text and "I greet.", "content": text, **WRONG_CHATS.get(fault or "", {})}

    def _deltas(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """A message in pieces, the arguments of a call cut in two."""
        deltas: list[dict[str, Any]] = [{name: message[name]} for name in ("reasoning", "content") if message.get(name)]
        for index, call in enumerate(message.get("tool_calls", ())):
            arguments = call["function"]["arguments"]
            named = {"index": index, "id": "1", "type": "function", "function": {"name": call["function"]["name"]}}
            pieces = [{"index": index, "function": {"arguments": piece}} for piece in (arguments[:5], arguments[5:])]
            deltas += [{"tool_calls": [piece]} for piece in (named, *pieces)]
        return deltas

    def _stream(self, fault: str | None, deltas: list[dict[str, Any]] | None) -> None:
        error = {"message": f"engine died, {self.headers['Authorization']}", "code": 500}
        events = stream_events(error if fault == "stream_error" else None, deltas)
        if fault == "stream_no_finish":
            del events[-3]
        if fault in {"textless", "no_token"}:
            events = [event for event in events if not any(f'"{text}"' in event for text in STREAM_TEXT)]
        if fault == "no_token":
            del events[-2]
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if fault == "stream_wrong_type" else "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, event in enumerate(events):
            if (fault, number) == ("stream_hang", 3) or fault == "stream_mute":
                self._stream_comments()
                return
            if (fault, number) in {("stream_no_done", len(events) - 1), ("stream_cut", 3)}:
                break
            self._chunk(f"data: {event}\r\n\r\n".encode())
        if fault != "stream_cut":
            self._chunk(b"")
        self.close_connection = True

    def _stream_comments(self) -> None:
        for _ in range(DRIPS):
            if not self.openai.stopping.wait(DRIP_SECONDS):
                self._chunk(b": keep-alive\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _json(self, status: int, answer: Any, *, cut: bool = False) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = True

    def _hang(self) -> None:
        self.openai.stopping.wait(DRIPS * DRIP_SECONDS)
        self.close_connection = True

    def _drip(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 1000000\r\n\r\n")
        self._drip_bytes(b" ")

    def _drip_headers(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        self._drip_bytes(b"x")

    def _drip_bytes(self, byte: bytes) -> None:
        for _ in range(DRIPS):
            if not self.openai.stopping.wait(DRIP_SECONDS):
                self.wfile.write(byte)
        self.close_connection = True

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _not_http(self) -> None:
        self.wfile.write(f"220 mail ready {self.headers['Authorization']}\r\n".encode())
        self.close_connection = True

    def _starting(self) -> None:
        self._json(503, {"message": "no server is available"})

    def _leak(self) -> None:
        self._json(400, {"error": {"message": f"cannot use {self.headers['Authorization']}"}})

    def _redirect(self) -> None:
        self._json(302, {})

    def _garbage(self) -> None:
        self._json(200, ["not", "what", "was", "asked", self.headers["Authorization"]])
