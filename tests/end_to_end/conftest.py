"""The lab's hosts, deployed by the README's main command through ansible-runner."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ansible_runner
import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
INVENTORY = REPOSITORY / "inventory" / "lab"
HOSTS = ("gpu-a", "gpu-b")


@dataclass(frozen=True)
class Run:
    """One finished play."""

    rc: int
    output: str
    stats: dict[str, dict[str, int]]

    def changed(self) -> dict[str, int]:
        """Return the number of changed tasks by host, hosts without a change left out."""
        return {host: count for host, count in self.stats.get("changed", {}).items() if count}

    def failed(self) -> set[str]:
        """Return the hosts on which a task failed."""
        return {host for host, count in self.stats.get("failures", {}).items() if count}


Play = Callable[..., Run]


@pytest.fixture(scope="session")
def play(tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Give a function that runs one of the project's playbooks on the lab as a user would."""

    def run(playbook: str, *arguments: str, **extravars: Any) -> Run:
        private = tmp_path_factory.mktemp("runner")
        print(f"\n$ ansible-playbook -i inventory/lab {playbook} {' '.join(arguments)} {extravars or ''}", flush=True)  # noqa: T201  # the log of a long test
        result = ansible_runner.run(
            private_data_dir=str(private),
            project_dir=str(REPOSITORY),
            playbook=playbook,
            inventory=str(INVENTORY),
            cmdline=" ".join(arguments) or None,
            extravars=extravars,
            envvars={"ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg"), "ANSIBLE_FORCE_COLOR": "false"},
        )
        return Run(rc=result.rc, output=result.stdout.read(), stats=result.stats or {})

    return run


@pytest.fixture(scope="session")
def lab_vars() -> dict[str, Any]:
    """Return the variables that the lab's inventory gives its hosts."""
    listing = subprocess.run(
        [REPOSITORY / ".venv" / "bin" / "ansible-inventory", "-i", INVENTORY, "--host", HOSTS[0]],
        check=True,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    return json.loads(listing.stdout)


@pytest.fixture(scope="session")
def on_host() -> Callable[..., str]:
    """Give a function that runs a shell command as root on a lab host and returns what it printed."""

    def run(host: str, command: str) -> str:
        done = subprocess.run(
            [
                REPOSITORY / ".venv" / "bin" / "ansible",
                *("-i", INVENTORY, host, "--become", "-m", "ansible.builtin.shell", "-a", command),
            ],
            check=False,
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            env=None,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.partition(">>\n")[2]

    return run


@pytest.fixture(scope="session")
def deployed(play: Play) -> Run:
    """Boot the lab and deploy by the README's main command."""
    assert play("lab/up.yml").rc == 0
    run = play("playbooks/deploy_minimax.yml")
    assert run.rc == 0
    return run


def plan_of(text: str) -> dict[str, Any]:
    """Parse a plan.json."""
    return yaml.safe_load(text)
