"""Ansible module: try on a host what only real transfers, builds and reads show, and keep what came of it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_checks
short_description: Try transfers, a kernel build and the disk, and keep the verdicts
version_added: "0.1.0"
description:
  - Copies and reduces between every pair of GPUs, builds and runs a kernel, and reads from the disk of the weights,
    with the engine's own environment. What the hardware says of its abilities is not believed.
  - Each step has a deadline. A transfer that hangs is killed, and the verdict names the pair.
  - Transfers and builds run in a transient unit of an unprivileged user, as the engine does.
  - Verdicts are kept in O(checks_file), where M(gpu_topology) finds them, with the circumstances that they were found
    under. What was tested under the same circumstances is not tested again.
options:
  topology:
    description: The fact C(gpu_topology).
    type: dict
    required: true
  script:
    description: Where C(gpu_checks.py) of this collection's module utilities lies on the host.
    type: path
    required: true
  environment:
    description: Folder of the engine's environment; its Python is in C(venv) below it.
    type: path
    required: true
  cuda_home:
    description: What the engine has as C(CUDA_HOME).
    type: path
    required: true
  weights_folder:
    description: Folder of the weights; it need not exist yet.
    type: path
    required: true
  user:
    description: Who the engine runs as. A user of that name need not exist yet.
    type: str
    default: vllm
  checks_file:
    description: Where verdicts are kept.
    type: path
    default: /var/lib/vllm-fleet/checks.json
  checks:
    description: What to try.
    type: list
    elements: str
    choices: [p2p, kernel_build, disk]
    default: [p2p, kernel_build, disk]
  repeat:
    description: Try again what was tried under the same circumstances.
    type: bool
    default: false
  step_seconds:
    description: Deadline of one step, such as one kind of transfer of one pair.
    type: int
    default: 30
  total_seconds:
    description: Deadline of each check.
    type: int
    default: 600
attributes:
  check_mode:
    support: full
    description: Says whether anything would be tried.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Try transfers, a build and the disk
  gpu_checks:
    topology: "{{ ansible_facts.gpu_topology }}"
    script: /opt/vllm-fleet/bin/gpu_checks.py
    environment: /opt/vllm-fleet/runtimes/vllm-0.32.0-cuda-cp312-x86_64-9f1c
    cuda_home: /opt/vllm-fleet/runtimes/vllm-0.32.0-cuda-cp312-x86_64-9f1c/cuda
    weights_folder: /var/lib/vllm-fleet/weights
"""

RETURN = r"""
tried:
  description: The checks that ran, or in check mode would run.
  returned: always
  type: list
  elements: str
  sample: [p2p]
checks:
  description: What is kept now.
  returned: always
  type: dict
  sample: {p2p: {verdict: ok, detail: 28 pairs moved data rightly}, disk_read_mib_s: 2900.0}
summary:
  description: One line for each check.
  returned: always
  type: list
  elements: str
  sample: ["p2p: ok: 28 pairs moved data rightly"]
"""

import json
import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_checks import check_disk
from ansible.module_utils.host_checks import circumstances, command, due, summary, usable
from ansible.module_utils.host_probe import read_checks

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _tried(module: AnsibleModule, check: str) -> dict[str, Any]:
    """Verdict and detail of one check."""
    gpus = usable(module.params["topology"]["gpus"])
    if check == "p2p" and len(gpus) < 2:  # noqa: PLR2004  (a pair)
        return {"verdict": "untested", "detail": "one GPU or none that could be used: there is no pair to try"}
    code, output, errors = module.run_command(command(check, gpus, module.params))
    try:
        result: dict[str, Any] = json.loads(output.strip().rpartition("\n")[2])
    except ValueError:
        said = (errors or output).strip().rpartition("\n")[2][:300]
        return {"verdict": "untested", "detail": "the check did not end by itself ({0}): {1}".format(code, said)}
    return result


def main() -> None:
    """Run the module."""
    names = ["p2p", "kernel_build", "disk"]
    module = AnsibleModule(
        argument_spec={
            "topology": {"type": "dict", "required": True},
            "script": {"type": "path", "required": True},
            "environment": {"type": "path", "required": True},
            "cuda_home": {"type": "path", "required": True},
            "weights_folder": {"type": "path", "required": True},
            "user": {"type": "str", "default": "vllm"},
            "checks_file": {"type": "path", "default": "/var/lib/vllm-fleet/checks.json"},
            "checks": {"type": "list", "elements": "str", "choices": names, "default": names},
            "repeat": {"type": "bool", "default": False},
            "step_seconds": {"type": "int", "default": 30},
            "total_seconds": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )
    given = module.params
    boot_id = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else None
    now = circumstances(given["topology"], boot_id, Path(given["environment"]).name)
    saved, _ = read_checks(given["checks_file"])
    # The disk is asked once for each folder: start deadlines follow from the answer, and units from those.
    asked = saved.get("disk_read_mib_s") and (saved.get("disk_read") or {}).get("folder") == given["weights_folder"]
    wanted = [
        name for name in given["checks"] if given["repeat"] or (not asked if name == "disk" else due(name, saved, now))
    ]
    if module.check_mode:
        module.exit_json(changed=bool(wanted), tried=wanted, checks=saved, summary=summary(saved))
    checks = dict(saved)
    for name in wanted:
        if name == "disk":
            read = check_disk(given["weights_folder"])
            checks["disk_read_mib_s"] = read["read_mib_s"]
            checks["disk_read"] = {"folder": given["weights_folder"], "detail": read["detail"]}
        else:
            checks[name] = {**_tried(module, name), "measured_under": now}
    changed = checks != saved
    if changed:
        target = Path(given["checks_file"])
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        draft = target.with_name(".{0}".format(target.name))
        draft.write_text(json.dumps(checks, indent=2) + "\n", encoding="utf-8")
        os.chmod(draft, 0o644)  # noqa: PTH101
        module.atomic_move(str(draft), str(target))
    module.exit_json(changed=changed, tried=wanted, checks=checks, summary=summary(checks))


if __name__ == "__main__":
    main()
