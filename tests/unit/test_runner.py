"""`vllm-fleet run` and `runs`: a real play on this machine, and which lines its events are worth."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from vllm_fleet import runner
from vllm_fleet.cli import main

if TYPE_CHECKING:
    from pathlib import Path

PLAY = """
- name: Try it
  hosts: all
  gather_facts: false
  connection: local
  tasks:
    - name: Install the unit of m-0
      ansible.builtin.debug: {msg: fine}
    - name: Fail where asked
      ansible.builtin.fail: {msg: "m-0 did not come to serve"}
      when: inventory_hostname == failing
"""


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_FLEET_RUNS", str(tmp_path / "runs"))
    path = tmp_path / "try.yml"
    path.write_text(PLAY)
    return path


def test_a_run_tells_its_story_and_keeps_it(play: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(play), "-i", "host-a,host-b,", "-e", "failing=host-b"]) == 2
    told = capsys.readouterr().out.splitlines()
    assert any(line.endswith("== Try it") for line in told)
    assert any(line.split()[1:] == ["host-a", "m-0", "switch"] for line in told)
    assert any("host-b" in line and "failed at Fail where asked: m-0 did not come to serve" in line for line in told)
    assert any(line.split() == ["host-a", "0", "as", "it", "should", "be"] for line in told)

    (folder,) = (play.parent / "runs").iterdir()
    record = json.loads((folder / "run.json").read_text())
    assert (record["rc"], record["status"], record["failures"]) == (
        2,
        "failed",
        {"host-b": "m-0 did not come to serve"},
    )
    assert folder.stat().st_mode & 0o077 == 0
    assert main(["runs"]) == 0
    listed = capsys.readouterr().out.splitlines()[1]
    assert listed.split()[:2] == [folder.name, "failed"]
    assert listed.endswith("host-b")
    assert main(["runs", folder.name]) == 0
    assert capsys.readouterr().out.splitlines() == told


def test_a_killed_run_is_in_the_history_without_an_end(play: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = play.parent / "runs" / "20261201-100000-rollout"
    folder.mkdir(parents=True)
    (folder / "lines.txt").write_text("10:00:00  == Make the release ready\n")
    assert main(["runs"]) == 0
    assert "no end" in capsys.readouterr().out


def test_what_is_not_there_is_refused_with_what_is(play: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "rolout"]) == 2
    assert "rollout" in capsys.readouterr().err
    assert main(["runs", "nothing"]) == 2
    assert play.exists()


def event(kind: str, **data: Any) -> dict[str, Any]:
    return {"event": kind, "created": "2026-12-01T10:20:30.5", "event_data": data}


def test_a_replica_is_named_through_all_its_phases_and_none_twice() -> None:
    narrator = runner.Narrator()
    tasks = [
        "vllm_service : Drain m-1, m-0",
        "vllm_service : Wait until they have finished",
        "vllm_service : Wait until they have finished",
        "vllm_service : Remember how fast it was",
        "vllm_service : Start and wait until it serves, m-1",
    ]
    lines = [line for task in tasks for line in narrator.take(event("runner_on_start", host="gpu-a", task=task))]
    assert [line.split("  ")[0] for line in lines] == ["10:20:30"] * 3
    assert [" ".join(line.split()[2:]) for line in lines] == [
        "m-1, m-0 drain",
        "m-1, m-0 wait for running requests",
        "m-1 start",
    ]


def test_a_role_is_told_once_per_play() -> None:
    narrator = runner.Narrator()
    started = event("playbook_on_task_start", role="vllm_runtime", play="Prepare", task="Make it")
    assert len(narrator.take(started)) == 1
    assert narrator.take(started) == []
    assert narrator.take(event("runner_on_failed", host="a", ignore_errors=True, res={"msg": "x"})) == []
