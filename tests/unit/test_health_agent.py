"""The health agent: its judgement, what it reads, and the agent itself against a server that misbehaves on demand."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from vllm_fleet.target import health_agent
from vllm_fleet.target.health_agent import (
    Agent,
    Evidence,
    Limits,
    Load,
    Pauses,
    Replica,
    Unit,
    Watch,
    asked_name,
    down,
    installed,
    judge,
    kill_main,
    read_load,
    read_units,
    replicas_of,
)
from vllm_fleet.target.openai_client import CheckResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMITS = Limits(interval_seconds=10, late_seconds=20, hang_seconds=120)
RUNS = Unit(active="active", sub="running", result="success", main_pid=7)
KEY = "canary-of-the-engines-key"


def failure(kind: str) -> CheckResult:
    return CheckResult("completion", ok=False, kind=kind, seconds=0.1, first_token_seconds=None, detail="It broke.")


def state(**seen: Any) -> tuple[str, bool]:
    verdict = judge(Evidence(**({"unit": RUNS} | seen)), LIMITS)
    assert verdict.reason
    return verdict.state, verdict.restart


# --- judgement -------------------------------------------------------------------------------------------------------


def test_in_time_is_ready_however_long_nothing_was_asked() -> None:
    assert state(still_seconds=100_000) == ("ready", False)
    assert state(waited_seconds=19, still_seconds=100_000) == ("ready", False)


def test_late_while_tokens_advance_is_busy_for_as_long_as_it_takes() -> None:
    assert state(waited_seconds=21, still_seconds=0) == ("busy", False)
    assert state(waited_seconds=3500, still_seconds=119) == ("busy", False)


def test_late_and_still_for_the_hang_deadline_is_hung_and_restarted() -> None:
    assert state(waited_seconds=119, still_seconds=100_000) == ("busy", False)
    assert state(waited_seconds=120, still_seconds=120) == ("hung", True)


def test_an_idle_time_before_the_completion_does_not_count_as_still() -> None:
    assert state(waited_seconds=30, still_seconds=100_000) == ("busy", False)


@pytest.mark.parametrize("kind", ["unreachable", "bad_answer", "not_ready"])
def test_only_errors_takes_it_out_at_once_and_restarts_it_at_the_deadline(kind: str) -> None:
    assert state(failure=failure(kind), failing_seconds=0, still_seconds=500) == ("down", False)
    assert state(failure=failure(kind), failing_seconds=120, still_seconds=500) == ("down", True)


def test_an_engine_that_turns_requests_away_while_it_advances_is_busy() -> None:
    assert state(failure=failure("not_ready"), failing_seconds=900, still_seconds=3) == ("busy", False)


@pytest.mark.parametrize("kind", ["refused", "not_found"])
def test_a_restart_does_not_cure_a_wrong_key_or_name(kind: str) -> None:
    assert state(failure=failure(kind), failing_seconds=9999, still_seconds=9999) == ("down", False)


@pytest.mark.parametrize(
    ("unit", "expected", "reason"),
    [
        (Unit(active="activating", sub="start-post"), "starting", "start-post"),
        (Unit(active="activating", sub="auto-restart", result="signal"), "down", "signal"),
        (Unit(active="deactivating", sub="stop-sigterm", result="success"), "draining", "stops"),
        (Unit(active="deactivating", sub="stop-sigkill", result="oom-kill"), "down", "oom-kill"),
        (Unit(active="inactive", sub="dead", result="success"), "down", "inactive"),
        (Unit(active="failed", sub="failed", result="start-limit-hit", exit_status=1), "down", "too often"),
        (Unit(active="failed", sub="failed", result="exit-code", exit_status=78), "down", "GPU 0 is held by bob."),
    ],
    ids=lambda value: value.sub if isinstance(value, Unit) else None,
)
def test_a_unit_that_does_not_run_is_never_restarted_by_the_agent(unit: Unit, expected: str, reason: str) -> None:
    seen = Evidence(unit=unit, waited_seconds=9999, still_seconds=9999, gate="GPU 0 is held\nby bob.\n")
    verdict = judge(seen, LIMITS)
    assert (verdict.state, verdict.restart) == (expected, False)
    assert reason in verdict.reason


def test_without_an_answer_of_systemd_the_requests_decide() -> None:
    assert state(unit=Unit()) == ("ready", False)
    assert state(unit=Unit(), waited_seconds=500, still_seconds=500)[0] == "hung"


def test_pauses_double_up_to_an_hour_and_are_forgotten_after_a_long_quiet() -> None:
    pauses, now = Pauses(), 1000.0
    seen = []
    for _ in range(9):
        assert pauses.due(now)
        pauses.restarted(now)
        assert not pauses.due(now + pauses.seconds - 1)
        seen.append(pauses.seconds)
        now += pauses.seconds
    assert seen == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    pauses.restarted(now + 3 * 3600)
    assert pauses.seconds == 60


# --- reading ---------------------------------------------------------------------------------------------------------

# Lines as vLLM 0.32.0 prints them, and as releases before 0.11 named the cache.
NEW = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="minimax m2.5"} 8.0
vllm:num_requests_waiting{engine="0",model_name="minimax m2.5"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="minimax m2.5",reason="capacity"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="minimax m2.5"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="minimax m2.5"} 120.0
vllm:prompt_tokens_created{engine="0",model_name="minimax m2.5"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="minimax m2.5"} 64.0
"""
OLD = NEW.replace("kv_cache_usage", "gpu_cache_usage").replace("_total{", "{").replace("vllm:", "vllm_")


