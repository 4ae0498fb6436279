"""The lab's stand-in engine answers as the real one did, starts, drains and misbehaves as it is told to."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from engine_contract import Server, differences

from vllm_fleet.target.openai_client import CHECKS, Contract, Endpoint, run_checks

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "lab" / "stand_in_engine.py"
RECORDING = ROOT / "tests" / "fixtures" / "engine_contract" / "vllm-0.32.0-cpu.json"
MODEL, KEY = "minimax-m2.5", "engine-key-of-no-value"
# As the planner writes it for the lab.
FLAGS = (
    "--tensor-parallel-size 1 --max-model-len 2048 --max-num-seqs 2 --max-num-batched-tokens 2048 --tool-call-parser "
    "minimax_m2 --reasoning-parser minimax_m2 --shutdown-timeout 5 --enable-auto-tool-choice --enforce-eager"
)


@contextmanager
def engine(**environment: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A stand-in that listens, or has ended."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, str(STAND_IN), "serve", "/w", "--served-model-name", MODEL, "--host", "127.0.0.1"]
    command += ["--port", str(port), *FLAGS.split()]
    with subprocess.Popen(command, env={"VLLM_API_KEY": KEY, **environment}, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), closing(socket.create_connection(("127.0.0.1", port))):
                break
            time.sleep(0.02)
        try:
            yield process, port
        finally:
            process.kill()


def test_it_answers_as_the_real_engine_did() -> None:
    recorded = json.loads(RECORDING.read_text(encoding="utf-8"))
    with engine(STAND_IN_TOKENS_PER_SECOND="1000") as (_, port):
        seen = Server(f"http://127.0.0.1:{port}", MODEL, KEY).seen()
    found = differences(recorded, seen)
    assert not found, "\n".join(found)


def broken(port: int, *, tools: bool | str) -> dict[str, str | None]:
    """What a client sees that is not as promised: kind by check, "not_checkable" among them."""
    promised = Contract(reasoning=True, tools=tools, json_schema=True)
    endpoint = Endpoint(f"http://127.0.0.1:{port}", MODEL, KEY, contract=promised)
    return {result.check: result.kind for result in run_checks(endpoint, list(CHECKS), 20) if result.kind != "ok"}


def test_a_client_gets_what_the_contract_promises() -> None:
    own_will = dict.fromkeys(("tool_call", "tool_call_stream"), "not_checkable")
    with engine(STAND_IN_TOKENS_PER_SECOND="1000") as (_, port):
        assert broken(port, tools="forced") == own_will
        assert broken(port, tools=True) == dict.fromkeys(own_will, "tools")  # as the lab's checkpoint, it calls none
    with engine(STAND_IN_TOKENS_PER_SECOND="1000", STAND_IN_CALLS_TOOLS="1") as (_, port):
        assert broken(port, tools=True) == {}


def test_a_client_sees_every_part_of_a_contract_that_is_broken() -> None:
    with engine(STAND_IN_TOKENS_PER_SECOND="1000", STAND_IN_CALLS_TOOLS="1", STAND_IN_FAULT="wrong") as (_, port):
        assert broken(port, tools=True) == {
            **dict.fromkeys(("chat", "chat_stream"), "reasoning"),
            **dict.fromkeys(("tool_call", "tool_call_stream", "tool_named", "tool_required"), "tools"),
            "json_schema": "json_schema",
        }


def ask(port: int, seconds: float = 20, **payload: Any) -> tuple[int, dict[str, Any]]:
    """Ask for a completion."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)) as connection:
        body = json.dumps({"model": MODEL, "prompt": "a", "ignore_eos": True, **payload})
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def counter(port: int, name: str) -> float:
    _, _, page = Server(f"http://127.0.0.1:{port}", MODEL, KEY).ask("/metrics", None)
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(f"vllm:{name}{{"))


def test_tokens_come_to_a_clock() -> None:
    with engine(STAND_IN_TOKENS_PER_SECOND="50", STAND_IN_PREFILL_SECONDS="0.2") as (_, port):
        start = time.monotonic()
        assert ask(port, max_tokens=40)[1]["usage"]["completion_tokens"] == 40
        assert time.monotonic() - start > 0.99
        assert counter(port, "generation_tokens_total") == 40


def test_a_stop_lets_running_requests_finish_and_answers_new_ones_with_nothing() -> None:
    with engine(STAND_IN_TOKENS_PER_SECOND="20") as (process, port):
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
            body = json.dumps({"prompt": "a", "max_tokens": 30, "ignore_eos": True, "stream": True})
            connection.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {KEY}"})
            answer = connection.getresponse()
            answer.readline()
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            status, late = ask(port, max_tokens=5)
            assert (status, late["choices"][0]["finish_reason"], late["choices"][0]["text"]) == (200, "abort", "")
            assert answer.read().endswith(b"data: [DONE]\n\n")
        assert process.wait(5) == 0


def test_a_stop_does_not_wait_longer_than_it_was_told() -> None:
    with (
        engine(STAND_IN_FAULT="hang") as (process, port),
        closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection,
    ):
        connection.request("POST", "/v1/completions", '{"prompt":"a"}', {"Authorization": f"Bearer {KEY}"})
        while not counter(port, "num_requests_running"):
            time.sleep(0.02)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert time.monotonic() - start > 4.9


def test_faults(tmp_path: Path) -> None:
    file = tmp_path / "fault"
    with engine(STAND_IN_FAULT_FILE=str(file), STAND_IN_TOKENS_PER_SECOND="100") as (process, port):
        assert ask(port, max_tokens=2)[0] == 200
        server = Server(f"http://127.0.0.1:{port}", MODEL, KEY)

        file.write_text("fail\n")
        time.sleep(0.2)
        assert ask(port, max_tokens=2)[0] == 500
        assert server.ask("/health", None)[0] == 200  # as the real one, whose engine has died

        file.write_text("wrong")
        time.sleep(0.2)
        status, _, text = server.ask("/v1/chat/completions", {"messages": [], "max_tokens": 20})
        message = json.loads(text)["choices"][0]["message"]
        assert (status, message["reasoning"], "<think>" in message["content"]) == (200, None, True)

        file.write_text("slow")
        time.sleep(0.2)
        start = time.monotonic()
        ask(port, max_tokens=4)
        assert time.monotonic() - start > 0.35  # 0.04 s, were it well

        file.write_text("hang")
        time.sleep(0.2)
        before = counter(port, "generation_tokens_total")
        with pytest.raises(TimeoutError):
            ask(port, 0.5, max_tokens=2)
        assert counter(port, "generation_tokens_total") == before

        file.write_text("crash")
        time.sleep(0.2)
        with suppress(OSError, http.client.HTTPException):
            ask(port, max_tokens=2)
        assert process.wait(5) == 1


def test_a_crash_at_start_and_a_slow_start() -> None:
    with engine(STAND_IN_FAULT="crash") as (process, _):
        assert process.wait(5) == 1
    start = time.monotonic()
    with engine(STAND_IN_START_SECONDS="0.7") as (_, port):
        assert time.monotonic() - start > 0.7
        assert ask(port, max_tokens=1)[0] == 200


def test_an_unknown_fault_is_refused() -> None:
    with engine(STAND_IN_FAULT="sulk") as (process, _):
        assert process.wait(5) == 2
        assert process.stderr
        assert b"known: crash, fail, hang, slow, wrong" in process.stderr.read()
