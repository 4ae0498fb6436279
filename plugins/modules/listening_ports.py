"""Ansible module: refuse ports that a foreign program holds."""

from __future__ import annotations

DOCUMENTATION = r"""
module: listening_ports
short_description: Refuse TCP ports that a foreign program listens on
version_added: "0.1.0"
description:
  - Reads from procfs who listens on the given TCP ports, and fails with the name of the
    program, its process id and its systemd unit where it is not one that is allowed.
  - Changes nothing. Run it as root, or programs of other users cannot be named.
options:
  ports:
    description: TCP ports that are about to be used.
    type: list
    elements: int
    required: true
  allowed_units:
    description: Patterns (shell style) of systemd units that may hold the ports, our own for example.
    type: list
    elements: str
    default: []
  remedy:
    description: What the reader can change to use other ports; ends the error message.
    type: str
    default: choose other ports
attributes:
  check_mode:
    support: full
    description: The module only reads.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Refuse ports that another program holds
  listening_ports:
    ports: [8001, 8002]
    allowed_units: [vllm-*.service]
    remedy: set vllm_plan_first_port
"""

RETURN = r"""
listeners:
  description: Who listens on the ports.
  returned: always
  type: list
  elements: dict
  sample: [{port: 8001, pid: 411, program: vllm, unit: vllm-minimax-m2-5-0.service}]
"""

from fnmatch import fnmatch

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.listeners import listeners


def _describe(entry: dict) -> str:
    if entry["pid"] is None:
        return "port {port} by a program that this user cannot see".format(**entry)
    text = "port {port} by {program} (pid {pid}".format(**entry)
    return text + (", unit {unit})".format(**entry) if entry["unit"] else ")")


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "ports": {"type": "list", "elements": "int", "required": True},
            "allowed_units": {"type": "list", "elements": "str", "default": []},
            "remedy": {"type": "str", "default": "choose other ports"},
        },
        supports_check_mode=True,
    )
    found = listeners(module.params["ports"])
    foreign = [
        entry
        for entry in found
        if not any(fnmatch(entry["unit"] or "", pattern) for pattern in module.params["allowed_units"])
    ]
    if foreign:
        module.fail_json(
            msg="Already taken: {0}. Nothing was changed. Stop that program, or {1}.".format(
                "; ".join(_describe(entry) for entry in foreign), module.params["remedy"]
            ),
            listeners=found,
        )
    module.exit_json(changed=False, listeners=found)


if __name__ == "__main__":
    main()
