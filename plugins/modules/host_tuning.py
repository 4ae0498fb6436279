"""Ansible module: compare a GPU host's settings with what is wanted."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_tuning
short_description: Compare a GPU host's settings with what is wanted
version_added: "0.1.0"
description:
  - Says for each setting what it is, what is wanted, what that costs, and whether it can be set on this host.
  - Returns the commands of a unit that sets what a boot forgets, each with the command that takes it back.
  - Changes nothing but O(state_file), which keeps the values from before the first change.
options:
  topology:
    description: The fact C(gpu_topology).
    type: dict
    required: true
  persistence:
    description: Keep the driver's state when nothing uses a GPU.
    type: bool
    default: true
  nvidia_uvm:
    description: Load the module C(nvidia-uvm).
    type: bool
    default: true
  limits:
    description: Lift the limits on locked memory and open files of shells.
    type: bool
    default: true
  transparent_hugepages:
    description: The kernel's mode, empty to leave it.
    type: str
    choices: ["", always, madvise, never]
    default: madvise
  numa_balancing_off:
    description: Keep the kernel from moving memory between NUMA nodes.
    type: bool
    default: true
  iommu:
    description: IOMMU mode to set by kernel arguments, empty to leave it.
    type: str
    choices: ["", passthrough, "off"]
    default: ""
  acs_redirect_off:
    description: Clear ACS redirection on the bridges above GPUs that have it.
    type: bool
    default: false
  power_limits_w:
    description: Power limit in watts by GPU UUID, or by C(all).
    type: dict
    default: {}
  graphics_clocks_mhz:
    description: Lowest and highest graphics clock in MHz by GPU UUID, or by C(all).
    type: dict
    default: {}
  sysfs_root:
    description: Where sysfs is, or a copy of it.
    type: path
    default: /sys
  procfs_root:
    description: Where procfs is, or a copy of it.
    type: path
    default: /proc
  nvidia_smi:
    description: C(nvidia-smi) by name or path.
    type: str
    default: nvidia-smi
  state_file:
    description: Where values from before the first change are kept.
    type: path
    default: /etc/vllm-fleet/tuning.json
attributes:
  check_mode:
    support: full
    description: The module then changes nothing.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: See what is to be set
  host_tuning:
    topology: "{{ ansible_facts.gpu_topology }}"
    iommu: passthrough
    power_limits_w: {all: 450}
"""

RETURN = r"""
settings:
  description: The settings; C(state) is C(as wanted), C(changes), C(at the next boot) or C(skipped).
  returned: always
  type: list
  elements: dict
  sample: [{name: power_limit, subject: GPU-a5e0584f-41ef-5f4b-af4b-d08ceba20d00, now: 600 W, wanted: 450 W,
            state: changes, price: prompts are read slower under load, why: null,
            start: nvidia-smi -i GPU-a5e0584f-41ef-5f4b-af4b-d08ceba20d00 -pl 450,
            stop: nvidia-smi -i GPU-a5e0584f-41ef-5f4b-af4b-d08ceba20d00 -pl 600}]
table:
  description: The settings as lines for a person.
  returned: always
  type: list
  elements: str
kernel_arguments:
  description: What the kernel's command line must have.
  returned: always
  type: list
  elements: str
  sample: [iommu=pt]
reboot_needed:
  description: Whether a boot is still missing for what is wanted.
  returned: always
  type: bool
"""

import json
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_probe import smi_runner
from ansible.module_utils.host_tuning import BadWishError, Host, decide, kernel_arguments, reboot_needed, table

_SMI_SECONDS = 60


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "topology": {"type": "dict", "required": True},
            "persistence": {"type": "bool", "default": True},
            "nvidia_uvm": {"type": "bool", "default": True},
            "limits": {"type": "bool", "default": True},
            "transparent_hugepages": {
                "type": "str",
                "choices": ["", "always", "madvise", "never"],
                "default": "madvise",
            },
            "numa_balancing_off": {"type": "bool", "default": True},
            "iommu": {"type": "str", "choices": ["", "passthrough", "off"], "default": ""},
            "acs_redirect_off": {"type": "bool", "default": False},
            "power_limits_w": {"type": "dict", "default": {}},
            "graphics_clocks_mhz": {"type": "dict", "default": {}},
            "sysfs_root": {"type": "path", "default": "/sys"},
            "procfs_root": {"type": "path", "default": "/proc"},
            "nvidia_smi": {"type": "str", "default": "nvidia-smi"},
            "state_file": {"type": "path", "default": "/etc/vllm-fleet/tuning.json"},
        },
        supports_check_mode=True,
    )
    given = module.params
    host = Host(given["sysfs_root"], given["procfs_root"], "/etc", given["nvidia_smi"])
    report = smi_runner(given["nvidia_smi"], _SMI_SECONDS)(["-q", "-x"]).text
    state_file = Path(given["state_file"])
    remembered: dict[str, Any] = json.loads(state_file.read_text(encoding="utf-8")) if state_file.exists() else {}
    try:
        settings, memory = decide(host, given, given["topology"], report, remembered)
    except BadWishError as error:
        module.fail_json(msg=str(error))
    changed = memory != remembered
    if changed and not module.check_mode:
        state_file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        draft = state_file.with_name(".{0}".format(state_file.name))
        draft.write_text(json.dumps(memory, indent=2) + "\n", encoding="utf-8")
        module.atomic_move(str(draft), str(state_file))
    module.exit_json(
        changed=changed,
        settings=[setting._asdict() for setting in settings],
        table=table(settings),
        kernel_arguments=kernel_arguments(settings),
        reboot_needed=reboot_needed(settings),
    )


if __name__ == "__main__":
    main()
