"""Ansible module: ask how far a job is. Its action plugin asks again and again, and prints what comes back."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_weights_wait
short_description: Wait for the job that brings a model's files, and tell how far it is
version_added: "0.1.0"
description:
  - Asks the host at intervals, each time for a moment only, and prints one line per host - bytes, rate and time left.
  - A controller that goes away does not disturb the job; run the play again to watch it further.
options:
  folder:
    description: The folder that the job of M(model_weights_job) fills.
    type: path
    required: true
  poll_seconds:
    description: How often a line is printed.
    type: int
    default: 15
attributes:
  check_mode:
    support: none
    description: There is no job to wait for.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Wait for the files
  model_weights_wait:
    folder: /var/lib/vllm-fleet/weights/MiniMaxAI--MiniMax-M2.5/f710177d938eff80b684d42c5aa84b382612f21f
"""

RETURN = r"""
status:
  description: What the job said last.
  returned: always
  type: dict
  sample: {state: done, done_bytes: 230103924736, total_bytes: 230103924736}
active:
  description: Whether the job runs.
  returned: always
  type: bool
  sample: false
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.weights.unit import Unit


def main() -> None:
    """Run the module: one answer, at once."""
    module = AnsibleModule(
        argument_spec={
            "folder": {"type": "path", "required": True},
            "poll_seconds": {"type": "int", "default": 15},
        },
    )
    unit = Unit(module.params["folder"])
    active = unit.active()  # asked first: a job writes its last word before it ends
    status = unit.status()
    ended = not active and status.get("state") not in ("done", "failed")
    module.exit_json(
        changed=False, active=active, status=status, unit=unit.name, journal=unit.journal() if ended else ""
    )


if __name__ == "__main__":
    main()