def test_counters_are_read_under_the_names_of_every_release() -> None:
    assert read_load(NEW) == Load(8, 3, (64.0, 120.0, 0.25, None))
    assert read_load(OLD) == Load(8, 3, (64.0, 120.0, None, 0.25))


def test_data_parallel_engines_are_added_up() -> None:
    both = read_load(NEW + NEW.replace('engine="0"', 'engine="1"'))
    assert both == Load(16, 6, (128.0, 240.0, 0.5, None))


@pytest.mark.parametrize("old", ["generation_tokens_total", "prompt_tokens_total", "kv_cache_usage_perc"])
def test_each_kind_of_progress_shows(old: str) -> None:
    lines = [
        line.replace(" 64.0", " 65.0").replace(" 120.0", " 121.0") if old in line else line for line in NEW.split("\n")
    ]
    later = "\n".join(line.replace(" 0.25", " 0.26") if old in line else line for line in lines)
    assert read_load(later).progress != read_load(NEW).progress


def test_what_is_no_metrics_page_says_nothing() -> None:
    assert read_load('{"error": "Unauthorized"}') == Load(None, None, (None,) * 4)


def test_units_are_read_as_systemctl_shows_several() -> None:
    shown = (
        "MainPID=411\nNRestarts=2\nResult=success\nExecMainStatus=0\nId=vllm-a-0.service\nActiveState=active\n"
        "SubState=running\n\nMainPID=0\nNRestarts=0\nResult=exit-code\nExecMainStatus=78\nId=vllm-a-1.service\n"
        "ActiveState=failed\nSubState=failed\n"
    )
    assert read_units(shown) == {
        "vllm-a-0.service": Unit("active", "running", "success", 0, 411, 2),
        "vllm-a-1.service": Unit("failed", "failed", "exit-code", 78, 0, 0),
    }


@pytest.mark.parametrize(
    ("target", "server_state", "name"),
    [
        ("/replicas/m-0", None, "m-0"),
        ("/replicas/gpu-a.m-0", None, "m-0"),
        ("/replicas/gpu-a.example.com.m-0", None, "m-0"),
        ("/check?name=m-1", None, "m-1"),
        # As HAProxy's manual shows the header.
        ("/check", "UP 2/3; name=replicas/gpu-a.m-0; node=lb1; weight=1/2; scur=13/22; qcur=0", "m-0"),
        ("/check", None, None),
        ("/replicas", None, None),
    ],
)
def test_a_request_names_its_replica_in_any_of_three_ways(
    target: str, server_state: str | None, name: str | None
) -> None:
    assert asked_name(target, server_state) == name


