"""Change the fleet of this scenario while clients send requests, and break the change in one way after another.

    python3 cases.py --url http://10.89.216.10:8000 --key K --folder FOLDER [CASE...]

Each case is a rollout, or several, that something happens to. Required of all: not one request fails; no replica is
left drained; what serves afterwards is what the case says. Prints a line per case: what was sent, ended well and
failed, and how long it took. FOLDER gets each run's output and the client's account.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).resolve().parent
SCENARIO = HERE.parent
REPOSITORY = SCENARIO.parents[1]
INVENTORY = SCENARIO / "inventory"
LOAD = REPOSITORY / "molecule" / "serving" / "files" / "load.py"
BIN = Path(sys.executable).parent
HOSTS = ("rollout-a", "rollout-b")
MODEL = "minimax-m2.5"
OTHER = "kimi-k2.5"


class Fleet:
    """The scenario's hosts, as a person at the controller sees them."""

    def __init__(self, url: str, key: str, folder: Path) -> None:
        """Know where everything is."""
        self.url, self.key, self.folder = url, key, folder
        self.runs = 0

    def start(self, playbook: str | Path = SCENARIO / "converge.yml", *options: str, **variables: Any) -> Run:
        """Start a play."""
        self.runs += 1
        command = [str(BIN / "ansible-playbook"), "-i", str(INVENTORY), str(playbook), *options]
        command += ["--extra-vars", json.dumps(variables)]
        return Run(command, self.folder / f"run-{self.runs:02}.log")

    def play(self, *arguments: Any, **variables: Any) -> Run:
        """Run a play to its end."""
        return self.start(*arguments, **variables).wait()

    def module(self, hosts: str, name: str, arguments: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
        """What a module returns on each host."""
        command = [str(BIN / "ansible"), hosts, "-i", str(INVENTORY), "--become", "--one-line"]
        command += ["--module-name", name, "--args", json.dumps(arguments or {})]
        environment = os.environ | {"ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg")}
        shown = subprocess.run(command, check=False, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
        found = re.findall(r"^(\S+) \| \S+ => (\{.*\})$", shown.stdout, re.MULTILINE)
        assert found, shown.stdout + shown.stderr
        return {host: json.loads(result) for host, result in found}

    def releases(self) -> dict[str, list[str]]:
        """Which engine each host's replicas run, by what their units came to serve."""
        found = {}
        for host, result in self.module("gpu_hosts", "fleet_state").items():
            replicas = result["state"]["replicas"]
            assert all(entry["applied"] == entry["installed"] for entry in replicas.values()), replicas
            assert all(entry["active"] == "active" for entry in replicas.values()), replicas
            found[host] = sorted(Path(entry["runtime"]).name for entry in replicas.values())
        return found

    def servers(self) -> dict[str, dict[str, Any]]:
        """The gateway's servers."""
        return dict(self.module("gateway", "gateway_servers")["rollout-front"]["servers"])

    def models(self) -> list[str]:
        """The model list that a client sees."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=10)
        with closing(connection):
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {self.key}"})
            return [card["id"] for card in json.loads(connection.getresponse().read())["data"]]

    def long_request(self, tokens: int) -> threading.Thread:
        """Send a request of so many tokens; its thread has `.failed` when it has ended."""
        thread = LongRequest(self, tokens)
        thread.start()
        time.sleep(1)
        return thread


class LongRequest(threading.Thread):
    """A request that takes its time."""

    def __init__(self, fleet: Fleet, tokens: int) -> None:
        """Know what to ask."""
        super().__init__(daemon=True)
        self.fleet, self.tokens, self.failed = fleet, tokens, True

    def run(self) -> None:
        """Read the stream to its end."""
        parts = urlsplit(self.fleet.url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=120)
        body = {"model": MODEL, "prompt": "Go on.", "max_tokens": self.tokens, "ignore_eos": True, "stream": True}
        headers = {"Authorization": f"Bearer {self.fleet.key}", "Content-Type": "application/json"}
        with closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            try:
                self.failed = b"data: [DONE]" not in connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                self.failed = True


class Run:
    """A play that runs."""

    def __init__(self, command: list[str], log: Path) -> None:
        """Start it."""
        self.log = log
        environment = os.environ | {"ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg"), "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, cwd=REPOSITORY, env=environment, start_new_session=True
            )

    def wait(self) -> Run:
        """Wait for its end."""
        self.process.wait(600)
        return self

    @property
    def rc(self) -> int | None:
        """Its exit status."""
        return self.process.poll()

    @property
    def output(self) -> str:
        """What it has said, on one line."""
        return " ".join(self.log.read_text(errors="replace").split())

    def reaches(self, task: str, seconds: float = 120) -> None:
        """Wait until it begins a task."""
        deadline = time.monotonic() + seconds
        while not re.search(rf"TASK \[[^\]]*{task}", self.output):
            assert self.rc is None, f"it ended before: {self.output[-2000:]}"
            assert time.monotonic() < deadline, task
            time.sleep(0.05)

    def kill(self) -> None:
        """End it as a lost controller does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def require(self, *words: str, rc: bool = False) -> None:
        """Require that it failed, or with rc that it did not, and said something."""
        assert (self.rc == 0) == rc, f"exit status {self.rc}: {self.output[-3000:]}"
        missing = [word for word in words if word not in self.output]
        assert not missing, f"{missing} not in {self.output[-6000:]}"


class Load:
    """Eight streams, each one request after another, and what became of them."""

    def __init__(self, fleet: Fleet, name: str, model: str = MODEL) -> None:
        """Know who asks for what."""
        self.account = fleet.folder / f"load-{name}"
        self.command = [sys.executable, str(LOAD), "--url", fleet.url, "--key", fleet.key, "--model", model]
        self.command += ["--account", str(self.account), "--pause", "0.1", "--tokens", "20"]
        self.failures: list[dict[str, Any]] = []
        self.counts = {"sent": 0, "ok": 0, "failed": 0}

    def __enter__(self) -> Self:
        """Begin."""
        self.stop = Path(f"{self.account}.stop")
        self.stop.unlink(missing_ok=True)
        self.process = subprocess.Popen(self.command)
        time.sleep(2)
        return self

    def __exit__(self, *_: object) -> None:
        """End, and count what was answered until then."""
        time.sleep(2)
        self.stop.touch()
        self.process.wait(30)
        for line in self.account.read_text().splitlines():
            second = json.loads(line)
            self.failures += second["failures"]
            for name in self.counts:
                self.counts[name] += second[name]


def whole(fleet: Fleet, engine: str) -> None:
    """Both hosts serve an engine with both replicas, and the gateway sends to all four."""
    assert fleet.releases() == {host: [engine] * 2 for host in HOSTS}, fleet.releases()
    servers = fleet.servers()
    assert len(servers) == 2 * len(HOSTS), servers
    assert all(server["up"] and not server["drained"] for server in servers.values()), servers


# --- Cases ------------------------------------------------------------------------------------------------------------


def upgrade(fleet: Fleet) -> None:
    """A good release goes through the fleet, and back by one command."""
    fleet.play(stand_in_release="better").require(rc=True)
    whole(fleet, "better")
    begun = time.monotonic()
    fleet.play(REPOSITORY / "playbooks" / "rollback.yml").require(rc=True)
    print(f"  rollback of the fleet: {time.monotonic() - begun:.0f} s")
    whole(fleet, "good")


def crashes_at_start(fleet: Fleet) -> None:
    """A release that does not start: its first replica goes back, and nobody else is touched."""
    run = fleet.play(stand_in_release="crash")
    run.require("went back to release", "crashing, as it was told to", "was left as it was")
    whole(fleet, "good")


def cannot_complete(fleet: Fleet) -> None:
    """A release that says it is healthy and answers nothing."""
    fleet.play(stand_in_release="fail").require("went back to release", "EngineCore encountered an issue")
    whole(fleet, "good")


def slower_than_tolerated(fleet: Fleet) -> None:
    """A release that serves, at a tenth of the speed."""
    fleet.play(stand_in_release="slow").require("tokens/s where the former release brought", "went back to release")
    whole(fleet, "good")


def overlong_request(fleet: Fleet) -> None:
    """A request longer than the drain's deadline: named, and put back; cut only when that is allowed."""
    requests = [fleet.long_request(1500) for _ in range(4)]  # one at each replica
    run = fleet.play(stand_in_release="better", vllm_service_drain_seconds=3)
    run.require("still works on 1 running requests", "through rollout-front", "Nothing was cut")
    whole(fleet, "good")
    for request in requests:
        request.join()
    assert not any(request.failed for request in requests)


def two_at_once(fleet: Fleet) -> None:
    """The second rollout is refused, with who is at it."""
    first = fleet.start(stand_in_release="better")
    first.reaches("Wait until they have finished")
    second = fleet.play(stand_in_release="good")
    second.require("Another rollout is under way", f"process {first.process.pid}", "Wait for it")
    first.wait().require(rc=True)
    whole(fleet, "better")
    fleet.play(stand_in_release="good").require(rc=True)


PHASES = (
    "Wait until they have finished",
    "Say which release it is of",
    "Start and wait until it serves",
    "Measure minimax",
    "Remember of which release",
    "Put it back",
)


def killed_in_every_phase(fleet: Fleet) -> None:
    """The controller is lost in each phase: the same command again finishes, or the way back reverses."""
    engine, next_engine = "good", "better"
    for number, phase in enumerate(PHASES):
        run = fleet.start(stand_in_release=next_engine)
        run.reaches(phase)
        time.sleep(0.3)
        run.kill()
        if number % 2:
            fleet.play(REPOSITORY / "playbooks" / "rollback.yml").require(rc=True)
            whole(fleet, engine)
        else:
            fleet.play(stand_in_release=next_engine).require(rc=True)
            whole(fleet, next_engine)
            engine, next_engine = next_engine, engine
    if engine != "good":
        fleet.play(stand_in_release="good").require(rc=True)


def model_and_layout(fleet: Fleet) -> None:
    """A host of two replicas becomes one wide one of another model, and back; the other host carries the traffic."""
    other = {"vllm_plan_options": {"served_model_name": OTHER}, "one_replica_of_all": True}
    converge = SCENARIO / "converge.yml"
    fleet.play(converge, "--limit=rollout-a", **other).require(rc=True)
    assert sorted(fleet.models()) == sorted([MODEL, OTHER]), fleet.models()
    with Load(fleet, "other", OTHER) as load:
        time.sleep(3)
    assert load.counts["ok"] > 0, load.counts
    assert load.counts["failed"] == 0, load.failures
    assert sorted(server["model"] for server in fleet.servers().values()) == sorted([OTHER, MODEL, MODEL])
    fleet.play(converge, "--limit=rollout-a").require(rc=True)
    assert fleet.models() == [MODEL], fleet.models()
    whole(fleet, "good")


CASES: tuple[Callable[[Fleet], None], ...] = (
    upgrade,
    crashes_at_start,
    cannot_complete,
    slower_than_tolerated,
    overlong_request,
    two_at_once,
    model_and_layout,
    killed_in_every_phase,
)


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser()
    for name in ("url", "key"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("cases", nargs="*")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    fleet = Fleet(given.url, given.key, given.folder)
    wrong = []
    for case in CASES:
        if given.cases and case.__name__ not in given.cases:
            continue
        begun = time.monotonic()
        problem = ""
        with Load(fleet, case.__name__) as load:
            try:
                case(fleet)
            except AssertionError as error:
                problem = f": {error}"
        if load.counts["failed"] or not load.counts["ok"]:
            problem += f"; requests failed: {load.failures[:5]}"
        seconds = time.monotonic() - begun
        print(f"{case.__name__}: {seconds:.0f} s, {load.counts}{problem}", flush=True)
        wrong += [case.__name__] if problem else []
        if problem and not given.cases:
            break
    sys.exit(f"failed: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
