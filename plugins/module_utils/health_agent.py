"""Says of each replica of this host whether it may take requests, and restarts one that hangs.

One agent runs per host (`vllm-health.service`); gateways, status and alerts ask it and judge nothing themselves. An
engine's own `/health` says 200 while every request fails, so the agent asks for a one-token completion and, while that
is outstanding, watches the engine's counters:

- `ready`: completions come in time.
- `busy`: a completion is late, but tokens, prefill or cache advance. It keeps its requests and is never restarted.
- `hung`: a completion is late and nothing has advanced for the hang deadline. It gets no requests and is restarted.
- `down`: its unit does not run, or it answers every request with an error.
- `starting`, `draining`: its unit starts or stops.

`GET /replicas/NAME` answers 200 in the first two and 503 in the others, with `up` or `down # why` as its reason phrase,
which is what a gateway's agent-check reads. A replica that is not on this host is down. `GET /check` does the same for
the server that HAProxy names in `X-Haproxy-Server-State`, `GET /replicas` lists all, `GET /metrics` is for Prometheus.

A restart needs no rights beyond the engine's own user: the agent kills the unit's main process, and systemd, which sees
it fail, ends what is left of it and starts it again, within the unit's start limit.

Standard library, Python 3.9.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Optional
from urllib.parse import parse_qs, unquote, urlsplit

from .listeners import unit_from_cgroup
from .openai_client import CheckResult, Endpoint, InputError, read_key, run_check

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STATES = ("starting", "ready", "busy", "hung", "down", "draining")
SERVING = ("ready", "busy")

POLL_SECONDS = 2.0  # units and counters; both cost milliseconds
METRICS_SECONDS = 5.0  # an engine that does not answer this by then shows no progress
METRICS_BYTES = 16 * 1024 * 1024
RETRY_SECONDS = 1.0  # after a completion that failed
LONGEST_COMPLETION_SECONDS = 3600.0  # in a full queue a completion waits its turn; asking anew would lose its place
HTTP_SECONDS = 5.0  # for one request to the agent
REASON_CHARACTERS = 200  # HAProxy reads an answer's beginning only

FIRST_PAUSE_SECONDS = 60.0  # between two restarts of one replica; doubles
LONGEST_PAUSE_SECONDS = 3600.0

GATE_REFUSED = 78  # how start-engine ends when the start gate refused (EX_CONFIG of sysexits.h)

# Another try, and so a restart, may help against these; a key or a name that is not known stays unknown.
_CURABLE = ("unreachable", "not_ready", "bad_answer", "late")


@dataclass(frozen=True)
class Limits:
    """When a completion counts as late, and when a replica without progress as hung.

    Attributes:
        interval_seconds: Pause between two completions.
        late_seconds: From then on an outstanding completion is late.
        hang_seconds: So long may a late replica show no progress, or a running one only errors.
    """

    interval_seconds: float = 10.0
    late_seconds: float = 20.0
    hang_seconds: float = 120.0


@dataclass(frozen=True)
class Replica:
    """A replica as the plan names it."""

    name: str
    unit: str
    address: str
    port: int
    model: str


@dataclass(frozen=True)
class Unit:
    """What systemd says of a unit; `active` is None where it could not be asked."""

    active: Optional[str] = None
    sub: str = ""
    result: str = ""
    exit_status: int = 0
    main_pid: int = 0
    restarts: int = 0


@dataclass(frozen=True)
class Load:
    """What an engine's counters say.

    Attributes:
        running: Requests that are being worked on.
        waiting: Requests that wait.
        progress: Numbers of which one changes whenever the engine gets on: tokens generated, tokens prefilled, and
            the share of the cache in use, which grows with each piece of a long prefill before its token count does.
    """

    running: Optional[int] = None
    waiting: Optional[int] = None
    progress: tuple[Optional[float], ...] = ()


@dataclass(frozen=True)
class Evidence:
    """All that is known of a replica at one moment.

    Attributes:
        unit: Its unit.
        load: Its counters as they were last read.
        waited_seconds: How long the outstanding completion has been waited for; 0 between two.
        still_seconds: How long nothing has advanced.
        failure: Why the last completion failed, None if it did not.
        failing_seconds: How long every completion has failed.
        gate: What the start gate wrote about its last start.
    """

    unit: Unit
    load: Load = Load()
    waited_seconds: float = 0.0
    still_seconds: float = 0.0
    failure: Optional[CheckResult] = None
    failing_seconds: float = 0.0
    gate: str = ""


@dataclass(frozen=True)
class Verdict:
    """A state of STATES, why, and whether a restart is due."""

    state: str
    reason: str
    restart: bool = False


def judge(seen: Evidence, limits: Limits) -> Verdict:
    """Decide what a replica is. A pure function of what was seen."""
    if seen.unit.active not in ("active", "reloading", None):
        return _not_running(seen)
    if seen.failure is not None:
        if seen.failure.kind == "not_ready" and seen.still_seconds < limits.hang_seconds:
            return Verdict("busy", "it takes no more requests, and advanced {0:.0f} s ago".format(seen.still_seconds))
        curable = seen.failure.kind in _CURABLE
        return Verdict(
            "down",
            "completions have failed for {0:.0f} s: {1}".format(seen.failing_seconds, seen.failure.detail),
            restart=curable and seen.failing_seconds >= limits.hang_seconds,
        )
    if seen.waited_seconds < limits.late_seconds:
        return Verdict("ready", "completions come within {0:g} s".format(limits.late_seconds))
    still = min(seen.waited_seconds, seen.still_seconds)
    said = "a completion has been waited for {0:.0f} s, and {1} ({2} running, {3} waiting)"
    counts = ("unknown" if count is None else count for count in (seen.load.running, seen.load.waiting))
    if still >= limits.hang_seconds:
        return Verdict(
            "hung",
            said.format(
                seen.waited_seconds, "no token came and no prefill advanced for {0:.0f} s".format(still), *counts
            ),
            restart=True,
        )
    return Verdict("busy", said.format(seen.waited_seconds, "it advanced {0:.0f} s ago".format(still), *counts))


def _not_running(seen: Evidence) -> Verdict:
    unit = seen.unit
    if unit.active == "activating" and unit.sub != "auto-restart":
        return Verdict("starting", "its unit starts ({0})".format(unit.sub))
    if unit.active == "deactivating" and unit.result == "success":
        return Verdict("draining", "its unit stops: running requests may finish, new ones are not taken")
    if unit.active in ("activating", "deactivating"):
        return Verdict("down", "its unit ended ({0}) and is started again".format(unit.result))
    if unit.exit_status == GATE_REFUSED:
        return Verdict("down", "its start gate refused: {0}".format(" ".join(seen.gate.split()) or "see its journal"))
    if unit.result == "start-limit-hit":
        return Verdict("down", "it failed too often in a row and is not started again before someone looks")
    return Verdict("down", "its unit is {0} ({1})".format(unit.active, unit.result))


class Pauses:
    """Exponential pauses between the restarts of one replica."""

    def __init__(self) -> None:
        """Start without a restart."""
        self.count = 0
        self._last = 0.0

    @property
    def seconds(self) -> float:
        """The pause that the last restart imposes."""
        return min(FIRST_PAUSE_SECONDS * 2.0 ** (self.count - 1), LONGEST_PAUSE_SECONDS) if self.count else 0.0

    def due(self, now: float) -> bool:
        """Whether a restart may happen now."""
        return self.count == 0 or now - self._last >= self.seconds

    def restarted(self, now: float) -> None:
        """Note a restart; one long after the last starts anew."""
        if self.count and now - self._last > max(2 * self.seconds, LONGEST_PAUSE_SECONDS):
            self.count = 0
        self.count += 1
        self._last = now


# --- Reading ---------------------------------------------------------------------------------------------------------

# Prometheus names with `_` for `:` and without `_total`; releases differ in both, and in the cache's name.
_RUNNING, _WAITING = "vllm_num_requests_running", "vllm_num_requests_waiting"
_PROGRESS = ("vllm_generation_tokens", "vllm_prompt_tokens", "vllm_kv_cache_usage_perc", "vllm_gpu_cache_usage_perc")


def read_load(text: str) -> Load:
    """Read an engine's `/metrics`; series of one name (data parallel engines) are added up."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        name = series.partition("{")[0].replace(":", "_").removesuffix("_total")
        if name in (_RUNNING, _WAITING, *_PROGRESS):
            with contextlib.suppress(ValueError):
                sums[name] = sums.get(name, 0.0) + float(value)
    return Load(
        running=int(sums[_RUNNING]) if _RUNNING in sums else None,
        waiting=int(sums[_WAITING]) if _WAITING in sums else None,
        progress=tuple(sums.get(name) for name in _PROGRESS),
    )


