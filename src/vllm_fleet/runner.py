"""Run a playbook through ansible-runner: a plain line per event that matters, a closing table, and a history.

Each run has a folder of its own below `.cache/runs` of the repository, or VLLM_FLEET_RUNS: `run.json` (what, when, how
it ended), `lines.txt` (what was printed) and `artifacts/` (every event and all output, as ansible-runner keeps them).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

REPOSITORY = Path(__file__).resolve().parents[2]
MESSAGE_CHARACTERS = 500

# Tasks by the beginning of their names, and what a person calls what begins there. The replica is what the name adds.
PHASES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), phase)
    for pattern, phase in (
        (r"Drain (?P<replica>.+)$", "drain"),
        (r"Wait until they have finished$", "wait for running requests"),
        (r"Install the unit of (?P<replica>.+)$", "switch"),
        (r"Start and wait until it serves, (?P<replica>.+)$", "start"),
        (r"Ask what a client would ask, (?P<replica>.+)$", "gate: what a client sees"),
        (r"Measure (?P<replica>\S+)$", "gate: speed"),
        (r"Put it back$", "back in the gateways"),
        (r"Put the host right$", "go back"),
        (r"Let it serve$", "soak"),
        (r"Download the model|Bring the weights", "weights"),
    )
)


class Narrator:
    """Turns events into lines; remembers where each host is and how it ended."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.stats: dict[str, dict[str, int]] = {}
        self.failures: dict[str, str] = {}
        self._roles: set[tuple[str, str]] = set()
        self._said: dict[str, tuple[str, str]] = {}

    def take(self, event: Mapping[str, Any]) -> list[str]:
        """The lines that an event is worth.

        Args:
            event: As ansible-runner gives it.
        """
        kind, data = event.get("event"), event.get("event_data") or {}
        clock = str(event.get("created", ""))[11:19] or time.strftime("%H:%M:%S")
        if kind == "playbook_on_play_start":
            return [f"{clock}  == {data.get('name', '')}"]
        if kind == "playbook_on_task_start":
            return self._role(clock, data)
        if kind == "runner_on_start":
            return self._phase(clock, str(data.get("host", "")), str(data.get("task", "")))
        if kind in ("runner_on_failed", "runner_on_unreachable") and not data.get("ignore_errors"):
            return self._failure(clock, data, unreachable=kind == "runner_on_unreachable")
        if kind == "playbook_on_stats":
            names = ("ok", "changed", "failures", "dark", "rescued")
            hosts = sorted({host for name in names for host in data.get(name) or {}})
            self.stats = {host: {name: (data.get(name) or {}).get(host, 0) for name in names} for host in hosts}
        return []

    def _role(self, clock: str, data: Mapping[str, Any]) -> list[str]:
        role, play = data.get("role"), str(data.get("play", ""))
        if not role or (play, role) in self._roles:
            return []
        self._roles.add((play, role))
        return [f"{clock}  {'all':<20}  {role}"]

    def _phase(self, clock: str, host: str, task: str) -> list[str]:
        name = task.rpartition(" : ")[2]
        for pattern, phase in PHASES:
            found = pattern.match(name)
            if found:
                replica = found.groupdict().get("replica") or self._said.get(host, ("", ""))[0]
                if self._said.get(host) == (replica, phase):
                    return []
                self._said[host] = (replica, phase)
                return [f"{clock}  {host:<20}  {replica:<20}  {phase}"]
        return []

    def _failure(self, clock: str, data: Mapping[str, Any], *, unreachable: bool) -> list[str]:
        result = data.get("res") or {}
        host = str(data.get("host", ""))
        text = str(result.get("msg") or result.get("stderr") or "no message").strip()
        kind = "unreachable" if unreachable else "failed"
        self.failures[host] = text
        short = " ".join(text.split())[:MESSAGE_CHARACTERS]
        return [f"{clock}  {host:<20}  {kind} at {str(data.get('task', '')).rpartition(' : ')[2]}: {short}"]

    def table(self, seconds: float, status: str) -> list[str]:
        """The closing table."""
        lines = ["", f"{'host':<20}  {'changed':>7}  outcome"]
        for host, counts in self.stats.items():
            if counts["dark"]:
                outcome = "unreachable: run the same again when it is back"
            elif counts["failures"]:
                outcome = "failed, see above"
            else:
                outcome = "as it should be"
            lines.append(f"{host:<20}  {counts['changed']:>7}  {outcome}")
        return [*lines, f"{status} after {seconds:.0f} s"]


