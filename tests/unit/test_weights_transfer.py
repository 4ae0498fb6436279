"""The watchdog: who writes is left alone, who does not is ended with all its children."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from vllm_fleet.target.weights import transfer

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

KIB = 1024
PATIENCE = 1.5  # seconds; the least that counts as progress in them is 26 KB


def run(folder: Path, script: str) -> tuple[transfer.Outcome, list[int]]:
    seen: list[int] = []
    return transfer.run(["sh", "-c", script], dict(os.environ), folder, PATIENCE, seen.append), seen


def test_who_writes_slowly_is_left_alone_for_longer_than_the_patience(tmp_path: Path) -> None:
    script = (
        f"for n in 1 2 3 4 5; do head -c {64 * KIB} /dev/zero >>{tmp_path}/file; sleep 0.6; done; echo well; exit 3"
    )
    outcome, seen = run(tmp_path, script)
    assert outcome == transfer.Outcome(3, stalled=False, output=("well",))
    assert seen == sorted(seen)
    assert seen[-1] > 4 * 64 * KIB


def test_who_stands_still_is_ended_with_its_children(tmp_path: Path) -> None:
    script = (
        f"head -c {64 * KIB} /dev/zero >{tmp_path}/a; (trap '' TERM; sleep 60; touch {tmp_path}/late) & echo $!; wait"
    )
    began = time.monotonic()
    outcome, _ = run(tmp_path, script)
    assert outcome.stalled
    assert outcome.returncode < 0
    assert time.monotonic() - began < 15
    (child,) = outcome.output
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{child}/exe") and time.monotonic() < deadline:  # noqa: PTH110  a dead link until reaped
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{child}/exe")  # noqa: PTH110


def test_a_trickle_counts_as_nothing(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, f"while true; do echo x >>{tmp_path}/file; sleep 0.1; done")
    assert outcome.stalled


def test_who_begins_again_and_again_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BEGIN_AGAIN", 3)
    script = (
        f"while true; do head -c {256 * KIB} /dev/zero >{tmp_path}/file; sleep 0.4; : >{tmp_path}/file; sleep 0.4; done"
    )
    began = time.monotonic()
    outcome, _ = run(tmp_path, script)
    assert outcome.stalled
    assert time.monotonic() - began > PATIENCE + 1  # a few times are nobody's fault


def test_only_the_last_lines_are_kept(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, "seq 1 100")
    assert outcome.output[-1] == "100"
    assert len(outcome.output) < 50
