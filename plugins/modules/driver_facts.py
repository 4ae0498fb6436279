"""Ansible module: read what a change of the NVIDIA driver depends on."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_facts
short_description: Read what a change of the NVIDIA driver depends on
version_added: "0.1.0"
description:
  - Reads GPUs on the bus, kernels with their NVIDIA modules and headers, secure boot, the driver's packages with
    version, origin and holds, what dpkg left unfinished, who holds its locks, timers and units that run. Decides
    nothing.
  - Changes nothing. Run it as root, or locks and other users' processes stay unread.
options:
  root:
    description: Where the file system is.
    type: path
    default: /
  sysfs_root:
    description: Where sysfs is, or a saved copy of it.
    type: path
    default: /sys
  procfs_root:
    description: Where procfs is, or a saved copy of it.
    type: path
    default: /proc
  files:
    description: Paths whose content is wanted; null for one that is not there.
    type: list
    elements: path
    default: []
  lock_timeout_seconds:
    description: How long to wait for other package managers first. Who is still at work then is in C(lock_holders).
    type: int
    default: 0
attributes:
  check_mode:
    support: full
    description: The module only reads.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Read what a driver change depends on
  driver_facts:
    files: [/etc/apt/preferences.d/00-vllm-fleet-gpu-driver]
  become: true
  register: driver_host
"""

RETURN = r"""
facts:
  description: The host, for the filter C(driver_plan).
  returned: always
  type: dict
  contains:
    distribution:
      description: Distribution id, version, codename, and dpkg's name of the architecture.
      type: dict
      sample: {id: debian, version: "13", codename: trixie, architecture: amd64}
    gpus:
      description: GPUs on the PCI bus, with the kernel driver each is bound to.
      type: list
      elements: dict
      sample: [{pci_bus_id: "0000:41:00.0", pci_device: "10de:2bb5", driver: nvidia}]
    nvswitch:
      description: Whether an NVSwitch is on the bus.
      type: bool
    packages:
      description: Installed packages of the driver.
      type: list
      elements: dict
      sample: [{name: libcuda1, version: 580.126.09-1, architecture: amd64, held: true, origin: null}]
    kernel_packages:
      description: Installed packages of kernels and headers.
      type: list
      elements: dict
      sample: [{name: linux-image-amd64, held: false}]
    tools:
      description: Which of the tools that a build needs are installed.
      type: list
      elements: str
      sample: [dkms]
    broken:
      description: Packages that dpkg left unfinished.
      type: list
      elements: str
    kernels:
      description: Kernels, their headers and NVIDIA modules, secure boot and what is loaded or blocked.
      type: dict
    loaded_version:
      description: Version of the loaded kernel module.
      type: str
    library:
      description: Version of the management library on disk, and whether a package owns it.
      type: dict
      sample: {version: 580.126.09, packaged: true}
    lock_holders:
      description: Who holds a lock of dpkg or apt.
      type: list
      elements: dict
      sample: [{pid: 411, program: unattended-upgr, unit: apt-daily-upgrade.service, lock: /var/lib/dpkg/lock}]
    timers:
      description: Timers of apt that are active.
      type: list
      elements: str
    serving:
      description: Units of replicas that run.
      type: list
      elements: str
    repositories:
      description: Source files of apt, with the addresses they name.
      type: list
      elements: dict
    snapshot:
      description: Of a change that is not finished, whether the driver worked before it; null when there is none.
      type: dict
      sample: {worked: true}
    boot_id:
      description: Id of this boot.
      type: str
    files:
      description: Content of the files that were asked for.
      type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.driver_probe import read_driver_host, wait_for_locks
from ansible.module_utils.kernel_modules import run_command


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/"},
            "sysfs_root": {"type": "path", "default": "/sys"},
            "procfs_root": {"type": "path", "default": "/proc"},
            "files": {"type": "list", "elements": "path", "default": []},
            "lock_timeout_seconds": {"type": "int", "default": 0},
        },
        supports_check_mode=True,
    )
    asked = module.params
    if asked["lock_timeout_seconds"] and not module.check_mode:
        wait_for_locks(asked["lock_timeout_seconds"], asked["root"])

    facts = read_driver_host(
        run_command,
        root=asked["root"],
        sysfs_root=asked["sysfs_root"],
        procfs_root=asked["procfs_root"],
        files=asked["files"],
    )
    module.exit_json(changed=False, facts=facts)


if __name__ == "__main__":
    main()
