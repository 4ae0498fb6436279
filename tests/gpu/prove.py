#!/usr/bin/env python3
"""Prove the planned command on this host's GPUs: probe, plan, start exactly what the unit says, and compare.

The probe, the planner and the unit's template are the product's own (render.yml); systemd is not needed, since the
unit's environment and its ExecStart lines are read from the rendered file and run as they stand. How many GPUs a
replica takes is the plan's business, so the same command works with one, four or eight.

With --user the engine runs as that user, and the start gate runs before it, as the unit says. Give it an account of
its own (`useradd --system vllm`): the gate ends whatever else that user runs outside a unit.

    prove.py --card minimax_m2_5 --weights FOLDER --runtime FOLDER_OF_VENV --report FILE
    prove.py --card rank/card.yml --weights rank ...          a single rank (single_rank.py), with dummy weights
    prove.py ... --defaults                                    the same model with vllm serve's own defaults
    prove.py ... --flag moe-backend=deep_gemm --env NAME=VALUE one thing at a time; NAME= or -FLAG takes away
    prove.py ... --decode 1,8,32 --prefill 8192 --orphan       what to measure once it serves

Standard output is a short summary; the report is JSON. Exit code 1: it did not come to serve, or a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import engine_log
import load

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STOP_SECONDS = 60
# What a start needs whatever is compared: where to listen, and what to load.
KEPT_FLAGS = ("--served-model-name", "--host", "--port", "--tensor-parallel-size", "--load-format")
KEPT_ENVIRONMENT = re.compile(
    r"HOME|PATH|\w*CACHE\w*|FLEET_\w+|CUDA_(?:DEVICE_ORDER|VISIBLE_DEVICES|HOME)|VLLM_ENGINE_READY_TIMEOUT_S|HF_\w+|"
    r"TRANSFORMERS_OFFLINE|VLLM_NO_USAGE_STATS|VLLM_CPU_\w+|FLASHINFER_WORKSPACE_BASE"
)


@dataclass
class Command:
    """What a unit runs: before it starts, to start, and until it serves."""

    environment: dict[str, str]
    gate: list[str]
    start: list[str]
    wait: list[str]

    @classmethod
    def of(cls, unit: str, name: str, credentials: Path) -> Command:
        """Read a rendered unit as systemd does: quotes as C's, % and $ its own."""

        def words(key: str) -> list[str]:
            return [
                word.replace("${CREDENTIALS_DIRECTORY}", str(credentials))
                .replace("%n", name)
                .replace("%%", "%")
                .replace("$$", "$")
                for line in re.findall(rf"^{key}=(.*)$", unit, re.MULTILINE)
                for word in shlex.split(line)
            ]

        pairs = [word.partition("=") for word in words("Environment")]
        gate = [word.lstrip("+") for word in words("ExecStartPre")]
        return cls({key: value for key, _, value in pairs}, gate, words("ExecStart"), words("ExecStartPost"))

    def flags(self) -> list[tuple[str, str | None]]:
        """What follows `vllm serve WEIGHTS`, as flags with their values."""
        words, found = self.start[self.start.index("serve") + 2 :], []
        for index, word in enumerate(words):
            if word.startswith("--"):
                following = words[index + 1] if index + 1 < len(words) else "--"
                found.append((word, None if following.startswith("--") else following))
        return found

    def set_flags(self, flags: Sequence[tuple[str, str | None]]) -> None:
        """Replace them."""
        head = self.start[: self.start.index("serve") + 2]
        self.start = head + [word for flag, value in flags for word in (flag, value) if word is not None]

    def change(self, options: argparse.Namespace) -> None:
        """Take away, set or add what the command line says."""
        if options.defaults:
            self.set_flags([(flag, value) for flag, value in self.flags() if flag in KEPT_FLAGS])
            self.environment = {k: v for k, v in self.environment.items() if KEPT_ENVIRONMENT.fullmatch(k)}
        for text in options.flag:
            name, given, value = text.lstrip("-").partition("=")
            rest = [(flag, old) for flag, old in self.flags() if flag != f"--{name}"]
            self.set_flags(rest if text.startswith("-") else [*rest, (f"--{name}", value if given else None)])
        for text in options.env:
            name, _, value = text.partition("=")
            self.environment.pop(name, None)
            if value:
                self.environment[name] = value


