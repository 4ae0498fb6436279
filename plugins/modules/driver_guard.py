"""Ansible module: write what keeps a driver in place."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_guard
short_description: Write what keeps a driver in place
version_added: "0.1.0"
description:
  - Writes or removes files, holds packages, and makes every initramfs anew where a file that goes into it changed.
options:
  files:
    description: Content by path; null for a file that must not be there. A script is made executable.
    type: dict
    default: {}
  hold:
    description: Packages that must be held.
    type: list
    elements: str
    default: []
  initramfs:
    description: Whether to make the initramfs anew whatever changed.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Says what would be written and held.
  diff_mode:
    support: full
    description: Shows the content of the files.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Keep nouveau from the GPUs
  driver_guard:
    files:
      /etc/modprobe.d/vllm-fleet-gpu-driver.conf: "blacklist nouveau\ninstall nouveau /bin/false\n"
  become: true
"""

RETURN = r"""
files:
  description: Files that were written or removed.
  returned: always
  type: list
  elements: str
held:
  description: Packages that were not held before.
  returned: always
  type: list
  elements: str
initramfs:
  description: Whether the initramfs was made anew.
  returned: always
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.driver_guard import GuardError, differences, hold, rebuild_initramfs, write
from ansible.module_utils.driver_probe import run_patiently

_GOES_INTO_INITRAMFS = "/etc/modprobe.d/"


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "files": {"type": "dict", "default": {}},
            "hold": {"type": "list", "elements": "str", "default": []},
            "initramfs": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    changes = differences(module.params["files"])
    initramfs = module.params["initramfs"] or any(path.startswith(_GOES_INTO_INITRAMFS) for path, _, _ in changes)
    try:
        if not module.check_mode:
            write(changes)
        held = hold(run_patiently, module.params["hold"], check=module.check_mode)
        if initramfs and not module.check_mode:
            rebuild_initramfs(run_patiently)
    except (GuardError, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=bool(changes or held or initramfs),
        files=[path for path, _, _ in changes],
        held=held,
        initramfs=initramfs,
        diff=[
            {
                "before": before or "",
                "after": after or "",
                "before_header": path if before is not None else "/dev/null",
                "after_header": path if after is not None else "/dev/null",
            }
            for path, before, after in changes
        ],
    )


if __name__ == "__main__":
    main()
