"""The requests that hold the stand-in engine to the real one: each is sent to both, and the answers must be alike.

Alike is: the same status and type of content; the same JSON but for the values that differ from run to run; the same
sequence of streamed events; and the same words, since the lab's checkpoint and the stand-in say the same. What the real
engine answered is kept in tests/fixtures/engine_contract: the unit tests hold the stand-in to it, the end-to-end test
the deployed engine. Standard library only: on a lab host it runs as a script, which prints what it saw as JSON.

    python3 engine_contract.py http://127.0.0.1:8001 --model minimax-m2.5 --key-file /etc/vllm-fleet/engine.key
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
WEATHER = {
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
# Where a form leaves a choice, the lab's checkpoint has no preference: only without sampling is it the same each time.
TOOLS = CHAT | {"temperature": 0, "max_tokens": 300, "tools": [{"type": "function", "function": WEATHER}]}
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": WEATHER["parameters"]}}
USAGE = {"stream_options": {"include_usage": True}}

# name: (path, body or None for GET). A body of text is sent as it is.
REQUESTS: dict[str, tuple[str, dict[str, Any] | str | None]] = {
    "models": ("/v1/models", None),
    "version": ("/version", None),
    "health": ("/health", None),
    "unknown route": ("/v1/nothing", None),
    "wrong method": ("/v1/chat/completions", None),
    "completion": ("/v1/completions", {"prompt": "Hello", "max_tokens": 5}),
    "completion to its end": ("/v1/completions", {"prompt": "Hello", "max_tokens": 100}),
    "completion, streamed": ("/v1/completions", {"prompt": "Hello", "max_tokens": 5, "stream": True}),
    "completion, streamed, with usage": (
        "/v1/completions",
        {"prompt": "Hello", "max_tokens": 100, "stream": True, **USAGE},
    ),
    "chat": ("/v1/chat/completions", CHAT),
    "chat, cut in its reasoning": ("/v1/chat/completions", CHAT | {"max_tokens": 4}),
    "chat, streamed": ("/v1/chat/completions", CHAT | {"stream": True}),
    "chat, streamed, with usage": ("/v1/chat/completions", CHAT | {"stream": True, **USAGE}),
    "chat, streamed, cut": ("/v1/chat/completions", CHAT | {"stream": True, "max_completion_tokens": 14}),
    "tool, not forced": ("/v1/chat/completions", TOOLS),
    "tool, named": (
        "/v1/chat/completions",
        TOOLS | {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ),
    "tool, required": ("/v1/chat/completions", TOOLS | {"tool_choice": "required"}),
    "tool, unknown": (
        "/v1/chat/completions",
        TOOLS | {"tool_choice": {"type": "function", "function": {"name": "other"}}},
    ),
    "JSON by a schema": ("/v1/chat/completions", CHAT | {"temperature": 0, "response_format": FORM}),
    "wrong model": ("/v1/chat/completions", CHAT | {"model": "other"}),
    "no messages": ("/v1/chat/completions", {}),
    "no JSON": ("/v1/completions", "{"),
}
# Who answers these without a key, and who asks for one.
ROUTES = (
    "/health",
    "/version",
    "/metrics",
    "/nothing",
    "/v1/models",
    "/v1/nothing",
    "/v2/x",
    "/inference/x",
    "/cohere/x",
)
# Values that are the same in every run. Of all others only the type counts.
FIXED = {
    "object",
    "finish_reason",
    "stop_reason",
    "role",
    "type",
    "code",
    "index",
    "completion_tokens",
    "owned_by",
    "param",
}


def shape(value: Any, name: str = "") -> Any:
    """A JSON value with the type in place of what differs from run to run."""
    if isinstance(value, dict):
        return {key: shape(value[key], key) for key in sorted(value)}
    if isinstance(value, list):
        return [shape(item, name) for item in value]
    return value if value is None or name in FIXED else type(value).__name__


class Server:
    """An engine to ask."""

    def __init__(self, url: str, model: str, key: str) -> None:
        """Keep where it is."""
        parts = urlsplit(url)
        self._address = (str(parts.hostname), parts.port)
        self._model, self._key = model, key

    def ask(self, path: str, body: dict[str, Any] | str | None, *, key: bool = True) -> tuple[int, str, str]:
        """Return status, type of content and content."""
        connection = http.client.HTTPConnection(*self._address, timeout=60)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if key else {})
        data = body if body is None or isinstance(body, str) else json.dumps({"model": self._model} | body)
        try:
            connection.request("GET" if data is None else "POST", path, data, headers)
            response = connection.getresponse()
            return response.status, response.getheader("content-type") or "", response.read().decode()
        finally:
            connection.close()

    def seen(self) -> dict[str, Any]:
        """What it answers to every request, in a form that can be compared."""
        answers = {name: _digest(*self.ask(path, body)) for name, (path, body) in REQUESTS.items()}
        needs_key = {path: self.ask(path, None, key=False)[0] == http.client.UNAUTHORIZED for path in ROUTES}
        status, kind, page = self.ask("/metrics", None, key=False)
        return {
            "answers": answers,
            "needs key": needs_key,
            "metrics": {"status": status, "type": kind, "names": metric_names(page, self._model)},
        }


def _digest(status: int, kind: str, content: str) -> dict[str, Any]:
    digest: dict[str, Any] = {"status": status, "type": kind}
    if kind.startswith("text/event-stream"):
        events = [event.removeprefix("data: ") for event in content.split("\n\n") if event]
        found = [json.loads(event) if event.startswith("{") else event for event in events]
        # How many tokens one event brings is the engine's choice at that moment.
        digest["events"] = [event for event, _ in itertools.groupby(shape(found))]
        digest["words"] = _words(found)
    elif content:
        answer = json.loads(content)
        digest["content"] = shape(answer)
        digest["words"] = _words([answer])
    return digest


def _words(answers: list[Any]) -> dict[str, str]:
    """All text of an answer or of a stream of them, by where it stood."""
    said: dict[str, str] = {}
    for answer in answers:
        for choice in answer.get("choices", ()) if isinstance(answer, dict) else ():
            for part in (choice, choice.get("message", {}), choice.get("delta", {})):
                for name in ("text", "content", "reasoning"):
                    if part.get(name):
                        said[name] = said.get(name, "") + part[name]
                for call in part.get("tool_calls") or ():
                    said["call"] = said.get("call", "") + "".join(call["function"].values())
    return said


def metric_names(page: str, model: str) -> list[str]:
    """The metrics of a page, each with its labels' names, without buckets and times of creation."""
    names = set()
    for line in page.splitlines():
        found = re.fullmatch(r"(vllm:\w+)\{(.*)\} \S+", line)
        if found and not found[1].endswith(("_bucket", "_created")):
            labels = sorted(re.findall(r'(\w+)="', found[2]))
            if f'model_name="{model}"' in found[2]:
                names.add(f"{found[1]}{{{','.join(labels)}}}")
    return sorted(names)


