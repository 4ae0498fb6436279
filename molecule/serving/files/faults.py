"""Break one thing on this host while clients send requests, and see that it does what it should: faults.py NAME.

Always required: no request of the other replica fails; those of the broken one end within the deadline; it serves again
without a person (where the fault itself stays, after that was removed); no process of it is left. Prints one line of
JSON with what happened, and ends with 1 and the reason when something else did. Standard library, as root.
"""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PLAN = json.loads(Path("/opt/vllm-fleet/current/plan.json").read_text())
REPLICAS = PLAN["replicas"]
WEIGHTS = Path("/var/lib/lab_weights")
CACHE = Path("/var/lib/vllm-fleet/cache")
AGENT = Path("/etc/systemd/system/vllm-health.service").read_text()
HANG_SECONDS = int(re.search(r"--hang-seconds (\d+)", AGENT)[1])
NOTICE_SECONDS = HANG_SECONDS + 60
# A request on a hung replica ends when that is restarted.
REQUEST_SECONDS = HANG_SECONDS + 30


def shell(*command: str) -> str:
    """What a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def agent(replica: dict) -> dict:
    """What the health agent says of a replica."""
    connection = http.client.HTTPConnection(replica["bind_address"], 9180, timeout=10)
    try:
        connection.request("GET", f"/replicas/{replica['name']}")
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def wait(what: str, seconds: float, wanted: Callable[[], bool]) -> float:
    """Seconds until something is so."""
    begun = time.monotonic()
    while not wanted():
        if time.monotonic() - begun > seconds:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.2)
    return time.monotonic() - begun


def shown(replica: dict, name: str) -> str:
    """A property of a replica's unit."""
    return shell("systemctl", "show", f"--property={name}", "--value", replica["unit"]).strip()


