"""Action plugin behind the module model_weights_wait: asks a host's job at intervals and prints one line each time."""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

FIRST_WAITS = (0.3, 0.7, 1, 2, 3)  # seconds: a job that has little to do is not kept waiting for
SILENCES = 20  # answers in a row that may fail to come

display = Display()


class ActionModule(ActionBase):
    """Waits."""

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask until the job has ended."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        host = (task_vars or {}).get("inventory_hostname", "")
        poll_seconds = int(self._task.args.get("poll_seconds", 15))
        waits, silent, printed_at = list(FIRST_WAITS), 0, time.monotonic()
        while True:
            try:
                answer = self._execute_module(module_args=dict(self._task.args), task_vars=task_vars)
                silent = 0
            except AnsibleConnectionFailure:
                silent += 1
                if silent > SILENCES:
                    raise
                display.display(f"{host}: does not answer; its job goes on")
                answer = {"active": True, "status": {}}
            if answer.get("failed"):
                return result | answer
            status = answer["status"]
            if status.get("state") == "failed":
                return result | {"failed": True, "msg": status["message"]}
            if status.get("state") == "done" and not answer["active"]:
                return result | answer | {"changed": False}
            if not answer["active"]:
                return result | {"failed": True, "msg": _ended(answer)}
            if status and time.monotonic() - printed_at >= poll_seconds:
                printed_at = time.monotonic()
                display.display(f"{host}: {progress(status)}")
            time.sleep(waits.pop(0) if waits else poll_seconds)


def progress(status: dict[str, Any]) -> str:
    """One line from a job's status."""
    done, total, state = status["done_bytes"], status["total_bytes"], status["state"]
    parts = [{"transferring": "downloading"}.get(state, state)]
    if total and state in ("transferring", "verifying"):
        unit, size = ("GiB", 1024**3) if total >= 1024**3 else ("MiB", 1024**2)
        parts.append(f"{done / size:.1f} of {total / size:.1f} {unit} ({100 * done // total} %)")
        parts.append(f"{status.get('bytes_per_second', 0) / 1024**2:.0f} MiB/s")
        left = status.get("seconds_left")
        parts.append(f"{_duration(left)} left" if left is not None else "time left unknown")
    if status.get("note"):
        parts.append(status["note"])
    return ", ".join(parts)


def _duration(seconds: int) -> str:
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min" if minutes else f"{seconds} s"


def _ended(answer: dict[str, Any]) -> str:
    """Why a job that left no last word is gone: killed, out of memory, or the host was started anew."""
    said = answer.get("journal") or "nothing"
    return (
        f"{answer['unit']} ended without a word, as after a kill, too little memory or a restart of the host. What was "
        f"verified is kept: deploy again, and it goes on. Its journal says: {said}"
    )
