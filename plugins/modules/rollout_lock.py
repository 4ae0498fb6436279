"""Ansible module: the file by which two rollouts of one fleet keep out of each other's way."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rollout_lock
short_description: Take or release the lock of a rollout
version_added: "0.1.0"
description:
  - A file on a host that all controllers reach says who is at it. It is made in one step, so of two that try at the
    same moment one gets it. Who has it otherwise is reported, not judged.
options:
  path:
    description: The file.
    type: path
    default: /etc/vllm-fleet/rollout.lock
  state:
    description: V(present) takes it, V(absent) releases it.
    type: str
    choices: [present, absent]
    default: present
  holder:
    description: Who takes or releases it. Another's lock is not released.
    type: dict
    required: true
  replaces:
    description: The holder that it is taken over from; if it is another one by then, nothing happens.
    type: dict
attributes:
  check_mode:
    support: full
    description: Says what would change.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Take the lock
  rollout_lock:
    holder: {user: alice, controller: ops-1, pid: 4711, since: "2026-12-01T10:00:00Z", playbook: rollout.yml}
  register: __lock
"""

RETURN = r"""
holder:
  description: Who has it afterwards; empty when nobody does.
  returned: always
  type: dict
mine:
  description: Whether that is O(holder).
  returned: always
  type: bool
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule


def read(path: Path) -> dict[str, Any]:
    """Who has the lock; empty when nobody does, or the file says nothing."""
    with contextlib.suppress(OSError, ValueError):
        holder = json.loads(path.read_text(encoding="utf-8"))
        return holder if isinstance(holder, dict) else {}
    return {}


def take(path: Path, holder: dict[str, Any]) -> bool:
    """Make the file unless it is there: whether it was made."""
    new = path.with_name("{0}.{1}".format(path.name, os.getpid()))
    new.write_text(json.dumps(holder), encoding="utf-8")
    try:
        os.link(new, path)  # complete the moment that it is there
    except FileExistsError:
        return False
    finally:
        new.unlink()
    return True


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "default": "/etc/vllm-fleet/rollout.lock"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "holder": {"type": "dict", "required": True},
            "replaces": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    path, holder = Path(module.params["path"]), module.params["holder"]
    found = read(path)
    if module.params["state"] == "absent":
        changed = found == holder
        if changed and not module.check_mode:
            path.unlink()
        module.exit_json(changed=changed, holder={} if changed else found, mine=False)
    stale = path.exists() and (not found or found == module.params["replaces"])
    changed = stale or not path.exists()
    if module.check_mode:
        module.exit_json(changed=changed, holder=holder if changed else found, mine=changed or found == holder)
    path.parent.mkdir(mode=0o755, exist_ok=True)
    if stale:
        path.unlink()
    changed = changed and take(path, holder)
    found = read(path)
    module.exit_json(changed=changed, holder=found, mine=found == holder)


if __name__ == "__main__":
    main()