def processes(replica: dict) -> dict[int, str]:
    """Processes of a replica's unit: {pid: command line}."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"/{replica['unit']}" in (folder / "cgroup").read_text():
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
    return found


def requests_since(mark: float) -> dict[str, dict]:
    """By the gateway's own log, for each replica: requests, those that failed, and the longest of these in seconds.

    `none` are requests that no replica took. HAProxy's first letter of the end is who cut a request; C is the client.
    """
    found: dict[str, dict] = {}
    log = shell("journalctl", "--unit=vllm-gateway", "--output=cat", "--no-pager", f"--since=@{mark:.6f}")
    for status, server, total_ms, end in re.findall(r"status=(-?\d+) replica=(\S+) .*total_ms=(\d+) end=(\S+)", log):
        name = "none" if server == "<NOSRV>" else server.rpartition(".")[2]
        entry = found.setdefault(name, {"requests": 0, "failed": 0, "longest_failure_seconds": 0.0})
        entry["requests"] += 1
        if status != "200" or end[0] not in "-C":
            entry["failed"] += 1
            entry["longest_failure_seconds"] = max(entry["longest_failure_seconds"], int(total_ms) / 1000)
    return found


# --- Faults: each breaks a replica within its `with` block, and mends what would otherwise stay ----------------------

Break = Iterator[None]


def kill(replica: dict, pattern: str) -> None:
    """Kill the processes of a replica whose command line has a word; there must be one."""
    chosen = [pid for pid, command in processes(replica).items() if re.search(pattern, command)]
    assert chosen, processes(replica)
    for pid in chosen:
        os.kill(pid, signal.SIGKILL)


@contextmanager
def api_server_killed(replica: dict) -> Break:
    """The process that takes requests dies."""
    os.kill(int(shown(replica, "MainPID")), signal.SIGKILL)
    yield


@contextmanager
def engine_core_killed(replica: dict) -> Break:
    """The process that schedules dies."""
    kill(replica, "EngineCore")
    yield


@contextmanager
def worker_killed(replica: dict) -> Break:
    """The process that computes dies."""
    kill(replica, "Worker")
    yield


@contextmanager
def engine_stopped(replica: dict) -> Break:
    """Every process stops where it is, and keeps its connections and memory."""
    for pid in processes(replica):
        os.kill(pid, signal.SIGSTOP)
    yield


@contextmanager
def port_and_weights_gone(replica: dict) -> Break:
    """While it is down, another program takes its port, and a file of its weights disappears."""
    config = WEIGHTS / "config.json"
    shell("systemctl", "stop", replica["unit"])
    config.rename(config.with_suffix(".away"))
    listening = f"import socket, time; s = socket.create_server(('', {replica['port']})); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", listening]) as squatter:
        try:
            time.sleep(1)
            subprocess.run(["systemctl", "start", replica["unit"]], check=False, capture_output=True)
            yield
        finally:
            squatter.kill()
            config.with_suffix(".away").rename(config)
    assert squatter.returncode == -signal.SIGKILL, "the gate ended a foreign process"
    refused = shell("journalctl", "--unit", replica["unit"], "--lines=40", "--output=cat", "--no-pager")
    assert f"Port {replica['port']} is taken by python3 (process {squatter.pid}" in refused, refused
    assert f"The weights in {WEIGHTS} are not whole: config.json" in refused, refused
    assert shown(replica, "NRestarts") == "0"
    shell("systemctl", "start", "--no-block", replica["unit"])  # what a gate refused waits for a person


@contextmanager
def config_broken(replica: dict) -> Break:
    """It dies, and cannot start because a setting is wrong."""
    folder = Path(f"/run/systemd/system/{replica['unit']}.d")
    folder.mkdir(parents=True)
    (folder / "broken.conf").write_text("[Service]\nEnvironment=VLLM_PORT=broken\n")
    shell("systemctl", "daemon-reload")
    kill(replica, "vllm serve")
    try:
        before = int(shown(replica, "NRestarts"))
        wait("a start that fails", 240, lambda: int(shown(replica, "NRestarts")) >= before + 2)
        yield
    finally:
        (folder / "broken.conf").unlink()
        folder.rmdir()
        shell("systemctl", "daemon-reload")


@dataclass(frozen=True)
class Fault:
    """What is broken, on which replica, what the agent then says, and whether it stays broken until it is mended."""

    broken: Callable
    replica: int
    seen: str
    stays: bool = False


FAULTS = {
    fault.broken.__name__: fault
    for fault in (
        Fault(api_server_killed, 1, r"^(down|starting)"),
        Fault(engine_core_killed, 0, r"^(down|starting)"),
        Fault(worker_killed, 1, r"^(down|starting)"),
        Fault(engine_stopped, 0, r"^hung: .*no token came and no prefill advanced"),
        Fault(port_and_weights_gone, 1, r"^down: its start gate refused: .*config.json.*Port \d+ is taken", stays=True),
        Fault(config_broken, 0, r"^(down|starting)", stays=True),
    )
}


def run(fault: Fault) -> dict:
    """Break, see it noticed, mend, see it serve, and account for every request meanwhile."""
    replica, other = REPLICAS[fault.replica], REPLICAS[1 - fault.replica]
    wait("both replicas ready", 60, lambda: {agent(entry)["state"] for entry in REPLICAS} == {"ready"})
    shell("systemctl", "reset-failed", replica["unit"])  # the faults before this one do not count as a row of failures
    states: list[str] = []
    mark, old = time.time(), set(processes(replica))

    def noticed() -> bool:
        answer = agent(replica)
        said = f"{answer['state']}: {answer['reason']}"
        if [said] != states[-1:]:
            states.append(said)
        return re.search(fault.seen, said) is not None

    with fault.broken(replica):
        notice_seconds = wait(f"noticed, as {fault.seen}", NOTICE_SECONDS, noticed)
    begun = time.time() if fault.stays else mark
    wait("serving again", replica["start_deadline_seconds"], lambda: agent(replica)["state"] == "ready")
    recovered_seconds = time.time() - begun
    time.sleep(1)
    requests = requests_since(mark)
    report = {
        "seen": states[-1],
        "noticed_seconds": round(notice_seconds, 1),
        "recovered_seconds": round(recovered_seconds, 1),
        "requests": {"broken": requests.get(replica["name"]), "other": requests.get(other["name"])},
        "left": sorted(old & set(processes(replica))),
    }
    mine, others = requests.get(replica["name"], {}), requests.get(other["name"], {})
    assert others.get("requests", 0) > 0, report
    assert others["failed"] == 0, report
    assert mine.get("longest_failure_seconds", 0) <= REQUEST_SECONDS, report
    assert requests.get("none", {}).get("failed", 0) == 0, requests
    assert not report["left"], report
    return report


# --- Two that take nothing away --------------------------------------------------------------------------------------


def saturated() -> dict:
    """Every slot of a replica is full for longer than the hang deadline: busy, in the gateway, not restarted."""
    replica = REPLICAS[1]
    key = Path("/etc/vllm-fleet/engine.key").read_text().strip()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    length = replica["max_model_len"] - 16
    body = {"model": PLAN["model"]["served_name"], "prompt": "Hi", "max_tokens": length, "ignore_eos": True}
    ended, states, restarts = threading.Event(), set(), shown(replica, "NRestarts")

    def fill() -> None:
        while not ended.is_set():
            connection = http.client.HTTPConnection(replica["bind_address"], replica["port"], timeout=300)
            with suppress(OSError, http.client.HTTPException):
                connection.request("POST", "/v1/completions", json.dumps(body), headers)
                connection.getresponse().read()
            connection.close()

    for _ in range(3 * replica["max_num_seqs"]):
        threading.Thread(target=fill, daemon=True).start()
    wait("busy", 60, lambda: agent(replica)["state"] == "busy")
    full = time.monotonic() + 1.5 * HANG_SECONDS
    longest = {}
    while time.monotonic() < full:
        answer = agent(replica)
        states.add(answer["state"])
        longest = answer if answer["state"] == "busy" else longest
        time.sleep(0.5)
    ended.set()
    assert states <= {"busy", "ready"}, states
    assert shown(replica, "NRestarts") == restarts
    return {"states": sorted(states), "seen": longest["reason"]}


def disk_filled() -> dict:
    """The caches' file system is full: what runs goes on, and the gate would refuse another start, by name."""
    mark = time.time()
    fill = CACHE / "fill"
    try:
        with suppress(OSError), fill.open("wb") as file:
            while True:
                file.write(b"\0" * (1 << 20))
        time.sleep(5)
        arguments = re.search(r"start_gate (.*)", shell("systemctl", "cat", REPLICAS[0]["unit"]))[1].split()
        arguments[arguments.index("--verdict") + 1] = "/run/vllm-fleet/tried"
        gate = ["/opt/vllm-fleet/bin/fleet-target", "start_gate", *arguments, "--wait-seconds", "0"]
        said = shell(*gate, "--accept", "port_taken")
    finally:
        fill.unlink()
    assert "refused (cache_full)" in said, said
    requests = requests_since(mark)
    assert len(requests) == len(REPLICAS), requests
    assert not any(entry["failed"] for entry in requests.values()), requests
    return {"requests": requests, "seen": said.strip()}


def main() -> None:
    """Run one by its name."""
    name = sys.argv[1]
    work = {"saturated": saturated, "disk_filled": disk_filled}.get(name) or (lambda: run(FAULTS[name]))
    try:
        print(json.dumps(work()))
    except (AssertionError, TimeoutError) as error:
        print(f"{name}: {error!r}\n{json.dumps([agent(replica) for replica in REPLICAS], indent=1)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
