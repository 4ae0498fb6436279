"""Ansible module: require that a unit's process runs where it was put."""

from __future__ import annotations

DOCUMENTATION = r"""
module: unit_placement
short_description: Require that a unit's process runs where it was put
version_added: "0.1.0"
description:
  - Reads from procfs which CPUs and memory the main process of a running systemd unit may use, and
    fails with the cause where that is not what was asked. A unit file alone proves nothing, since
    slices, cpusets, offline CPUs and the program itself can change what becomes of it.
  - Changes nothing. Run it as root, or the memory policy stays unread.
options:
  unit:
    description: The unit. It must be running.
    type: str
    required: true
  cpus:
    description: CPUs that the process must be limited to, as ranges. Null when any will do.
    type: str
  numa_nodes:
    description: NUMA nodes that I(memory_policy) names.
    type: list
    elements: int
    default: []
  memory_policy:
    description: How its memory must be placed. With C(none) it is not looked at.
    type: str
    choices: [bind, preferred, none]
    default: none
attributes:
  check_mode:
    support: full
    description: The module only reads.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Require that the kernel placed the replica as planned
  unit_placement:
    unit: vllm-minimax-m2-5-0.service
    cpus: 0-63,128-191
    numa_nodes: [0]
    memory_policy: bind
"""

RETURN = r"""
placement:
  description: What the process may use; null where it could not be read.
  returned: always
  type: dict
  sample: {pid: 411, cpus: "0-63,128-191", allowed_numa_nodes: 0-1, memory_policy: bind, numa_nodes: [0]}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.process_placement import differences, read_placement


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "cpus": {"type": "str"},
            "numa_nodes": {"type": "list", "elements": "int", "default": []},
            "memory_policy": {"type": "str", "choices": ["bind", "preferred", "none"], "default": "none"},
        },
        supports_check_mode=True,
    )
    unit = module.params["unit"]
    _, output, _ = module.run_command(
        ["systemctl", "show", "--property=Id,MainPID,Slice,EffectiveCPUs", unit], check_rc=True
    )
    shown = dict(line.split("=", 1) for line in output.splitlines())
    pid = int(shown["MainPID"])
    if pid == 0:
        module.fail_json(msg="{0} has no running process: see journalctl -u {0}.".format(unit))
    placement = {"pid": pid, **read_placement(pid)}
    online = Path("/sys/devices/system/cpu/online").read_text(encoding="ascii").strip()
    wrong = differences(module.params, placement, shown, online)
    if wrong:
        module.fail_json(msg="{0} is not where it was put. {1}".format(unit, " ".join(wrong)), placement=placement)
    module.exit_json(changed=False, placement=placement)


if __name__ == "__main__":
    main()