class Engine:
    """A running engine with its log; the block's end stops it."""

    def __init__(self, command: Command, credentials: Path, log: Path, user: str | None) -> None:
        """Start it, as the unit's process would be."""
        environment = {**command.environment, "CREDENTIALS_DIRECTORY": str(credentials), "LANG": "C.UTF-8"}
        self.log, self.started = log, time.monotonic()
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command.start,
                env=environment,
                cwd=environment["HOME"],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )

    def __enter__(self) -> Self:
        """The engine itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ask it to end; kill what has not ended in time."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self, command: Command, limit_seconds: float | None) -> tuple[bool, float, list[str]]:
        """Run ExecStartPost: whether it serves, after how many seconds, and what the wait said."""
        words = list(command.wait)
        if limit_seconds:
            words[words.index("--deadline-seconds") + 1] = str(limit_seconds)
        done = subprocess.run(
            words, env={**os.environ, "MAINPID": str(self.process.pid)}, capture_output=True, text=True, check=False
        )
        return done.returncode == 0, round(time.monotonic() - self.started, 1), done.stdout.splitlines()


def render(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Probe and plan this host and write its units below root; returns the plan."""
    written = root / "opt/current/plan.json"
    if options.reuse and written.exists():
        kept: dict[str, Any] = json.loads(written.read_text())
        return kept
    credentials = root / "credentials"
    credentials.mkdir(parents=True, exist_ok=True)
    (credentials / "engine.key").write_text(secrets.token_hex(16) + "\n")
    given = json.loads(options.vars.read_text()) if options.vars else {}
    variables = {
        "proof_root": str(root),
        "vllm_plan_model": options.card,
        "vllm_plan_models_folder": str(ROOT / "models"),
        "model_weights_path": str(options.weights.resolve()),
        "vllm_runtime_path": str(options.runtime.resolve()),
        "vllm_service_user": options.user or "nobody",
        "ansible_python_interpreter": sys.executable,
    } | given
    playbook = ["ansible-playbook", "-i", "localhost,", "-c", "local", str(HERE / "render.yml")]
    done = subprocess.run(
        [*playbook, "-e", json.dumps(variables)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"render.yml failed:\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}")
    if options.user:
        for folder in (credentials, Path(variables.get("vllm_service_state", root / "state"))):
            subprocess.run(["chown", "-R", f"{options.user}:{options.user}", str(folder)], check=True)
    plan: dict[str, Any] = json.loads(written.read_text())
    return plan


def smi(columns: str) -> list[list[str]]:
    """`nvidia-smi --query-gpu`, one row per GPU; empty where there is none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return []
    return [line.split(", ") for line in done.stdout.splitlines()]


def compare(plan: dict[str, Any], engine: dict[str, Any]) -> dict[str, float]:
    """Per cent by which the engine differs from the plan."""
    return {
        key: round(100 * (float(engine[key]) / float(plan[key]) - 1), 2)
        for key in ("weights_gib", "kv_cache_gib", "kv_cache_tokens", "full_length_requests", "start_seconds")
        if plan.get(key) and engine.get(key)
    }


def checks(command: Command) -> list[dict[str, Any]]:
    """What a client sees: every check of openai_probe."""
    words = [*command.wait, "--format", "json"]
    words[words.index("wait")] = "check"
    words[words.index("--deadline-seconds") + 1] = "60"
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)
    except ValueError:
        return [{"check": "all", "ok": False, "detail": done.stderr[-500:] or done.stdout[-500:]}]
    return [{key: result[key] for key in ("check", "ok", "seconds", "detail")} for result in found]


def orphan(engine: Engine, command: Command, user: str | None) -> dict[str, Any]:
    """Kill the server's own process, nothing else: who then holds the GPU, and does the start gate free it?"""
    result: dict[str, Any] = {"before": holders(engine)}
    if user:  # whoever starts as another user must be told who holds the memory, and must not touch it
        result["gate_of_another_user"] = gate(command, "nobody")
    os.kill(engine.process.pid, signal.SIGKILL)
    engine.process.wait()
    for seconds in (1, 9):
        time.sleep(seconds)
        result[f"after_{seconds}_more_s"] = holders(engine)
    if user:
        result |= {"gate": gate(command), "after_the_gate": holders(engine)}
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.process.pid, signal.SIGKILL)
    return result


