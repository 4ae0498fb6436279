"""Ansible module: read what GPUs, links, NUMA nodes and driver a host has."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_topology
short_description: Read GPUs, links, NUMA nodes and driver of a host
version_added: "0.1.0"
description:
  - Reads sysfs, procfs and C(nvidia-smi) (two calls) into one structure, the fact C(gpu_topology).
  - Never fails because of the host. What cannot be learned is null, and what is wrong stands in
    C(problems) with a remedy, a missing driver included.
  - Changes nothing. Run it as root, or the config space of bridges, the kernel log and other
    users' processes stay unread.
options:
  sysfs_root:
    description: Where sysfs is, or a saved copy of it.
    type: path
    default: /sys
  procfs_root:
    description: Where procfs is, or a saved copy of it.
    type: path
    default: /proc
  nvidia_smi:
    description: C(nvidia-smi) by name or path. Where there is none the driver is reported missing.
    type: str
    default: nvidia-smi
  kernel_log:
    description: A file with the kernel log. Without it C(journalctl -k) is asked, then C(dmesg).
    type: path
  checks_file:
    description: JSON with what earlier tests on this host found. Without the file nothing is tested.
    type: path
    default: /var/lib/vllm-fleet/checks.json
  lstopo:
    description:
      - hwloc's C(lstopo) by name or path; what it says is compared with the rest, where it is installed.
      - By default C(lstopo-no-graphics) for the live host, and none where O(sysfs_root) is a copy.
    type: str
  capture:
    description:
      - A folder on the host that C(playbooks/capture.yml) saved, or a tar archive of it, to read instead of the host.
      - The other options then say nothing.
    type: path
  timeout_seconds:
    description: How long each command may take before it counts as hung.
    type: int
    default: 60
attributes:
  check_mode:
    support: full
    description: The module only reads.
  facts:
    support: full
    description: Sets the fact C(gpu_topology).
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Read the GPU topology
  gpu_topology:

- name: Read the topology of a simulated host
  gpu_topology:
    sysfs_root: /opt/gpu_host/sys
    procfs_root: /opt/gpu_host/proc
    kernel_log: /opt/gpu_host/kernel.log

- name: Read what was saved of another host
  gpu_topology:
    capture: /root/captures/gpu-7
"""

RETURN = r"""
ansible_facts:
  description: Facts of the host.
  returned: always
  type: dict
  contains:
    gpu_topology:
      description: The topology, schema 1.
      type: dict
      contains:
        schema:
          description: Version of this structure.
          type: int
          sample: 1
        architecture:
          description: Machine name as C(uname -m) prints it.
          type: str
          sample: x86_64
        driver:
          description: State (C(ok), C(missing), C(mismatch), C(unreachable)) and versions of the NVIDIA driver.
          type: dict
          sample: {state: ok, version: 595.58.03, module_version: 595.58.03, module_licence: Dual MIT/GPL,
                   cuda_version: "13.2", message: null}
        gpus:
          description: GPUs in order of PCI address, those included that the driver does not see.
          type: list
          elements: dict
          sample: [{index: 0, minor: 2, uuid: GPU-a5e0584f-41ef-5f4b-af4b-d08ceba20d00, pci_bus_id: "0000:01:00.0",
                    name: NVIDIA RTX PRO 6000 Blackwell Server Edition, memory_total_mib: 97887, numa_nodes: [0]}]
        links:
          description: Link class of each pair of GPUs, by their position in C(gpus).
          type: dict
          sample: {0-1: NODE, 0-4: SYS}
        numa_nodes:
          description: NUMA nodes that have CPUs; C(cpus) are those online, allowed and not isolated.
          type: list
          elements: dict
          sample: [{id: 0, cpus: "0-63,128-191", memory_total_mib: 773676, bindable: true}]
        cpus:
          description: CPUs online, isolated by kernel arguments, and allowed to this process.
          type: dict
          sample: {online: "0-255", isolated: "", allowed: "0-255"}
        pcie:
          description: IOMMU mode, and the bridges above GPUs whose ACS redirects peer-to-peer traffic.
          type: dict
          sample: {iommu: passthrough, acs_redirect: []}
        nvswitch:
          description: Whether NVSwitches join the GPUs.
          type: bool
          sample: false
        checks:
          description: What earlier tests on the host found.
          type: dict
          sample: {p2p: {verdict: untested, detail: null}, disk_read_mib_s: null}
        problems:
          description: What is wrong or could not be learned, with a remedy each.
          type: list
          elements: dict
          sample: [{severity: warning, code: bar1_small, message: "...", remedy: "..."}]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_probe import (
    read_capture,
    read_checks,
    read_host,
    read_kernel_log,
    read_lstopo,
    smi_runner,
)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "sysfs_root": {"type": "path", "default": "/sys"},
            "procfs_root": {"type": "path", "default": "/proc"},
            "nvidia_smi": {"type": "str", "default": "nvidia-smi"},
            "kernel_log": {"type": "path"},
            "checks_file": {"type": "path", "default": "/var/lib/vllm-fleet/checks.json"},
            "lstopo": {"type": "str"},
            "capture": {"type": "path"},
            "timeout_seconds": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    if module.params["capture"]:
        topology = read_capture(module.params["capture"])
        module.exit_json(changed=False, ansible_facts={"gpu_topology": topology})
    timeout = module.params["timeout_seconds"]
    lstopo = module.params["lstopo"] or ("lstopo-no-graphics" if module.params["sysfs_root"] == "/sys" else None)
    checks, problems = read_checks(module.params["checks_file"])
    topology = read_host(
        module.params["sysfs_root"],
        module.params["procfs_root"],
        smi_runner(module.params["nvidia_smi"], timeout),
        read_kernel_log(module.params["kernel_log"], timeout),
        checks,
        lstopo=read_lstopo(lstopo, timeout) if lstopo else None,
        deadline=f"{timeout} s",
    )
    topology["problems"] += problems
    module.exit_json(changed=False, ansible_facts={"gpu_topology": topology})


if __name__ == "__main__":
    main()
