#!/usr/bin/env python3
"""Boots a virtual machine that is a GPU host as far as a kernel goes: two NUMA nodes, eight GPUs on the PCI bus.

    lab/numa_vm.py start    # returns when SSH answers: ops@127.0.0.1, port 22022
    lab/numa_vm.py stop

Its sysfs, procfs and cgroups are a real kernel's, which the lab's containers cannot have; of the GPUs only the config
space is real, and nvidia-smi is the lab's replay. `start` also writes what that replays into .cache/lab/numa_vm.

Standard library only; lab/build_vm_image makes what it boots.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from make_host_tree import HOSTS, smi_xml, topo_matrix
from pci_devices import PciDevice
from virtual_machine import VirtualMachine, state_folder

# CPU numbers alternate between the nodes, as on many two-socket servers, so that a node's list has holes.
NODE_CPUS = ((0, 2), (1, 3))
ISOLATED_CPU = 2
NODE_MIB = 1024
GPUS_PER_NODE = 4
# Bus of each node's PCI root; its root ports follow, and the firmware numbers the buses below them in order.
ROOT_BUSES = (0x40, 0x80)

# What nvidia-smi says there. The recorded matrix of eight such cards behind one root complex per node fits, and has no
# affinity columns: the NUMA nodes must come from sysfs.
HOST = replace(
    HOSTS["rtxpro6000-8x-2nodes"],
    folder=state_folder(Path(__file__)),
    matrix="rtxpro6000-8x-dual-cpu-phb",
    bus_ids=tuple(f"0000:{root + 1 + place:02x}:00.0" for root in ROOT_BUSES for place in range(GPUS_PER_NODE)),
)


def prepare(state: Path) -> None:
    """Build the image, and write what nvidia-smi replays."""
    subprocess.run([Path(__file__).with_name("build_vm_image"), state.name], check=True)
    (state / "nvidia-smi").mkdir(exist_ok=True)
    for name, text in (("q-x.xml", smi_xml(HOST)), ("topo-m.txt", topo_matrix(HOST))):
        (state / "nvidia-smi" / name).write_text(text, encoding="utf-8")


def hardware(state: Path) -> list[str]:
    """CPUs, memory, NUMA nodes, PCI roots; kernel and initramfs from beside the image."""
    cpus = sum(len(cpus) for cpus in NODE_CPUS)
    # No nouveau, as on a host that NVIDIA's driver was installed on.
    kernel = f"root=/dev/vda rw quiet console=ttyS0 isolcpus={ISOLATED_CPU} modprobe.blacklist=nouveau"
    arguments = [
        *("-smp", f"{cpus},sockets={cpus},cores=1,threads=1", "-m", f"{NODE_MIB * len(NODE_CPUS)}M"),
        *("-kernel", str(state / "vmlinuz"), "-initrd", str(state / "initrd.img"), "-append", kernel),
    ]
    for node, (node_cpus, root_bus) in enumerate(zip(NODE_CPUS, ROOT_BUSES, strict=True)):
        # Shared, because QEMU hands the guest's memory to the process behind a proxied device.
        arguments += ["-object", f"memory-backend-memfd,id=memory{node},size={NODE_MIB}M,share=on"]
        arguments += ["-numa", f"node,nodeid={node},memdev=memory{node}"]
        for cpu in node_cpus:
            arguments += ["-numa", f"cpu,node-id={node},socket-id={cpu}"]
        arguments += ["-device", f"pxb-pcie,id=root{node},bus=pcie.0,bus_nr={root_bus},numa_node={node}"]
        for place in range(GPUS_PER_NODE):
            slot = node * GPUS_PER_NODE + place
            port = f"pcie-root-port,id=port{slot},bus=root{node},chassis={slot + 1},slot={slot + 1},hotplug=off"
            arguments += ["-device", port]
    return [*arguments, "-numa", "dist,src=0,dst=1,val=21"]


def gpus() -> dict[str, PciDevice]:
    """Eight RTX PRO 6000 Blackwell Server Edition, by the ids of record q_rtxpro6000_server_gpu0.

    QEMU's root ports end at PCIe generation 4, so the link trains below what the card can.
    """
    return {
        f"port{slot}": PciDevice(
            vendor=0x10DE, device=0x2BB5, class_code=0x0302, subsystem=(0x10DE, 0x204E), link=(5, 4, 16)
        )
        for slot in range(len(HOST.bus_ids))
    }


if __name__ == "__main__":
    sys.exit(
        VirtualMachine(
            script=Path(__file__).resolve(), ssh_port=22022, prepare=prepare, hardware=hardware, gpus=gpus
        ).main()
    )