def gate(command: Command, user: str | None = None) -> dict[str, Any]:
    """Run ExecStartPre: what the start gate says, to the unit's user or to another one."""
    words = [*command.gate, "--wait-seconds", "2"]
    if user:
        words[words.index("--user") + 1] = user
    start = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    verdict = Path(words[words.index("--verdict") + 1])
    return {
        "verdict": verdict.read_text().strip() if verdict.exists() else done.stderr[-300:],
        "said": done.stdout.splitlines()[-6:],
        "seconds": round(time.monotonic() - start, 2),
    }


def holders(engine: Engine) -> dict[str, Any]:
    """Memory used on each GPU, who the probe says holds it, and what is left of the engine's processes."""
    from vllm_fleet.target.gpu_topology import parse_smi  # noqa: PLC0415  only this needs the package
    from vllm_fleet.target.host_probe import smi_runner  # noqa: PLC0415

    return {
        "memory_mib": smi("memory.used"),
        "holders": [
            h for gpu in parse_smi(smi_runner("nvidia-smi", 30)(["-q", "-x"]).text)["gpus"] for h in gpu["holders"]
        ],
        "processes": group_members(engine.process.pid),
    }


def group_members(leader: int) -> list[str]:
    """Processes that are left of a process group, with their names."""
    done = subprocess.run(
        ["ps", "-o", "pid=,stat=,user=,comm=", "-g", str(leader)], capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, in order; returns the report."""
    root: Path = options.work.resolve()
    root.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    plan = render(options, root)
    replica = plan["replicas"][0]
    credentials = root / "credentials"
    command = Command.of((root / "opt/current" / replica["unit"]).read_text(), replica["unit"], credentials)
    command.change(options)
    report: dict[str, Any] = {
        "case": options.name,
        "gpus": smi("name,memory.total,driver_version"),
        "layout": plan["layout"],
        "probe_plan_render_seconds": round(time.monotonic() - began, 1),
        "command": command.start[command.start.index("serve") :],
        "environment": {k: v for k, v in command.environment.items() if not KEPT_ENVIRONMENT.fullmatch(k)},
        "plan": replica["expected"],
    }
    if options.dry_run:
        return report
    if options.user:
        report["gate"] = gate(command)
    else:  # start-engine wants a verdict
        verdict = root / "verdict"
        verdict.write_text("passed\n")
        command.start[command.start.index(command.gate[command.gate.index("--verdict") + 1])] = str(verdict)
    log = options.report.with_suffix(".log")
    served = load.Engine(
        f"http://{replica['bind_address']}:{replica['port']}",
        plan["model"]["served_name"],
        (credentials / "engine.key").read_text().strip(),
        json.loads((options.weights / "config.json").read_text())["vocab_size"],
        replica["max_model_len"],
    )
    with Engine(command, credentials, log, options.user) as engine:
        ready, seconds, said = engine.wait(command, options.limit_seconds)
        text = log.read_text(errors="replace")
        report["engine"] = {**engine_log.read(text), "start_seconds": seconds, "ready": ready}
        report["difference_pct"] = compare(report["plan"], report["engine"])
        report["wait"] = said[-2:]
        if not ready:
            return report | {"complaints": engine_log.complaints(text)}
        report["memory_used_mib"] = smi("memory.used")
        if options.checks:
            report["checks"] = checks(command)
        save(options, report)
        report["prefill"] = []
        for tokens in options.prefill:
            report["prefill"].append(load.prefill(served, tokens))
        report["decode"] = []
        for requests in options.decode:
            report["decode"].append(load.decode(served, requests, seconds=options.seconds))
            save(options, report)
        if options.bench:
            report["bench"] = bench(options, replica, plan, credentials)
        if options.orphan:
            report["orphan"] = orphan(engine, command, options.user)
    report["complaints"] = engine_log.complaints(log.read_text(errors="replace"))
    return report


def bench(
    options: argparse.Namespace, replica: dict[str, Any], plan: dict[str, Any], credentials: Path
) -> dict[str, Any]:
    """vLLM's own benchmark at one concurrency, against the same server, as a second opinion."""
    result = options.report.with_suffix(".bench.json")
    count = str(options.bench)
    words = [
        str(options.runtime / "venv/bin/vllm"), "bench", "serve", "--backend", "openai",
        "--host", replica["bind_address"], "--port", str(replica["port"]),
        "--model", plan["model"]["served_name"], "--tokenizer", str(options.weights),
        "--dataset-name", "random", "--random-input-len", "128", "--random-output-len", "256", "--ignore-eos",
        "--max-concurrency", count, "--num-prompts", str(2 * options.bench), "--save-result",
        "--result-dir", str(result.parent), "--result-filename", result.name,
    ]  # fmt: skip
    key = (credentials / "engine.key").read_text().strip()
    environment = {**os.environ, "OPENAI_API_KEY": key, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=240)
    if done.returncode or not result.exists():
        return {"error": (done.stdout + done.stderr)[-600:]}
    figures = json.loads(result.read_text())
    return {key: value for key, value in figures.items() if isinstance(value, int | float | str)}


def save(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Write what is known so far, so that a run that is cut off leaves something."""
    options.report.write_text(json.dumps(report, indent=1) + "\n")


def summary(report: dict[str, Any]) -> str:
    """A few lines for a terminal."""
    engine = report.get("engine", {})
    lines = [f"{report['case']}: {'serves' if engine.get('ready') else 'DOES NOT SERVE'} {json.dumps(engine)}"]
    lines += [f"  plan {json.dumps(report['plan'])}", f"  difference % {json.dumps(report.get('difference_pct'))}"]
    for key in ("checks", "prefill", "decode", "bench", "orphan", "complaints"):
        for entry in report[key] if isinstance(report.get(key), list) else [report.get(key)]:
            if entry:
                lines.append(f"  {key} {json.dumps(entry)[:600]}")
    return "\n".join(lines)


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between."""
    return [int(part) for part in text.split(",") if part]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="planned", help="what the report calls this case")
    parser.add_argument("--card", required=True, help="a card's name in models/, or its file")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--runtime", type=Path, required=True, help="the folder that holds venv/")
    parser.add_argument("--report", type=Path, required=True, help="JSON; the engine's log lies beside it")
    parser.add_argument("--work", type=Path, default=Path("/tmp/vllm-fleet-proof"), help="where units and caches go")  # noqa: S108  # a default that says where it is
    parser.add_argument("--user", help="whom the engine runs as, as the unit's does (default: whoever runs this)")
    parser.add_argument("--vars", type=Path, help="JSON with further variables of the roles")
    parser.add_argument("--reuse", action="store_true", help="take plan and units that lie in --work already")
    parser.add_argument("--limit-seconds", type=float, help="give up on the start earlier than the plan would")
    parser.add_argument("--defaults", action="store_true", help="leave vllm serve its own defaults")
    parser.add_argument("--flag", action="append", default=[], help="NAME=VALUE or NAME; =-NAME takes it away")
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE; NAME= takes it away")
    parser.add_argument("--no-checks", dest="checks", action="store_false")
    parser.add_argument("--decode", type=numbers, default=[], help="concurrencies")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each is measured")
    parser.add_argument("--prefill", type=numbers, default=[], help="prompt lengths")
    parser.add_argument("--bench", type=int, default=0, help="vllm bench serve at this concurrency")
    parser.add_argument("--orphan", action="store_true", help="kill the server at the end and see what is left")
    parser.add_argument("--dry-run", action="store_true", help="stop before the start")
    return parser.parse_args()


def main() -> int:
    """Run the case."""
    options = arguments()
    options.report = options.report.resolve()
    options.report.parent.mkdir(parents=True, exist_ok=True)
    if shutil.which("ansible-playbook") is None:
        raise SystemExit("ansible-playbook is not on PATH: run this with the repository's .venv (make setup).")
    report = run(options)
    save(options, report)
    sys.stdout.write(summary(report) + "\n")
    served = report.get("engine", {"ready": options.dry_run})["ready"]
    return 0 if served and all(check["ok"] for check in report.get("checks", [])) else 1


if __name__ == "__main__":
    sys.exit(main())