def differences(recorded: Any, seen: Any, where: str = "") -> list[str]:
    """What an engine answers otherwise than recorded: a line for each place, in the words of `Server.seen`."""
    if isinstance(recorded, dict) and isinstance(seen, dict):
        named = [(str(name), recorded.get(name, "nothing"), seen.get(name, "nothing")) for name in {**recorded, **seen}]
    elif isinstance(recorded, list) and isinstance(seen, list) and {str} == {type(item) for item in recorded + seen}:
        missing, more = sorted(set(recorded) - set(seen)), sorted(set(seen) - set(recorded))
        return [f"{where}: recorded and not seen: {', '.join(missing)}"] * bool(missing) + [
            f"{where}: seen and not recorded: {', '.join(more)}"
        ] * bool(more)
    elif isinstance(recorded, list) and isinstance(seen, list):
        pairs = itertools.zip_longest(recorded, seen, fillvalue="nothing")
        named = [(str(number), *pair) for number, pair in enumerate(pairs)]
    else:
        return [] if recorded == seen else [f"{where}: recorded {json.dumps(recorded)}, seen {json.dumps(seen)}"]
    return [line for name, *pair in named for line in differences(*pair, f"{where} / {name}" if where else name)]


def main() -> None:
    """Print what an engine answers."""
    parser = argparse.ArgumentParser(description="Print what an engine answers to the contract's requests.")
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--key-file", required=True, type=Path)
    given = parser.parse_args()
    seen = Server(given.url, given.model, given.key_file.read_text(encoding="utf-8").strip()).seen()
    print(json.dumps(seen, indent=1))  # noqa: T201  its result


if __name__ == "__main__":
    main()
