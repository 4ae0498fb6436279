"""Ansible module: make a CUDA_HOME of links to the CUDA wheels of an environment."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cuda_home
short_description: Make a CUDA_HOME of links to the CUDA wheels of an environment
version_added: "0.1.0"
description:
  - Kernels that are built at run time need nvcc, headers and libraries where C(CUDA_HOME) says. The CUDA wheels of a
    Python environment have all of them, in folders and under names that such builds do not look for; links mend that.
  - Fails when the environment has no compiler. In check mode an environment that is not there yet counts as a change.
options:
  environment:
    description: Folder of the environment; its Python is in C(venv) below it.
    type: path
    required: true
  path:
    description: The folder to make. Nothing else may be in it.
    type: path
    required: true
attributes:
  check_mode:
    support: full
    description: Says whether links would change.
  diff_mode:
    support: full
    description: Lists the links.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Give the engine's environment a CUDA_HOME
  cuda_home:
    environment: /opt/vllm-fleet/runtimes/vllm-0.32.0-cuda-cp312-x86_64-9f1c
    path: /opt/vllm-fleet/runtimes/vllm-0.32.0-cuda-cp312-x86_64-9f1c/cuda
"""

RETURN = r"""
toolkit:
  description: The folder of the wheels that the links lead to, null where the environment is not there yet.
  returned: always
  type: str
  sample: /opt/vllm-fleet/runtimes/vllm-0.32.0-cuda-cp312-x86_64-9f1c/venv/lib/python3.12/site-packages/nvidia/cu13
libcuda:
  description: The driver's library, null where there is no driver; without it kernels compile and do not link.
  returned: always
  type: str
  sample: /lib/x86_64-linux-gnu/libcuda.so.1
"""

import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.cuda_home import driver_library, installed_links, set_links, toolkit_folder, wanted_links


def _listed(links: dict[str, str]) -> str:
    return "".join("{0} -> {1}\n".format(*link) for link in sorted(links.items()))


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "environment": {"type": "path", "required": True},
            "path": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    environment, home = module.params["environment"], Path(module.params["path"])
    if module.check_mode and not os.path.isfile("{0}/complete".format(environment)):  # noqa: PTH113  (may be unreadable)
        module.exit_json(changed=True, toolkit=None, libcuda=None, msg="{0} is not made yet.".format(environment))
    toolkit = toolkit_folder(environment)
    if toolkit is None:
        module.fail_json(
            msg="{0} holds no CUDA compiler, which the engine needs at its first start: no nvidia/cu*/bin/nvcc among "
            "its packages. Lock nvidia-cuda-nvcc with the rest, or set cuda_toolkit_source to packages.".format(
                environment
            )
        )
    _, known, _ = module.run_command(["/sbin/ldconfig", "-p"], check_rc=True)
    libcuda = driver_library(known)
    before, after = installed_links(home), wanted_links(toolkit, libcuda)
    if before != after and not module.check_mode:
        set_links(home, after)
    module.exit_json(
        changed=before != after,
        diff={
            "before": _listed(before),
            "after": _listed(after),
            "before_header": str(home),
            "after_header": str(home),
        },
        toolkit=str(toolkit),
        libcuda=libcuda,
    )


if __name__ == "__main__":
    main()