def runs_folder() -> Path:
    """Where runs are kept."""
    return Path(os.environ.get("VLLM_FLEET_RUNS") or REPOSITORY / ".cache" / "runs")


def find_playbook(name: str) -> Path | None:
    """A playbook by its path, or by its name in playbooks/ with or without .yml."""
    folder = REPOSITORY / "playbooks"
    for path in (Path(name), folder / name, folder / f"{name}.yml"):
        if path.is_file():
            return path.resolve()
    return None


def run(playbook: Path, arguments: Sequence[str], say: Any = print) -> int:
    """Run a playbook and keep everything about it.

    Args:
        playbook: Its path.
        arguments: What ansible-playbook is given besides.
        say: Takes each line.

    Returns:
        ansible-playbook's exit status.
    """
    import ansible_runner  # type: ignore[import-untyped]  # noqa: PLC0415  slow to import, and only this needs it

    begun = time.time()
    ident = time.strftime("%Y%m%d-%H%M%S", time.localtime(begun)) + f"-{playbook.stem}"
    folder = runs_folder() / ident
    folder.mkdir(mode=0o700, parents=True)
    narrator = Narrator()
    with (folder / "lines.txt").open("w", encoding="utf-8", buffering=1) as lines:

        def tell(new: Iterable[str]) -> None:
            for line in new:
                say(line)
                lines.write(line + "\n")

        def handle(event: Mapping[str, Any]) -> bool:
            tell(narrator.take(event))
            return True  # and keep it

        done = ansible_runner.run(
            private_data_dir=str(folder),
            ident="run",
            project_dir=str(REPOSITORY),
            playbook=str(playbook),
            cmdline=shlex.join(arguments),
            envvars={"ANSIBLE_CONFIG": os.environ.get("ANSIBLE_CONFIG", str(REPOSITORY / "ansible.cfg"))},
            event_handler=handle,
            quiet=True,
            suppress_env_files=True,
        )
        seconds = time.time() - begun
        tell(narrator.table(seconds, done.status))
        tell([f"everything about it: {folder}"])
    record = {
        "id": ident,
        "playbook": playbook.name,
        "arguments": list(arguments),
        "begun": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begun)),
        "seconds": round(seconds, 1),
        "status": done.status,
        "rc": done.rc,
        "hosts": narrator.stats,
        "failures": narrator.failures,
    }
    (folder / "run.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return int(done.rc or 0) if done.status == "successful" else int(done.rc or 1)


def history() -> list[str]:
    """A line per run, the latest first; one without an end was killed, or goes on."""
    lines = [f"{'run':<40}  {'status':<12}  {'seconds':>8}  failed hosts"]
    for folder in sorted(runs_folder().glob("*/lines.txt"), reverse=True):
        try:
            record = json.loads((folder.parent / "run.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            lines.append(f"{folder.parent.name:<40}  {'no end':<12}  {'-':>8}  -")
            continue
        bad = [host for host, counts in record["hosts"].items() if counts["failures"] or counts["dark"]]
        lines.append(f"{record['id']:<40}  {record['status']:<12}  {record['seconds']:>8.0f}  {', '.join(bad) or '-'}")
    return lines


def show(ident: str) -> list[str] | None:
    """What a run printed; None where there is no such run."""
    try:
        return (runs_folder() / Path(ident).name / "lines.txt").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
