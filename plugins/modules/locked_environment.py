"""Ansible module: make a Python environment from a lock."""

from __future__ import annotations

DOCUMENTATION = r"""
module: locked_environment
short_description: Make a Python environment from a lock
version_added: "0.1.0"
description:
  - Makes the folder O(path) with an environment that holds what O(lock) names and nothing else, by C(uv), which is
    itself brought from a lock. Wheels only, each checked by its hash.
  - The folder has a file C(complete) when, and only when, every file of every wheel is on the disk. Whatever interrupts
    the module before leaves none, and the next run takes it up from what C(uv) has in its cache.
  - One run at a time works in the folder above O(path); a second one waits, and then finds the work done.
  - Before that, environments beside it are pruned, so that there is room.
options:
  path:
    description: Folder of the environment; its name should change when the lock does.
    type: path
    required: true
  lock:
    description: The lock as text, requirements with hashes. A header with its size has the disk checked first.
    type: str
    required: true
  uv:
    description: Folder of C(uv); its name should change when O(uv_lock) does.
    type: path
    required: true
  uv_lock:
    description: The lock of C(uv), as text.
    type: str
    required: true
  python:
    description: Version of Python that the lock is for.
    type: str
    required: true
  python_downloads:
    description: Whether C(uv) may bring that Python where the host has none.
    type: bool
    default: true
  cache:
    description: Folder of uv's cache.
    type: path
    required: true
  index_url:
    description: The index to use, such as a mirror. What it holds of a user and password is neither shown nor passed in
      arguments. Empty for the ordinary one.
    type: str
    default: ""
  find_links:
    description: Folders on the host, or pages, with wheels that no index carries.
    type: list
    elements: str
    default: []
  torch_backend:
    description: Where C(uv) takes torch from (cpu, cu130, auto); empty for the ordinary index.
    type: str
    default: ""
  bundle:
    description: Folder on the host made by playbooks/bundle.yml. With it no network is asked for anything.
    type: path
  keep:
    description: How many environments stay that nothing uses.
    type: int
    default: 1
  named_by:
    description: Patterns of files that name the environments they need. What a running process names stays too.
    type: list
    elements: str
    default: []
  kernel_caches:
    description: Folder with a folder of compiled kernels per environment, which goes with it.
    type: path
  wait_seconds:
    description: How long to wait for another run.
    type: int
    default: 3600
attributes:
  check_mode:
    support: full
    description: Says whether the environment would be made, and fails where it could not for want of room.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Make the environment
  locked_environment:
    path: /opt/vllm-fleet/runtimes/vllm-0.32.0-cuda-cp312-x86_64-9f1c03ab52de
    lock: "{{ lookup('ansible.builtin.file', 'vllm-0.32.0-cuda-cp312-x86_64.txt') }}"
    uv: /opt/vllm-fleet/runtimes/uv-1f2e3d4c5b6a
    uv_lock: "{{ lookup('ansible.builtin.file', 'uv.txt') }}"
    python: "3.12"
    cache: /opt/vllm-fleet/runtimes/uv-cache
    named_by: [/etc/systemd/system/vllm-*.service]
  async: 3600
  poll: 10
"""

RETURN = r"""
path:
  description: The environment.
  returned: always
  type: str
  sample: /opt/vllm-fleet/runtimes/vllm-0.32.0-cuda-cp312-x86_64-9f1c03ab52de
python:
  description: The Python that it was made with; null where it was there.
  returned: always
  type: str
  sample: /usr/bin/python3.12
pruned:
  description: The environments that were removed, or would be.
  returned: always
  type: list
  elements: str
seconds:
  description: How long it took.
  returned: always
  type: float
"""

import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.locked_environment import (
    EnvironmentMakingError,
    Pruning,
    Wanted,
    check_bundle,
    check_space,
    make,
    prunable,
    prune,
)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            # Not secret: hosts log what modules are called with, and this is thousands of lines.
            "lock": {"type": "str", "required": True, "no_log": True},
            "uv": {"type": "path", "required": True},
            "uv_lock": {"type": "str", "required": True, "no_log": True},
            "python": {"type": "str", "required": True},
            "python_downloads": {"type": "bool", "default": True},
            "cache": {"type": "path", "required": True},
            "index_url": {"type": "str", "default": "", "no_log": True},
            "find_links": {"type": "list", "elements": "str", "default": []},
            "torch_backend": {"type": "str", "default": ""},
            "bundle": {"type": "path"},
            "keep": {"type": "int", "default": 1},
            "named_by": {"type": "list", "elements": "str", "default": []},
            "kernel_caches": {"type": "path"},
            "wait_seconds": {"type": "int", "default": 3600},
        },
        supports_check_mode=True,
    )
    given = module.params
    started = time.monotonic()
    wanted = Wanted(
        path=Path(given["path"]),
        lock=given["lock"],
        uv=Path(given["uv"]),
        uv_lock=given["uv_lock"],
        python=given["python"],
        cache=Path(given["cache"]),
        python_downloads=given["python_downloads"],
        index_url=given["index_url"],
        find_links=tuple(given["find_links"]),
        torch_backend=given["torch_backend"],
        bundle=Path(given["bundle"]) if given["bundle"] else None,
        wait_seconds=given["wait_seconds"],
    )
    pruning = Pruning(
        root=wanted.path.parent,
        wanted=wanted.path.name,
        keep=given["keep"],
        named_by=tuple(given["named_by"]),
        caches=Path(given["kernel_caches"]) if given["kernel_caches"] else None,
    )
    result = {"changed": False, "python": None, "pruned": []}
    try:
        if wanted.is_complete:
            pass
        elif module.check_mode:
            check_bundle(wanted)
            check_space(wanted)
            result.update(changed=True, pruned=[str(path) for path in prunable(pruning)])
        else:
            result["pruned"] = prune(pruning, wanted)
            result.update(make(wanted))
    except (EnvironmentMakingError, OSError) as error:
        module.fail_json(msg=str(error), path=str(wanted.path), **result)
    module.exit_json(path=str(wanted.path), seconds=round(time.monotonic() - started, 1), **result)


if __name__ == "__main__":
    main()
