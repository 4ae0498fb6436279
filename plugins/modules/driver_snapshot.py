"""Ansible module: keep what a driver change replaces, and put it back."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_snapshot
short_description: Keep what a driver change replaces, and put it back
version_added: "0.1.0"
description:
  - Keeps packages, holds and files in a folder that outlives the play, and puts them back when the change fails.
  - A snapshot that is there already is of a change that was interrupted; it is kept, being the state to go back to.
options:
  state:
    description: Whether to keep, to put back, or to forget.
    type: str
    choices: [saved, restored, dropped]
    required: true
  folder:
    description: Where the snapshot is.
    type: path
    default: /var/lib/vllm-fleet/gpu_driver/previous
  transaction:
    description: What M(driver_packages) returned. With O(state=saved).
    type: dict
    default: {install: [], remove: []}
  files:
    description: Paths that the change may write or remove. With O(state=saved).
    type: list
    elements: path
    default: []
  worked:
    description: Whether the driver works now. With O(state=saved).
    type: bool
    default: false
  apt_options:
    description: Options of apt-get by which it knows more sources than the host's. With O(state=saved).
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
    description: Does nothing in check mode.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Go back to the driver that was there before an interrupted change
  driver_snapshot:
    state: restored
  become: true
"""

RETURN = r"""
differences:
  description: What is still other than it was, in sentences.
  returned: with state=restored
  type: list
  elements: str
worked:
  description: Whether the driver worked when the snapshot was made.
  returned: with state=restored
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.driver_probe import run_patiently
from ansible.module_utils.driver_snapshot import Snapshot, SnapshotError


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["saved", "restored", "dropped"], "required": True},
            "folder": {"type": "path", "default": "/var/lib/vllm-fleet/gpu_driver/previous"},
            "transaction": {"type": "dict", "default": {"install": [], "remove": []}},
            "files": {"type": "list", "elements": "path", "default": []},
            "worked": {"type": "bool", "default": False},
            "apt_options": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    asked = module.params
    snapshot = Snapshot(run_patiently, asked["folder"], apt_options=asked["apt_options"])
    if module.check_mode:
        module.exit_json(changed=asked["state"] != "dropped" or snapshot.exists, differences=[], worked=False)
    try:
        if asked["state"] == "saved":
            new = not snapshot.exists
            snapshot.save(asked["transaction"], asked["files"], worked=asked["worked"])
            module.exit_json(changed=new)
        if asked["state"] == "restored":
            module.exit_json(changed=snapshot.exists, **snapshot.restore())
        there = snapshot.exists
        snapshot.drop()
        module.exit_json(changed=there)
    except SnapshotError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
