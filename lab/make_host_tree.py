#!/usr/bin/env python3
"""Writes the folders that stand for GPU hosts: what sysfs, procfs and nvidia-smi show there, as a capture has it.

Each host is a recipe: a recorded `topo -m` matrix, a recorded GPU, and what the matrix does not say (PCI addresses,
CPU lists, memory). The folders are committed; run this after a recipe changed:

    lab/make_host_tree.py            # all of them
    lab/make_host_tree.py lab        # one

Standard library only, so it runs anywhere; UUIDs are derived from host and address, so runs are alike.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FIXTURES = REPOSITORY / "tests" / "fixtures"
_UUID_NAMESPACE = uuid.UUID("8f3f0c1e-6c36-5a0b-9d1f-0b6f2f6a7b10")


@dataclass(frozen=True)
class Model:
    """A GPU model as nvidia-smi reports it when idle."""

    name: str
    architecture: str
    device: str  # PCI device id, four hex digits
    class_code: str
    total_mib: int
    reserved_mib: int
    bar1_mib: int
    power_limit_w: int
    fabric_state: str


@dataclass(frozen=True)
class Host:
    """One simulated host; `select` are the GPUs taken from the recorded matrix, in their order there."""

    folder: Path
    matrix: str
    select: tuple[int, ...]
    bus_ids: tuple[str, ...]
    minors: tuple[int, ...]
    gpu_nodes: tuple[int, ...]
    model: Model
    driver: str
    cuda: str
    node_cpus: tuple[str, ...]
    node_memory_mib: tuple[int, ...]
    online: str
    allowed: str
    nvswitches: tuple[str, ...] = ()
    has_driver: bool = True
    has_self: bool = True  # the lab links proc/self to the real one, for the CPUs and nodes that are really allowed


# `nvidia-smi -q` of the first of eight cards: q_rtxpro6000_server_gpu0 in tests/fixtures/nvidia_smi_outputs.json.
RTX_PRO_6000 = Model(
    name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
    architecture="Blackwell",
    device="2bb5",
    class_code="0x030200",
    total_mib=97887,
    reserved_mib=636,
    bar1_mib=131072,
    power_limit_w=600,
    fabric_state="N/A",
)
# Record csv_h100 there; device id from the PCI ID database (H100 SXM5 80GB).
H100_80GB = Model(
    name="NVIDIA H100 80GB HBM3",
    architecture="Hopper",
    device="2330",
    class_code="0x030200",
    total_mib=81559,
    reserved_mib=479,
    bar1_mib=131072,
    power_limit_w=700,
    fabric_state="Completed",
)

# Addresses as in its query-gpu listing, minor numbers, CPUs and node memory as recorded for that class of host
# (q_minor_numbers_rtxpro6000_8x, lscpu_rtxpro6000_8x, numactl_H_rtxpro6000_8x): CPU 239 is dead, and nvidia-smi cuts
# node 1's list after 15 characters where sysfs has all of it.
_REFERENCE = Host(
    folder=FIXTURES / "captures" / "rtxpro6000-8x-2nodes",
    matrix="rtxpro6000-8x-server-2nodes-1nic-ansi",
    select=(0, 1, 2, 3, 4, 5, 6, 7),
    bus_ids=tuple(f"0000:{bus}:00.0" for bus in ("01", "11", "61", "71", "81", "91", "e1", "f1")),
    minors=(2, 3, 0, 1, 6, 7, 4, 5),
    gpu_nodes=(0, 0, 0, 0, 1, 1, 1, 1),
    model=RTX_PRO_6000,
    driver="595.58.03",
    cuda="13.2",
    node_cpus=("0-63,128-191", "64-127,192-238,240-255"),
    node_memory_mib=(773676, 774030),
    online="0-238,240-255",
    allowed="0-255",
)
_H100_8X = Host(
    folder=FIXTURES / "captures" / "h100-8x-80gb",
    matrix="h100-8x-ansi",
    select=(0, 1, 2, 3, 4, 5, 6, 7),
    bus_ids=tuple(f"0000:{bus}:00.0" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df")),
    minors=(0, 1, 2, 3, 4, 5, 6, 7),
    gpu_nodes=(0, 0, 0, 0, 1, 1, 1, 1),
    model=H100_80GB,
    driver="590.48.01",
    cuda="13.1",
    node_cpus=("0-51,104-155", "52-103,156-207"),
    node_memory_mib=(1031865, 1032184),
    online="0-207",
    allowed="0-207",
    nvswitches=("0000:07:00.0", "0000:08:00.0", "0000:09:00.0", "0000:0a:00.0"),
)

HOSTS = {
    "rtxpro6000-8x-2nodes": _REFERENCE,
    "rtxpro6000-2x": replace(
        _REFERENCE,
        folder=FIXTURES / "captures" / "rtxpro6000-2x",
        select=(0, 1),
        bus_ids=_REFERENCE.bus_ids[:2],
        minors=(0, 1),
        gpu_nodes=(0, 0),
        node_cpus=("0-31",),
        node_memory_mib=(257540,),
        online="0-31",
        allowed="0-31",
    ),
    "h100-8x-80gb": _H100_8X,
    "h100-4x-80gb": replace(
        _H100_8X,
        folder=FIXTURES / "captures" / "h100-4x-80gb",
        select=(0, 1, 2, 3),
        bus_ids=_H100_8X.bus_ids[:4],
        minors=(0, 1, 2, 3),
        gpu_nodes=(0, 0, 0, 0),
        node_cpus=("0-103",),
        node_memory_mib=(1031865,),
        online="0-103",
        allowed="0-103",
        nvswitches=(),
    ),
    "no-driver": replace(_REFERENCE, folder=FIXTURES / "captures" / "no-driver", has_driver=False),
    "no-gpu": replace(
        _REFERENCE,
        folder=FIXTURES / "captures" / "no-gpu",
        select=(),
        bus_ids=(),
        minors=(),
        gpu_nodes=(),
        has_driver=False,
    ),
    "lab": replace(
        _REFERENCE,
        folder=REPOSITORY / "lab" / "gpu_host",
        select=(0, 4),
        bus_ids=(_REFERENCE.bus_ids[0], _REFERENCE.bus_ids[4]),
        minors=(1, 0),
        gpu_nodes=(0, 1),
        node_cpus=("0", "1"),
        node_memory_mib=(8192, 8192),
        online="0-1",
        has_self=False,
    ),
}

# The shape of `nvidia-smi -q -x` (nvsmi_device_v13.dtd), reduced to what the probe and common exporters read.
_GPU_XML = """\
\t<gpu id="{smi_bus_id}">
\t\t<product_name>{model.name}</product_name>
\t\t<product_brand>NVIDIA</product_brand>
\t\t<product_architecture>{model.architecture}</product_architecture>
\t\t<persistence_mode>Enabled</persistence_mode>
\t\t<addressing_mode>None</addressing_mode>
\t\t<mig_mode>
\t\t\t<current_mig>Disabled</current_mig>
\t\t\t<pending_mig>Disabled</pending_mig>
\t\t</mig_mode>
\t\t<mig_devices>
\t\t\tNone
\t\t</mig_devices>
\t\t<serial>0000000000000</serial>
\t\t<uuid>{uuid}</uuid>
\t\t<minor_number>{minor}</minor_number>
\t\t<gpu_virtualization_mode>
\t\t\t<virtualization_mode>None</virtualization_mode>
\t\t\t<host_vgpu_mode>N/A</host_vgpu_mode>
\t\t</gpu_virtualization_mode>
\t\t<gpu_recovery_action>None</gpu_recovery_action>
\t\t<pci>
\t\t\t<pci_bus>{bus}</pci_bus>
\t\t\t<pci_device>00</pci_device>
\t\t\t<pci_domain>0000</pci_domain>
\t\t\t<pci_device_id>{device}10DE</pci_device_id>
\t\t\t<pci_bus_id>{smi_bus_id}</pci_bus_id>
\t\t\t<pci_gpu_link_info>
\t\t\t\t<pcie_gen>
\t\t\t\t\t<max_link_gen>5</max_link_gen>
\t\t\t\t\t<current_link_gen>1</current_link_gen>
\t\t\t\t\t<device_current_link_gen>1</device_current_link_gen>
\t\t\t\t\t<max_device_link_gen>5</max_device_link_gen>
\t\t\t\t\t<max_host_link_gen>5</max_host_link_gen>
\t\t\t\t</pcie_gen>
\t\t\t\t<link_widths>
\t\t\t\t\t<max_link_width>16x</max_link_width>
\t\t\t\t\t<current_link_width>16x</current_link_width>
\t\t\t\t</link_widths>
\t\t\t</pci_gpu_link_info>
\t\t</pci>
\t\t<performance_state>P8</performance_state>
\t\t<fb_memory_usage>
\t\t\t<total>{model.total_mib} MiB</total>
\t\t\t<reserved>{model.reserved_mib} MiB</reserved>
\t\t\t<used>0 MiB</used>
\t\t\t<free>{free_mib} MiB</free>
\t\t</fb_memory_usage>
\t\t<bar1_memory_usage>
\t\t\t<total>{model.bar1_mib} MiB</total>
\t\t\t<used>1 MiB</used>
\t\t\t<free>{bar1_free_mib} MiB</free>
\t\t</bar1_memory_usage>
\t\t<compute_mode>Default</compute_mode>
\t\t<utilization>
\t\t\t<gpu_util>0 %</gpu_util>
\t\t\t<memory_util>0 %</memory_util>
\t\t</utilization>
\t\t<ecc_mode>
\t\t\t<current_ecc>Enabled</current_ecc>
\t\t\t<pending_ecc>Enabled</pending_ecc>
\t\t</ecc_mode>
\t\t<ecc_errors>
\t\t\t<volatile>
\t\t\t\t<sram_correctable>0</sram_correctable>
\t\t\t\t<sram_uncorrectable_parity>0</sram_uncorrectable_parity>
\t\t\t\t<sram_uncorrectable_secded>0</sram_uncorrectable_secded>
\t\t\t\t<dram_correctable>0</dram_correctable>
\t\t\t\t<dram_uncorrectable>0</dram_uncorrectable>
\t\t\t</volatile>
\t\t</ecc_errors>
\t\t<remapped_rows>
\t\t\t<remapped_row_pending>No</remapped_row_pending>
\t\t\t<remapped_row_failure>No</remapped_row_failure>
\t\t</remapped_rows>
\t\t<temperature>
\t\t\t<gpu_temp>26 C</gpu_temp>
\t\t</temperature>
\t\t<gpu_power_readings>
\t\t\t<average_power_draw>39.17 W</average_power_draw>
\t\t\t<current_power_limit>{model.power_limit_w}.00 W</current_power_limit>
\t\t\t<default_power_limit>{model.power_limit_w}.00 W</default_power_limit>
\t\t</gpu_power_readings>
\t\t<fabric>
\t\t\t<state>{model.fabric_state}</state>
\t\t</fabric>
\t\t<processes>
\t\t</processes>
\t</gpu>
"""


def gpu_uuid(host: Host, bus_id: str) -> str:
    """UUID of a simulated GPU: the same on every run, different on every host and address."""
    return f"GPU-{uuid.uuid5(_UUID_NAMESPACE, f'{host.folder.name}/{bus_id}')}"


def smi_xml(host: Host) -> str:
    """What `nvidia-smi -q -x` prints on the host."""
    records = [
        _GPU_XML.format(
            model=host.model,
            smi_bus_id=f"0000{bus_id.upper()}",
            bus=bus_id[5:7].upper(),
            device=host.model.device.upper(),
            uuid=gpu_uuid(host, bus_id),
            minor=minor,
            free_mib=host.model.total_mib - host.model.reserved_mib,
            bar1_free_mib=host.model.bar1_mib - 1,
        )
        for bus_id, minor in zip(host.bus_ids, host.minors, strict=True)
    ]
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n<nvidia_smi_log>\n'
        "\t<timestamp>Tue Dec  1 00:00:00 2026</timestamp>\n"
        f"\t<driver_version>{host.driver}</driver_version>\n\t<cuda_version>{host.cuda}</cuda_version>\n"
        f"\t<attached_gpus>{len(records)}</attached_gpus>\n{''.join(records)}</nvidia_smi_log>\n"
    )


def topo_matrix(host: Host) -> str:
    """What `nvidia-smi topo -m` prints: the recorded text, or the selected rows and columns of it renumbered."""
    recorded = json.loads((FIXTURES / "topologies" / f"{host.matrix}.json").read_text(encoding="utf-8"))
    text: str = recorded["topo_matrix_text"]
    header, *lines = text.split("\n")
    all_gpus = re.findall(r"GPU\d+", header)
    if len(host.select) == len(all_gpus):
        return text + "\n"
    cells = {line.split("\t")[0]: line.split("\t")[1:] for line in lines if line.startswith("GPU")}
    names = "\t".join(f"GPU{position}" for position in range(len(host.select)))
    rows = [f"\t\x1b[4m{names}\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"]
    for position, (gpu, node) in enumerate(zip(host.select, host.gpu_nodes, strict=True)):
        links = "\t".join(cells[f"GPU{gpu}"][peer] for peer in host.select)
        rows.append(f"GPU{position}\t{links}\t{host.node_cpus[node][:15].rstrip(',')}\t{node}\t\tN/A")
    legend = lines[lines.index("") : lines.index("NIC Legend:")] if "NIC Legend:" in lines else lines[lines.index("") :]
    return "\n".join([*rows, *legend]) + "\n"


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def _bridge_config(vendor: int, device: int) -> bytes:
    """Config space of a root port with an Access Control Services capability that redirects nothing."""
    space = bytearray(0x110)
    space[0:4] = vendor.to_bytes(2, "little") + device.to_bytes(2, "little")
    space[0x100:0x104] = (0x0001_000D).to_bytes(4, "little")  # capability 0x000d, version 1, no next one
    return bytes(space)


def _write_pci(host: Host, sys_folder: Path) -> None:
    """One root complex and root port above each GPU, as on a board without PCIe switches."""
    devices = sys_folder / "bus" / "pci" / "devices"
    devices.mkdir(parents=True)
    for position, (bus_id, node) in enumerate(zip(host.bus_ids, host.gpu_nodes, strict=True)):
        root_bus = f"{int(bus_id[5:7], 16) - 1:02x}"
        root_port = f"0000:{root_bus}:01.1"
        port_folder = sys_folder / "devices" / f"pci0000:{root_bus}" / root_port
        _write(port_folder / "vendor", "0x1022")
        _write(port_folder / "device", "0x14ab")
        _write(port_folder / "class", "0x060400")
        _write(port_folder / "max_link_speed", "32.0 GT/s PCIe")
        _write(port_folder / "config", _bridge_config(0x1022, 0x14AB))
        gpu_folder = port_folder / bus_id
        for name, value in {
            "vendor": "0x10de",
            "device": f"0x{host.model.device}",
            "class": host.model.class_code,
            "numa_node": str(node),
            "current_link_speed": "2.5 GT/s PCIe",  # idle
            "current_link_width": "16",
            "max_link_speed": "32.0 GT/s PCIe",
            "max_link_width": "16",
            "iommu_group/type": "identity",
        }.items():
            _write(gpu_folder / name, value)
        if host.has_driver:
            _link(gpu_folder / "driver", "../../../../bus/pci/drivers/nvidia")
        _link(devices / root_port, f"../../../devices/pci0000:{root_bus}/{root_port}")
        _link(devices / bus_id, f"../../../devices/pci0000:{root_bus}/{root_port}/{bus_id}")
        if host.has_driver:
            information = host.folder / "proc" / "driver" / "nvidia" / "gpus" / bus_id / "information"
            _write(
                information,
                f"Model: \t\t {host.model.name}\nGPU UUID: \t {gpu_uuid(host, bus_id)}\n"
                f"Bus Location: \t {bus_id}\nDevice Minor: \t {host.minors[position]}",
            )
    for bus_id in host.nvswitches:
        folder = sys_folder / "devices" / "pci0000:00" / bus_id
        for name, value in {"vendor": "0x10de", "device": "0x22a3", "class": "0x068000", "numa_node": "0"}.items():
            _write(folder / name, value)
        _link(devices / bus_id, f"../../../devices/pci0000:00/{bus_id}")


def write_host(host: Host) -> None:
    """Write the folder of a host anew."""
    if host.folder.exists():
        shutil.rmtree(host.folder)
    sys_folder, proc = host.folder / "sys", host.folder / "proc"
    _write_pci(host, sys_folder)
    for node, (cpus, memory_mib) in enumerate(zip(host.node_cpus, host.node_memory_mib, strict=True)):
        folder = sys_folder / "devices" / "system" / "node" / f"node{node}"
        _write(folder / "cpulist", cpus)
        _write(folder / "meminfo", f"Node {node} MemTotal:       {memory_mib * 1024} kB")
    cpu_folder = sys_folder / "devices" / "system" / "cpu"
    _write(cpu_folder / "online", host.online)
    _write(cpu_folder / "isolated", "")
    _write(cpu_folder / "nohz_full", "")
    last_node = len(host.node_cpus) - 1
    if host.has_self:
        mems = "0" if last_node == 0 else f"0-{last_node}"
        _write(proc / "self" / "status", f"Cpus_allowed_list:\t{host.allowed}\nMems_allowed_list:\t{mems}")
    _write(proc / "sys" / "kernel" / "arch", "x86_64")
    _write(proc / "cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/md0 ro iommu=pt")
    _write(proc / "meminfo", f"MemTotal:       {sum(host.node_memory_mib) * 1024} kB")
    if host.has_driver:
        _write(
            proc / "driver" / "nvidia" / "version",
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {host.driver}  Release Build",
        )
        _write(host.folder / "nvidia-smi" / "q-x.xml", smi_xml(host).encode())
        _write(host.folder / "nvidia-smi" / "topo-m.txt", topo_matrix(host).encode())
        _write(host.folder / "kernel.log", f"NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  {host.driver}")
    else:
        _write(host.folder / "kernel.log", "Linux version 6.12.57")


def main() -> int:
    """Write the hosts named on the command line, or all."""
    parser = argparse.ArgumentParser(description="Write the folders that stand for GPU hosts.")
    parser.add_argument("hosts", nargs="*", metavar="HOST", help=f"of {', '.join(HOSTS)}; all when none is named")
    names = parser.parse_args().hosts or list(HOSTS)
    unknown = [name for name in names if name not in HOSTS]
    if unknown:
        parser.error(f"no such host: {', '.join(unknown)}; known are {', '.join(HOSTS)}")
    for name in names:
        write_host(HOSTS[name])
        print(HOSTS[name].folder.relative_to(REPOSITORY))
    return 0


if __name__ == "__main__":
    sys.exit(main())
