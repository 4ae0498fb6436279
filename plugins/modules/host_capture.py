"""Ansible module: save what the probe reads of a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_capture
short_description: Save what the GPU probe reads of a host
version_added: "0.1.0"
description:
  - Runs the probe of M(gpu_topology) and saves every file that it read, what C(nvidia-smi) and C(lstopo) printed,
    and the driver's lines of the kernel log, as one small archive.
  - Host names, serial numbers, MAC addresses and process names are replaced; GPU UUIDs stay.
  - C(gpu_topology), C(vllm-fleet plan) and C(vllm-fleet topology) read the archive, or the folder made of it, as
    they would the host.
options:
  dest:
    description: The archive to write on the host, a gzipped tar.
    type: path
    required: true
  sysfs_root:
    description: Where sysfs is.
    type: path
    default: /sys
  procfs_root:
    description: Where procfs is.
    type: path
    default: /proc
  nvidia_smi:
    description: C(nvidia-smi) by name or path.
    type: str
    default: nvidia-smi
  kernel_log:
    description: A file with the kernel log. Without it C(journalctl -k) is asked, then C(dmesg).
    type: path
  checks_file:
    description: JSON with what earlier tests on this host found.
    type: path
    default: /var/lib/vllm-fleet/checks.json
  lstopo:
    description:
      - hwloc's C(lstopo) by name or path.
      - By default C(lstopo-no-graphics) for the live host, and none where O(sysfs_root) is a copy.
    type: str
  timeout_seconds:
    description: How long each command may take before it counts as hung.
    type: int
    default: 60
attributes:
  check_mode:
    support: full
    description: In check mode the host is read and nothing is written.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Save what the probe reads
  host_capture:
    dest: /tmp/capture.tar.gz
"""

RETURN = r"""
dest:
  description: The archive.
  returned: always
  type: str
  sample: /tmp/capture.tar.gz
size_bytes:
  description: Its size; null in check mode.
  returned: always
  type: int
  sample: 9214
gpus:
  description: How many GPUs it shows.
  returned: always
  type: int
  sample: 8
problems:
  description: What the probe found wrong, as in M(gpu_topology).
  returned: always
  type: list
  elements: dict
  sample: []
"""

import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_capture import save_host
from ansible.module_utils.host_probe import read_kernel_log, read_lstopo, smi_runner


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "dest": {"type": "path", "required": True},
            "sysfs_root": {"type": "path", "default": "/sys"},
            "procfs_root": {"type": "path", "default": "/proc"},
            "nvidia_smi": {"type": "str", "default": "nvidia-smi"},
            "kernel_log": {"type": "path"},
            "checks_file": {"type": "path", "default": "/var/lib/vllm-fleet/checks.json"},
            "lstopo": {"type": "str"},
            "timeout_seconds": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    options = module.params
    timeout = options["timeout_seconds"]
    lstopo = options["lstopo"] or ("lstopo-no-graphics" if options["sysfs_root"] == "/sys" else None)
    with tempfile.TemporaryDirectory() as folder:
        archive = f"{folder}/capture.tar.gz"
        topology = save_host(
            archive,
            options["sysfs_root"],
            options["procfs_root"],
            smi_runner(options["nvidia_smi"], timeout),
            kernel_log=read_kernel_log(options["kernel_log"], timeout),
            checks_file=options["checks_file"],
            lstopo=read_lstopo(lstopo, timeout) if lstopo else None,
        )
        size = None if module.check_mode else Path(archive).stat().st_size
        if not module.check_mode:
            try:
                module.atomic_move(archive, options["dest"])
            except OSError as error:
                module.fail_json(msg=f"The archive could not be written to {options['dest']}: {error}.")
    module.exit_json(
        changed=not module.check_mode,
        dest=options["dest"],
        size_bytes=size,
        gpus=len(topology["gpus"]),
        problems=topology["problems"],
    )


if __name__ == "__main__":
    main()