def test_a_process_is_killed_only_if_it_is_the_units(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        assert not kill_main(process.pid, "vllm-a-0.service")
        assert process.poll() is None
        monkeypatch.setattr(health_agent, "unit_from_cgroup", lambda _: "vllm-a-0.service")
        assert kill_main(process.pid, "vllm-a-0.service")
        assert process.wait(5) == -signal.SIGKILL
    assert not kill_main(process.pid, "vllm-a-0.service")


# --- an agent and an engine ------------------------------------------------------------------------------------------


class Engine:
    """A server with an engine's two routes; `behaviour` may be changed at any time."""

    def __init__(self) -> None:
        self.behaviour = "works"
        self.tokens = 0
        self.stopping = threading.Event()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Keep the test output clean."""

            def do_GET(self) -> None:
                if engine.behaviour == "hangs":
                    engine.stopping.wait(60)
                engine.tokens += engine.behaviour == "saturated"
                self.answer(200, f"vllm:num_requests_running 8.0\nvllm:generation_tokens_total {engine.tokens}\n")

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Authorization"] == f"Bearer {KEY}"
                while engine.behaviour in ("saturated", "hangs", "stuck") and not engine.stopping.wait(0.02):
                    pass
                if engine.behaviour == "fails":
                    self.answer(500, json.dumps({"error": {"message": f"EngineDeadError {KEY}"}}))
                else:
                    text = {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}
                    self.answer(200, json.dumps(text))

            def answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.server.shutdown()
        self.server.server_close()


class Host:
    """A watched engine, and the agent in front of it."""

    def __init__(self, engine: Engine, gate_folder: Path) -> None:
        self.lines: list[str] = []
        self.killed: list[tuple[int, str]] = []
        self.unit = RUNS
        limits = Limits(interval_seconds=0.05, late_seconds=0.2, hang_seconds=0.6)
        self.watch = Watch(
            Replica("m-0", "vllm-m-0.service", "127.0.0.1", engine.port, "m"),
            KEY,
            limits,
            self.lines.append,
            gate_folder=str(gate_folder),
            kill=lambda pid, unit: bool(self.killed.append((pid, unit))) or True,
        )
        self.agent = Agent("127.0.0.1", 0, [self.watch])

    def until(self, wanted: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not wanted():
            assert time.monotonic() < deadline, self.watch.answer()
            self.watch.look(self.unit)
            time.sleep(0.02)

    def becomes(self, state: str) -> None:
        self.until(lambda: self.watch.answer()["state"] == state)

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.agent.server_address[1], timeout=5)
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture
def host(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(health_agent, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(health_agent, "METRICS_SECONDS", 0.2)
    monkeypatch.setattr(health_agent, "RETRY_SECONDS", 0.02)
    host = Host(engine, tmp_path)
    host.watch.look(host.unit)
    host.watch.start()
    threading.Thread(target=host.agent.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield host
    host.agent.shutdown()
    host.agent.server_close()


def test_a_working_engine_is_ready_on_every_route(host: Host) -> None:
    host.until(lambda: None not in {host.watch.answer()[name] for name in ("last_completion_seconds", "running")})
    for path, headers in (
        ("/replicas/m-0", {}),
        ("/check?name=m-0", {}),
        ("/check", {"X-Haproxy-Server-State": "UP; name=replicas/gpu-a.m-0; node=a"}),
    ):
        status, body = host.get(path, **headers)
        answer = json.loads(body)
        assert (status, answer["state"], answer["running"], answer["name"]) == (200, "ready", 8, "m-0")
        assert answer["last_completion_seconds"] < 10
    assert json.loads(host.get("/replicas")[1])["replicas"][0]["name"] == "m-0"
    assert host.get("/replicas/other")[0] == 503
    assert host.get("/check")[0] == host.get("/")[0] == 404
    page = host.get("/metrics")[1]
    assert 'vllm_fleet_replica_state{replica="m-0",state="ready"} 1' in page
    assert 'vllm_fleet_replica_state{replica="m-0",state="hung"} 0' in page
    assert 'vllm_fleet_replica_hang_restarts_total{replica="m-0"} 0' in page


def test_a_saturated_engine_is_busy_keeps_its_requests_and_is_never_killed(host: Host, engine: Engine) -> None:
    engine.behaviour = "saturated"
    host.becomes("busy")
    until = time.monotonic() + 2  # more than three hang deadlines
    host.until(lambda: time.monotonic() > until)
    assert host.get("/replicas/m-0")[0] == 200
    assert host.killed == []
    engine.behaviour = "works"
    host.becomes("ready")


@pytest.mark.parametrize("behaviour", ["stuck", "hangs"])
def test_a_hung_engine_is_taken_out_and_killed_once_with_one_line_of_reason(
    host: Host, engine: Engine, behaviour: str
) -> None:
    engine.behaviour = behaviour
    host.becomes("hung")
    assert host.get("/replicas/m-0")[0] == 503
    until = time.monotonic() + 1
    host.until(lambda: time.monotonic() > until)  # the pause holds the next one back
    assert host.killed == [(7, "vllm-m-0.service")]
    assert [line for line in host.lines if "restarting vllm-m-0.service" in line and "no token came" in line]
    assert len([line for line in host.lines if "restarting" in line]) == 1
    host.unit = Unit("activating", "auto-restart", "signal")
    host.becomes("down")
    engine.behaviour = "works"
    host.unit = Unit("active", "running", "success", 0, 8, 1)
    host.becomes("ready")


def test_an_engine_that_only_fails_is_out_at_once_and_the_key_never_shows(host: Host, engine: Engine) -> None:
    engine.behaviour = "fails"
    host.becomes("down")
    assert host.get("/replicas/m-0")[0] == 503
    host.until(lambda: host.killed != [])
    assert KEY not in "".join(host.lines) + host.get("/replicas")[1]


def test_a_gate_that_refused_is_the_reason(host: Host, tmp_path: Path) -> None:
    (tmp_path / "m-0").write_text("GPU 0 is held by bob.\n")
    host.unit = Unit("failed", "failed", "exit-code", 78)
    host.becomes("down")
    assert "GPU 0 is held by bob." in json.loads(host.get("/replicas/m-0")[1])["reason"]


def test_what_systemd_does_not_say_stays_as_it_was(host: Host) -> None:
    host.watch.look(Unit())
    assert host.watch.answer()["state"] == "ready"
    host.unit = Unit("failed", "failed", "exit-code", 1)
    host.becomes("down")
    assert host.watch.look(Unit()).state == "down"


def test_gateways_read_the_verdict_from_the_reason_phrase(host: Host) -> None:
    def phrase(name: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", host.agent.server_address[1], timeout=5)
        connection.request("GET", f"/replicas/{name}")
        response = connection.getresponse()
        return response.status, response.reason

    assert phrase("m-0") == (200, "up")
    host.unit = Unit("failed", "failed", "start-limit-hit")
    host.becomes("down")
    assert phrase("m-0") == (503, f"down # down: {host.watch.answer()['reason']}")
    assert phrase("m-9") == (503, "down # it is not on this host")


def test_a_verdict_is_one_short_line_of_plain_text() -> None:
    said = down("hung: \u00fc\r\nX-Header: a" + "b" * 1000)
    assert said.startswith("down # hung: ? X-Header: ab")
    assert len(said) < 250


def test_the_program_refuses_bad_input_with_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vllm_fleet.target.health_agent", "--installed", str(tmp_path)]
    ended = subprocess.run(
        [*command, "--key-file", "/nowhere", "--address", "127.0.0.1", "--port", "1"],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)


def test_each_replica_is_read_from_the_release_it_was_installed_from(tmp_path: Path) -> None:
    for release, model in (("old", "m"), ("new", "n")):
        plan = {
            "model": {"served_name": model},
            "replicas": [
                {"name": f"m-{i}", "unit": f"vllm-m-{i}.service", "bind_address": "10.0.0.1", "port": 8001 + i}
                for i in range(2)
            ],
        }
        (tmp_path / release).mkdir()
        (tmp_path / release / "plan.json").write_text(json.dumps(plan))
    links = tmp_path / "installed"
    links.mkdir()
    (links / "m-0").symlink_to(tmp_path / "new")
    (links / "m-1").symlink_to(tmp_path / "old")
    (links / "gone").symlink_to(tmp_path / "pruned")
    assert installed(links) == [
        Replica("m-0", "vllm-m-0.service", "10.0.0.1", 8001, "n"),
        Replica("m-1", "vllm-m-1.service", "10.0.0.1", 8002, "m"),
    ]


def test_replicas_are_those_of_the_plan() -> None:
    plan = {
        "model": {"served_name": "m"},
        "replicas": [{"name": "m-0", "unit": "vllm-m-0.service", "bind_address": "10.0.0.1", "port": 8001}],
    }
    assert replicas_of(plan) == [Replica("m-0", "vllm-m-0.service", "10.0.0.1", 8001, "m")]
