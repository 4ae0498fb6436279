"""Filters over the decisions in `src/vllm_fleet/rollout.py`: plain data in and out.

Each filter is documented in the YAML file of its name beside this one.
"""

from __future__ import annotations

import getpass
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ansible.errors import AnsibleFilterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

try:
    from vllm_fleet import gateway, rollout
except ImportError as error:
    raise AnsibleFilterError(
        "The package vllm_fleet is not installed for the Python that runs Ansible. Run `make setup` in the "
        "repository and use .venv/bin/ansible-playbook, or `pip install -e .` into Ansible's environment."
    ) from error

_STARTED = 19  # of /proc/PID/stat, counted after the name: when it began, which tells it from the number's next owner
_PARENT = 1


def _stat(pid: int) -> list[str]:
    """What /proc/PID/stat says after the name; nothing where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _is_ansible(pid: int) -> bool:
    try:
        return b"ansible-playbook" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def rollout_holder(playbook: str) -> dict[str, Any]:
    """This run, as its lock names it: a filter runs in a child of the process that counts."""
    pid = os.getpid()
    while (parent := int((_stat(pid) or ["", "0"])[_PARENT])) > 1 and _is_ansible(parent):
        pid = parent
    return {
        "user": getpass.getuser(),
        "controller": platform.node(),
        "pid": pid,
        "started": (_stat(pid) or ["0"] * (_STARTED + 1))[_STARTED],
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "playbook": playbook,
    }


def rollout_lock_refusal(holder: Mapping[str, Any], me: Mapping[str, Any], path: str, host: str) -> str:
    """Why this run may not begin while another has the lock."""
    found = _stat(int(holder.get("pid") or 0)) if holder.get("controller") == me["controller"] else []
    alive = bool(found) and found[_STARTED] == holder.get("started")
    return rollout.lock_refusal(holder, me, alive=alive, path=path, host=host)


def rollout_entry(state: Mapping[str, Any], host: str) -> dict[str, Any]:
    """What gateways balance over of a host, from what is in place on it."""
    return gateway.entry(host, rollout.serving(state))


class FilterModule:
    """Names of the filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "rollout_steps": rollout.steps,
            "rollout_sentence": rollout.sentence,
            "rollout_phase": rollout.phase,
            "rollout_entry": rollout_entry,
            "rollout_drained": rollout.drained,
            "rollout_restoration": rollout.restoration,
            "rollout_gate": rollout.gate,
            "rollout_journal": rollout.journal,
            "rollout_target": lambda state, release=None: rollout.rollback_target(state, release) or "",
            "rollout_requests": rollout.running_requests,
            "rollout_status": rollout.status,
            "rollout_holder": rollout_holder,
            "rollout_lock_refusal": rollout_lock_refusal,
        }
