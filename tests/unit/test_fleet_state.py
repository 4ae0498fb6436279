"""What a host says of its releases and replicas, and the lock by which rollouts keep apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vllm_fleet.target import fleet_state

ROOT = Path(__file__).parents[2]
SYSTEMCTL = """#!/bin/sh
echo Id=vllm-m-0.service
echo ActiveState=active
echo NRestarts=2
echo ActiveEnterTimestampMonotonic=1000000
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with two releases, whose replica was switched to the second and has not come to serve."""
    root, units, programs = tmp_path / "root", tmp_path / "units", tmp_path / "bin"
    for folder in (units, programs, root / "installed", root / "applied"):
        folder.mkdir(parents=True)
    for moment, release in enumerate(("old", "new")):
        folder = root / "releases" / release
        folder.mkdir(parents=True)
        plan = {"vllm_version": release, "model": {"served_name": "m"}, "replicas": [{"name": "m-0", "port": moment}]}
        (folder / "plan.json").write_text(json.dumps(plan))
        os.utime(folder / "plan.json", (moment, moment))
        (folder / "release.json").write_text(json.dumps({"runtime": f"/r/{release}", "weights": "/w"}))
        text = f"# vllm-fleet replica m-0: written from the plan.\n[Service]\nEnvironment=FLEET_KEY_ID={release}1\n"
        (folder / "vllm-m-0.service").write_text(text)
    (root / "current").symlink_to(root / "releases" / "old")
    (root / "previous").symlink_to(root / "releases" / "pruned")
    (root / "installed" / "m-0").symlink_to(root / "releases" / "new")
    (units / "vllm-m-0.service").write_bytes((root / "releases" / "new" / "vllm-m-0.service").read_bytes())
    (units / "vllm-health.service").write_text("# vllm-fleet health agent\n")
    (root / "applied" / "vllm-m-0.service").write_bytes((root / "releases" / "old" / "vllm-m-0.service").read_bytes())
    (root / "applied" / "m-0.json").write_text('{"release": "old", "measured": {"tokens_per_second": 9}}')
    (programs / "systemctl").write_text(SYSTEMCTL)
    (programs / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return tmp_path


def test_a_switch_that_was_broken_off_shows(host: Path) -> None:
    state = fleet_state.read_state(host / "root", "old", host / "units")
    assert (state["current"], state["previous"], state["releases"]) == ("old", None, ["new", "old"])
    (replica,) = state["replicas"].values()
    assert replica["applied"] == state["units"]["vllm-m-0.service"] != replica["installed"]
    assert (replica["release"], replica["served"], replica["key_id"]) == ("new", "old", "new1")
    assert (replica["active"], replica["restarts"]) == ("active", 2)
    assert replica["up_seconds"] > 0
    assert replica["measured"] == {"tokens_per_second": 9}
    assert (replica["replica"]["port"], replica["vllm_version"], replica["runtime"]) == (1, "new", "/r/new")


def test_a_bare_host_has_nothing(tmp_path: Path) -> None:
    assert fleet_state.read_state(tmp_path, None, tmp_path) == {
        "current": None,
        "previous": None,
        "releases": [],
        "units": {},
        "replicas": {},
    }


def lock(path: Path, holder: str, **arguments: Any) -> dict[str, Any]:
    """Run the module as Ansible does."""
    given = {"path": str(path), "holder": {"user": holder}, **arguments}
    command = [
        *(Path(sys.executable).with_name("ansible"), "localhost", "--inventory", "localhost,", "--connection", "local"),
        *("--extra-vars", f"ansible_python_interpreter={sys.executable}", "--one-line"),
        *("--module-name", "rollout_lock", "--args", json.dumps(given)),
    ]
    environment = os.environ | {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment)
    return dict(json.loads(done.stdout[done.stdout.index("=>") + 2 :]))


def test_of_two_that_try_at_once_one_gets_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "rollout.lock"
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(lambda holder: lock(path, holder), ("alice", "bob")))
    assert sorted(answer["mine"] for answer in told) == [False, True]
    first = told[0]["holder"]
    assert told[1]["holder"] == first
    assert not lock(path, "carol", state="absent")["changed"]  # another's is not released
    assert not lock(path, "carol", replaces={"user": "dave"})["mine"]
    assert lock(path, "carol", replaces=first)["mine"]
    assert lock(path, "carol", state="absent")["changed"]
    assert not path.exists()
