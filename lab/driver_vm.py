#!/usr/bin/env python3
"""Boots a virtual machine that is a bare GPU host for a driver role: Debian 13, nouveau in its initramfs, one H100.

    lab/driver_vm.py start    # returns when SSH answers: ops@127.0.0.1, port 22023
    lab/driver_vm.py stop

It boots from its own disk by GRUB, so that what a play does to kernel modules and initramfs counts at the next boot. Of
the GPU only the config space is real: a driver finds it, and cannot start it. Debian's own branch drives its kind.

Standard library only; lab/build_vm_image makes what it boots.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pci_devices import PciDevice
from virtual_machine import VirtualMachine

CPUS = 2
MEMORY_MIB = 2048


def prepare(state: Path) -> None:
    """Build the image."""
    subprocess.run([Path(__file__).with_name("build_vm_image"), state.name], check=True)


def hardware(_: Path) -> list[str]:
    """CPUs, memory, and a PCI root port for the GPU."""
    return [
        *("-smp", str(CPUS), "-m", f"{MEMORY_MIB}M"),
        # Shared, because QEMU hands the guest's memory to the process behind a proxied device.
        *("-object", f"memory-backend-memfd,id=memory,size={MEMORY_MIB}M,share=on"),
        *("-machine", "memory-backend=memory"),
        *("-device", "pcie-root-port,id=port0,bus=pcie.0,chassis=1,slot=1,hotplug=off"),
    ]


def gpus() -> dict[str, PciDevice]:
    """An H100 SXM5 80 GB, by the ids that the fixture h100-4x-80gb has."""
    return {
        "port0": PciDevice(vendor=0x10DE, device=0x2330, class_code=0x0302, subsystem=(0x10DE, 0x16C1), link=(5, 4, 16))
    }


if __name__ == "__main__":
    sys.exit(
        VirtualMachine(
            script=Path(__file__).resolve(), ssh_port=22023, prepare=prepare, hardware=hardware, gpus=gpus
        ).main()
    )
