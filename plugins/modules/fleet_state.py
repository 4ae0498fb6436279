"""Ansible module: what is deployed on a host and what of it serves."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fleet_state
short_description: Tell what is deployed on a host and what of it serves
version_added: "0.1.0"
description:
  - Reads the releases of a host, and of each replica the release it came from, whether it came to serve, and what
    systemd says of it. Changes nothing. Run it as root.
options:
  root:
    description: Folder of releases.
    type: path
    default: /opt/vllm-fleet
  release:
    description: A release, whose units' checksums are wanted too.
    type: str
attributes:
  check_mode:
    support: full
    description: The module only reads.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: See what is deployed
  fleet_state:
  become: true
  register: __state
"""

RETURN = r"""
state:
  description: What is there; what is not known is null.
  returned: always
  type: dict
  contains:
    current:
      description: The release that the host last came to serve as a whole.
      type: str
      sample: 3f2a9c0d1e4b
    previous:
      description: The one before it.
      type: str
    releases:
      description: All that are kept, the newest first.
      type: list
      elements: str
    units:
      description: Checksum of each unit of O(release).
      type: dict
    replicas:
      description: By name, each replica whose unit is installed.
      type: dict
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.fleet_state import read_state


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={"root": {"type": "path", "default": "/opt/vllm-fleet"}, "release": {"type": "str"}},
        supports_check_mode=True,
    )
    module.exit_json(changed=False, state=read_state(Path(module.params["root"]), module.params["release"]))


if __name__ == "__main__":
    main()
