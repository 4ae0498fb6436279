#!/usr/bin/env python3
"""Boots a virtual machine that is a GPU host as far as a kernel goes: two NUMA nodes, eight GPUs on the PCI bus.

    lab/numa_vm.py start    # returns when SSH answers: ops@127.0.0.1, port 22022
    lab/numa_vm.py stop

Its sysfs, procfs and cgroups are a real kernel's, which the lab's containers cannot have; of the GPUs only the config
space is real, and nvidia-smi is the lab's replay. `start` also writes what that replays, and the known_hosts file, into
.cache/lab/numa_vm. CPUs are emulated (TCG), so no virtualisation is asked of this machine. Disk writes are thrown away.

Standard library only; lab/build_vm_image makes what it boots.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from make_host_tree import HOSTS, REPOSITORY, smi_xml, topo_matrix
from pci_devices import PciDevice

STATE = REPOSITORY / ".cache" / "lab" / "numa_vm"
SSH_PORT = 22022
BOOT_SECONDS = 300  # under a minute on an idle machine of two cores
ATTEMPTS = 3  # QEMU died at once and without a word in one of 14 starts with such devices

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
    folder=STATE,
    matrix="rtxpro6000-8x-dual-cpu-phb",
    bus_ids=tuple(f"0000:{root + 1 + place:02x}:00.0" for root in ROOT_BUSES for place in range(GPUS_PER_NODE)),
)


def machine() -> list[str]:
    """QEMU's command line, the GPUs aside."""
    cpus = sum(len(cpus) for cpus in NODE_CPUS)
    # No nouveau, as on a host that NVIDIA's driver was installed on.
    kernel = f"root=/dev/vda rw quiet console=ttyS0 isolcpus={ISOLATED_CPU} modprobe.blacklist=nouveau"
    command = [
        *("qemu-system-x86_64", "-name", "vllm-fleet-numa-vm", "-nodefaults", "-no-user-config", "-display", "none"),
        *("-machine", "q35", "-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max"),
        *("-smp", f"{cpus},sockets={cpus},cores=1,threads=1", "-m", f"{NODE_MIB * len(NODE_CPUS)}M"),
        *("-kernel", str(STATE / "vmlinuz"), "-initrd", str(STATE / "initrd.img"), "-append", kernel),
        *("-drive", f"if=none,id=disk,file={STATE / 'root.img'},format=raw,snapshot=on,cache=unsafe"),
        *("-device", "virtio-blk-pci,drive=disk,bus=pcie.0"),
        *("-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{SSH_PORT}-:22"),
        *("-device", "virtio-net-pci,netdev=net,romfile="),
        *("-serial", f"file:{STATE / 'console.log'}"),
    ]
    for node, (node_cpus, root_bus) in enumerate(zip(NODE_CPUS, ROOT_BUSES, strict=True)):
        # Shared, because QEMU hands the guest's memory to the process behind a proxied device.
        command += ["-object", f"memory-backend-memfd,id=memory{node},size={NODE_MIB}M,share=on"]
        command += ["-numa", f"node,nodeid={node},memdev=memory{node}"]
        for cpu in node_cpus:
            command += ["-numa", f"cpu,node-id={node},socket-id={cpu}"]
        command += ["-device", f"pxb-pcie,id=root{node},bus=pcie.0,bus_nr={root_bus},numa_node={node}"]
        for place in range(GPUS_PER_NODE):
            slot = node * GPUS_PER_NODE + place
            port = f"pcie-root-port,id=port{slot},bus=root{node},chassis={slot + 1},slot={slot + 1},hotplug=off"
            command += ["-device", port]
    return [*command, "-numa", "dist,src=0,dst=1,val=21"]


def gpu() -> PciDevice:
    """An RTX PRO 6000 Blackwell Server Edition, by the ids in record q_rtxpro6000_server_gpu0 of the recorded outputs.

    QEMU's root ports end at PCIe generation 4, so the link trains below what the card can.
    """
    return PciDevice(vendor=0x10DE, device=0x2BB5, class_code=0x0302, subsystem=(0x10DE, 0x204E), link=(5, 4, 16))


def run() -> int:
    """Run the machine until it ends: QEMU, and the GPUs' config space in threads of this process."""
    gpus = [gpu() for _ in HOST.bus_ids]
    sockets = [device.socket.fileno() for device in gpus]
    command = machine()
    for slot, descriptor in enumerate(sockets):
        command += ["-device", f"x-pci-proxy-dev,bus=port{slot},fd={descriptor}"]
    with subprocess.Popen(command, pass_fds=sockets) as qemu:
        signal.signal(signal.SIGTERM, lambda *_: qemu.terminate())
        for device in gpus:
            device.serve()
        return qemu.wait()


def answers() -> bool:
    """Whether an SSH server greets: QEMU itself accepts connections long before the guest does."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", SSH_PORT), timeout=5) as connection:
        return connection.recv(4) == b"SSH-"
    return False


def start() -> None:
    """Boot and wait for SSH. A machine that runs already is left alone."""
    if running() is not None:
        return
    subprocess.run([Path(__file__).with_name("build_vm_image")], check=True)
    for name, text in (("q-x.xml", smi_xml(HOST)), ("topo-m.txt", topo_matrix(HOST))):
        (STATE / "nvidia-smi").mkdir(exist_ok=True)
        (STATE / "nvidia-smi" / name).write_text(text, encoding="utf-8")
    host_key = (STATE / "host_key.pub").read_text(encoding="utf-8")
    (STATE / "known_hosts").write_text(f"[127.0.0.1]:{SSH_PORT} {host_key}", encoding="utf-8")
    for _ in range(ATTEMPTS):
        with (STATE / "qemu.log").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, __file__, "run"], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        (STATE / "pid").write_text(str(process.pid), encoding="utf-8")
        deadline = time.monotonic() + BOOT_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            if answers():
                return
            time.sleep(1)
        if process.poll() is None:
            stop()
            sys.exit(f"The virtual machine did not answer on SSH within {BOOT_SECONDS} s; see {STATE}/console.log.")
        print(f"QEMU ended with {process.returncode}: {(STATE / 'qemu.log').read_text(encoding='utf-8')}")
    sys.exit(f"QEMU did not stay up in {ATTEMPTS} attempts; its last words are above.")


def running() -> int | None:
    """Process id of the machine, None when it is not up."""
    with suppress(OSError, ValueError):
        pid = int((STATE / "pid").read_text(encoding="utf-8"))
        if Path(__file__).name in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8"):
            return pid
    return None


def stop() -> None:
    """End the machine, if there is one."""
    pid = running()
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        while running() is not None:
            time.sleep(0.1)
    (STATE / "pid").unlink(missing_ok=True)


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description="Boot or stop the NUMA virtual machine.")
    command = parser.add_subparsers(dest="command", required=True, metavar="start|stop")
    command.add_parser("start")
    command.add_parser("stop")
    command.add_parser("run")
    chosen = parser.parse_args().command
    if chosen == "run":
        return run()
    start() if chosen == "start" else stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