def read_units(shown: str) -> dict[str, Unit]:
    """Read `systemctl show` of several units (blocks of NAME=VALUE) into {unit: Unit}."""
    units = {}
    for block in shown.split("\n\n"):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if values.get("Id"):
            units[values["Id"]] = Unit(
                active=values.get("ActiveState") or None,
                sub=values.get("SubState", ""),
                result=values.get("Result", ""),
                exit_status=int(values.get("ExecMainStatus") or 0),
                main_pid=int(values.get("MainPID") or 0),
                restarts=int(values.get("NRestarts") or 0),
            )
    return units


def ask_units(names: Sequence[str]) -> dict[str, Unit]:
    """Ask systemd; empty when it does not answer."""
    properties = "Id,ActiveState,SubState,Result,ExecMainStatus,MainPID,NRestarts"
    try:
        shown = subprocess.run(
            ["systemctl", "show", "--property=" + properties, "--", *names],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=METRICS_SECONDS,
            encoding="utf-8",
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return read_units(shown)


def ask_load(address: str, port: int) -> Optional[Load]:
    """Ask an engine for its counters; None when it does not answer."""
    connection = http.client.HTTPConnection(address, port, timeout=METRICS_SECONDS)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/metrics", headers={"Connection": "close"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                return None
            return read_load(response.read(METRICS_BYTES).decode("utf-8", "replace"))
        except (OSError, http.client.HTTPException):
            return None


def kill_main(pid: int, unit: str) -> bool:
    """Kill a unit's main process, and nothing that took its number meanwhile; False if that is not it."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if unit_from_cgroup(Path("/proc/{0}/cgroup".format(pid)).read_text(encoding="utf-8")) != unit:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


# --- Watching --------------------------------------------------------------------------------------------------------


class Watch:
    """One replica under observation: two threads ask it, `look` judges what they found."""

    def __init__(
        self,
        replica: Replica,
        key: str,
        limits: Limits,
        say: Callable[[str], None],
        *,
        gate_folder: str = "/run/vllm-fleet/start-gate",
        kill: Callable[[int, str], bool] = kill_main,
    ) -> None:
        """Know nothing yet.

        Args:
            replica: Which.
            key: The engine's key.
            limits: When it is late and when hung.
            say: Takes one line per change of state.
            gate_folder: Where the start gate leaves its verdicts.
            kill: Kills a unit's main process.
        """
        self.replica = replica
        self._endpoint = Endpoint(
            "http://{0}:{1}".format(replica.address, replica.port), replica.model, key, None, replica.unit
        )
        self._limits = limits
        self._say = say
        self._gate = Path(gate_folder) / replica.name
        self._kill = kill
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._pauses = Pauses()
        self._hang_restarts = 0
        self._verdict = Verdict("starting", "not looked at yet")
        self._since = time.time()
        self._forget(Unit())

    def _forget(self, unit: Unit) -> None:
        """Begin anew with another process."""
        now = time.monotonic()
        self._unit = unit
        self._load = Load()
        self._advanced = now
        self._asked: Optional[float] = None
        self._completed: Optional[float] = None
        self._completion_seconds: Optional[float] = None
        self._failure: Optional[CheckResult] = None
        self._failing = now

    def look(self, unit: Unit) -> Verdict:
        """Take in what systemd says, judge, and restart the replica when that is due."""
        with self._lock:
            if unit.active is None:
                unit = self._unit  # what cannot be asked is taken to be as it was
            if unit.main_pid != self._unit.main_pid:
                self._forget(unit)
            self._unit = unit
            verdict = judge(self._evidence(), self._limits)
            if verdict.state != self._verdict.state:
                self._since = time.time()
                self._say("{0}: {1}: {2}".format(self.replica.name, verdict.state, verdict.reason))
            self._verdict = verdict
            restart = verdict.restart and unit.main_pid > 0 and self._pauses.due(time.monotonic())
            if restart:
                self._pauses.restarted(time.monotonic())
                self._hang_restarts += 1
        if restart:
            self._restart(verdict, unit)
        return verdict

    def _restart(self, verdict: Verdict, unit: Unit) -> None:
        done = self._kill(unit.main_pid, self.replica.unit)
        self._say(
            "{0}: {1} {2}, since {3}; restart {4} in a row, the next not before {5:.0f} s".format(
                self.replica.name,
                "restarting" if done else "could not kill process {0} to restart".format(unit.main_pid),
                self.replica.unit,
                verdict.reason,
                self._pauses.count,
                self._pauses.seconds,
            )
        )

    def _evidence(self) -> Evidence:
        now = time.monotonic()
        gate = ""
        if self._unit.exit_status == GATE_REFUSED:
            with contextlib.suppress(OSError):
                gate = self._gate.read_text(encoding="utf-8", errors="replace")
        return Evidence(
            unit=self._unit,
            load=self._load,
            waited_seconds=0.0 if self._asked is None else now - self._asked,
            still_seconds=now - self._advanced,
            failure=self._failure,
            failing_seconds=now - self._failing,
            gate=gate,
        )

    def ask(self) -> bool:
        """Ask for one completion, if the unit runs, and wait for it; whether it came."""
        with self._lock:
            pid, runs = self._unit.main_pid, self._unit.active in ("active", None)
            self._asked = time.monotonic() if runs else None
        if not runs:
            return False
        result = run_check("completion", self._endpoint, LONGEST_COMPLETION_SECONDS)
        now = time.monotonic()
        with self._lock:
            if pid != self._unit.main_pid:
                return False  # the answer of a process that is gone
            self._asked = None
            if result.ok:
                self._completed, self._completion_seconds, self._failure = now, result.seconds, None
            else:
                self._failing = now if self._failure is None else self._failing
                self._failure = result
        return result.ok

    def read(self) -> None:
        """Read the counters, if the unit runs."""
        with self._lock:
            pid, runs = self._unit.main_pid, self._unit.active in ("active", None)
        load = ask_load(self.replica.address, self.replica.port) if runs else None
        with self._lock:
            if pid != self._unit.main_pid:
                return
            if load is None:
                self._load = replace(self._load, running=None, waiting=None)
            else:
                if load.progress != self._load.progress:
                    self._advanced = time.monotonic()
                self._load = load

    def start(self) -> None:
        """Ask and read from now on."""

        def asking() -> None:
            while not self._ended.wait(self._limits.interval_seconds if self.ask() else RETRY_SECONDS):
                pass

        def reading() -> None:
            while not self._ended.wait(POLL_SECONDS):
                self.read()

        for work in (asking, reading):
            threading.Thread(target=work, daemon=True).start()

    def end(self) -> None:
        """Ask no more: the replica is gone, or another has its name."""
        self._ended.set()

    def answer(self) -> dict[str, Any]:
        """What the agent says of the replica.

        Returns:
            name; state, since when (UTC) and why; `last_completion_seconds`, how long ago the last completion came,
            and `completion_seconds`, how long it took; running and waiting requests; `restarts` by systemd since the
            unit was last started by hand, and `hang_restarts`, those by this agent. Unknown is null.
        """
        with self._lock:
            return {
                "name": self.replica.name,
                "state": self._verdict.state,
                "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._since)),
                "reason": self._verdict.reason,
                "last_completion_seconds": (
                    None if self._completed is None else round(time.monotonic() - self._completed, 1)
                ),
                "completion_seconds": self._completion_seconds,
                "running": self._load.running,
                "waiting": self._load.waiting,
                "restarts": self._unit.restarts,
                "hang_restarts": self._hang_restarts,
            }


# --- Answering -------------------------------------------------------------------------------------------------------


def asked_name(target: str, server_state: Optional[str] = None) -> Optional[str]:
    """Name of the replica that a request means, None when it names none.

    Understands `/replicas/NAME`, `?name=NAME`, and in the header that HAProxy sends with a check `name=BACKEND/SERVER`.
    A gateway's servers are called HOST.REPLICA; replicas have no dot in their names.

    Args:
        target: Path and query.
        server_state: The header `X-Haproxy-Server-State`.
    """
    parts = urlsplit(target)
    path = unquote(parts.path)
    server = re.search(r"(?:^|;)\s*name=(?:[^;/]*/)?([^;]+)", server_state or "")
    if path.startswith("/replicas/"):
        name = path[len("/replicas/") :]
    else:
        name = parse_qs(parts.query).get("name", [server[1] if server else ""])[0]
    return name.strip().rpartition(".")[2] or None


_SERIES = (
    ("last_completion_age_seconds", "gauge", "Time since the last one-token completion.", "last_completion_seconds"),
    ("completion_seconds", "gauge", "How long the last one-token completion took.", "completion_seconds"),
    ("restarts_total", "counter", "Restarts by systemd since the unit was started by hand.", "restarts"),
    ("hang_restarts_total", "counter", "Restarts by the health agent since it was started.", "hang_restarts"),
)


def metrics(answers: Sequence[Mapping[str, Any]]) -> str:
    """The answers as Prometheus reads them; what is unknown is left out."""
    lines = [
        "# HELP vllm_fleet_replica_state 1 for the state that the replica is in.",
        "# TYPE vllm_fleet_replica_state gauge",
    ]
    lines += [
        'vllm_fleet_replica_state{{replica="{0}",state="{1}"}} {2}'.format(
            answer["name"], state, int(answer["state"] == state)
        )
        for answer in answers
        for state in STATES
    ]
    for name, kind, text, key in _SERIES:
        lines += ["# HELP vllm_fleet_replica_{0} {1}".format(name, text)]
        lines += ["# TYPE vllm_fleet_replica_{0} {1}".format(name, kind)]
        lines += [
            'vllm_fleet_replica_{0}{{replica="{1}"}} {2}'.format(name, answer["name"], answer[key])
            for answer in answers
            if answer[key] is not None
        ]
    return "\n".join(lines) + "\n"


def down(why: str) -> str:
    """The reason phrase that takes a replica out of a gateway, and shows why in its journal: one line of plain text."""
    return "down # " + " ".join(why.encode("ascii", "replace").decode().split())[:REASON_CHARACTERS]


class Agent(ThreadingHTTPServer):
    """The HTTP side: answers from what is known, never by asking."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: str, port: int, watches: Sequence[Watch]) -> None:
        """Listen."""
        self.watches = {watch.replica.name: watch for watch in watches}
        super().__init__((address, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Agent
    timeout = HTTP_SECONDS
    server_version = "vllm-fleet-health"
    sys_version = ""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.rstrip("/")
        watches = self.server.watches
        name = asked_name(self.path, self.headers.get("X-Haproxy-Server-State"))
        if path == "/metrics":
            text = metrics([watch.answer() for watch in watches.values()])
            self._send(http.client.OK, text.encode(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/replicas" and name is None:
            self._json(http.client.OK, {"replicas": [watch.answer() for watch in watches.values()]})
        elif name in watches and (path in ("/check", "/replicas") or path.startswith("/replicas/")):
            answer = watches[name].answer()
            if answer["state"] in SERVING:
                self._json(http.client.OK, answer, "up")
            else:
                self._json(http.client.SERVICE_UNAVAILABLE, answer, down(answer["state"] + ": " + answer["reason"]))
        elif name is not None and path.startswith("/replicas/"):
            answer = {"name": name, "state": "down", "reason": "it is not on this host", "replicas": sorted(watches)}
            self._json(http.client.SERVICE_UNAVAILABLE, answer, down("it is not on this host"))
        else:
            self._json(http.client.NOT_FOUND, {"error": "no such replica or path", "replicas": sorted(watches)})

    def _json(self, status: int, answer: Any, phrase: Optional[str] = None) -> None:
        self._send(status, (json.dumps(answer) + "\n").encode(), "application/json", phrase)

    def _send(self, status: int, body: bytes, content_type: str, phrase: Optional[str] = None) -> None:
        # A checker that has seen enough, as HAProxy does, closes before the end; the next one comes in seconds.
        with contextlib.suppress(ConnectionError):
            self.send_response(status, phrase)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Checks every few seconds are no news."""


# --- Script ----------------------------------------------------------------------------------------------------------


def replicas_of(plan: Mapping[str, Any]) -> list[Replica]:
    """The replicas that a plan (contract 3) names."""
    return [
        Replica(entry["name"], entry["unit"], entry["bind_address"], entry["port"], plan["model"]["served_name"])
        for entry in plan["replicas"]
    ]


def installed(folder: Path) -> list[Replica]:
    """The replicas of this host: `folder` has a link per name, to the release that its unit was taken from."""
    found = []
    for link in sorted(folder.glob("*/plan.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):  # a link that is being moved: the next look sees it
            plan = json.loads(link.read_text(encoding="utf-8"))
            found += [replica for replica in replicas_of(plan) if replica.name == link.parent.name]
    return found


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Watch until stopped: exit 2 for bad input, 1 when the port cannot be had."""
    parser = argparse.ArgumentParser(description="Say of each replica of this host whether it may take requests.")
    parser.add_argument("--installed", type=Path, required=True, help="folder with a link to its release per replica")
    parser.add_argument("--key-file", required=True, help="file with the engines' key on its first line")
    parser.add_argument("--address", required=True, help="address to listen on: the replicas'")
    parser.add_argument("--port", type=int, required=True, help="port to listen on")
    for name, value in vars(Limits()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=float, default=value)
    given = parser.parse_args(argv)
    limits = Limits(given.interval_seconds, given.late_seconds, given.hang_seconds)
    try:
        given.installed.iterdir()
        key = read_key(given.key_file)
    except (OSError, InputError) as error:
        sys.stderr.write("health-agent: {0}\n".format(error))
        return 2

    watches: dict[str, Watch] = {}

    def look() -> dict[str, Watch]:
        """Watch what is installed now, and judge it."""
        replicas = {replica.name: replica for replica in installed(given.installed)}
        for name, watch in list(watches.items()):
            if replicas.get(name) != watch.replica:
                watch.end()
                del watches[name]
        new = [Watch(replica, key, limits, _say) for name, replica in replicas.items() if name not in watches]
        watches.update({watch.replica.name: watch for watch in new})
        units = ask_units([watch.replica.unit for watch in watches.values()]) if watches else {}
        for watch in watches.values():
            watch.look(units.get(watch.replica.unit, Unit()))
        for watch in new:
            watch.start()
        return dict(watches)

    look()
    # Only now, since an answer before the first look would take every replica out.
    try:
        agent = Agent(given.address, given.port, list(watches.values()))
    except OSError as error:
        sys.stderr.write("health-agent: cannot listen on {0}:{1}: {2}\n".format(given.address, given.port, error))
        return 1
    threading.Thread(target=agent.serve_forever, daemon=True).start()
    while True:
        time.sleep(POLL_SECONDS)
        agent.watches = look()


if __name__ == "__main__":
    sys.exit(main())
