"""The lab's hosts, deployed by the README's main command through ansible-runner."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ansible_runner
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

REPOSITORY = Path(__file__).parents[2]
INVENTORY = REPOSITORY / "inventory" / "lab"
BIN = Path(sys.executable).parent
HOSTS = ("gpu-a", "gpu-b")


@dataclass(frozen=True)
class Run:
    """One finished play."""

    rc: int
    output: str
    stats: dict[str, dict[str, int]]

    def hosts(self, outcome: str) -> set[str]:
        """Return the hosts that have an outcome: changed, failures or dark (unreachable)."""
        return {host for host, count in self.stats.get(outcome, {}).items() if count}

    @property
    def paragraph(self) -> str:
        """What was printed, with line breaks and indentation folded, so that a sentence can be looked for."""
        return " ".join(self.output.split())


class Lab:
    """Runs playbooks and commands on the lab as a user would."""

    def __init__(self, scratch: Callable[[], Path]) -> None:
        """Keep `scratch`, which makes a new folder for each run's artifacts."""
        self._scratch = scratch

    def play(self, playbook: str, *arguments: str, extra_inventory: Path | None = None, **extravars: Any) -> Run:
        """Run one of the project's playbooks; its output goes to the terminal as it comes."""
        shown = " ".join([playbook, *arguments, *(["-e", json.dumps(extravars)] if extravars else [])])
        print(f"\n$ ansible-playbook -i inventory/lab {shown}", flush=True)  # noqa: T201  the log of a long test
        result = ansible_runner.run(
            private_data_dir=str(self._scratch()),
            project_dir=str(REPOSITORY),
            playbook=playbook,
            inventory=[str(INVENTORY), *([str(extra_inventory)] if extra_inventory else [])],
            cmdline=" ".join(arguments) or None,
            extravars=extravars,
            envvars={"ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg"), "ANSIBLE_FORCE_COLOR": "false"},
        )
        return Run(rc=result.rc, output=result.stdout.read(), stats=result.stats or {})

    def shell(self, host: str, command: str) -> str:
        """Run a shell command as root on a lab host and return what it printed."""
        done = subprocess.run(
            [
                *(BIN / "ansible", "--inventory", INVENTORY, host, "--become", "--one-line"),
                *("--module-name", "ansible.builtin.shell", "--args", command),
            ],
            check=False,
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.partition("(stdout) ")[2].replace("\\n", "\n").strip()

    def copy(self, host: str, source: Path, destination: str) -> None:
        """Copy a file to a lab host."""
        subprocess.run(
            [
                *(BIN / "ansible", "--inventory", INVENTORY, host, "--become", "--one-line"),
                *("--module-name", "ansible.builtin.copy", "--args", f"src={source} dest={destination} mode=0644"),
            ],
            check=True,
            capture_output=True,
            cwd=REPOSITORY,
        )

    def main_pids(self, host: str) -> dict[str, str]:
        """Return the main process of each of our running units on a host."""
        listed = self.shell(
            host,
            "for unit in $(systemctl list-units --plain --no-legend --state=active 'vllm-*.service' | cut -d' ' -f1); "
            "do echo $unit $(systemctl show --property=MainPID --value $unit); done",
        )
        return dict(line.split() for line in listed.splitlines())

    def variables(self, host: str) -> dict[str, Any]:
        """Return the variables that the inventory gives a host."""
        listing = subprocess.run(
            [BIN / "ansible-inventory", "--inventory", INVENTORY, "--host", host],
            check=True,
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
        )
        return dict(json.loads(listing.stdout))


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Boot the lab hosts."""
    lab = Lab(lambda: tmp_path_factory.mktemp("run"))
    assert lab.play("lab/up.yml").rc == 0
    return lab


@pytest.fixture(scope="session")
def deployed(lab: Lab) -> Lab:
    """Deploy by the README's main command."""
    assert lab.play("playbooks/deploy_minimax.yml").rc == 0
    return lab
