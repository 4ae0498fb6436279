"""Facts of GPU models by PCI device id, for hosts whose driver is not there yet to tell them, and for what-if plans.

A plan made from these is the feasibility plan: the deploy plans again from measured facts once the driver is up. Speeds
are the vendors'; an unknown GPU has none, and no speed is estimated for it.
"""

from typing import NamedTuple


class Rates(NamedTuple):
    """What a GPU's data sheet promises."""

    memory_gb_s: float
    bf16_tflops: float  # dense


class GpuFacts(NamedTuple):
    """What nvidia-smi reports on a GPU of this model, and its rates."""

    name: str | None
    compute_capability: str | None
    memory_total_mib: int | None
    memory_reserved_mib: int | None
    rates: Rates | None = None
    nvlink: bool = False  # whether its usual eight-GPU host connects all of them


# Totals and reserved as nvidia-smi printed them on one card of each kind (reserved None: no such print is known); ids
# from the PCI id database (https://pci-ids.ucw.cz/read/PC/10de). Rates from NVIDIA's data sheets:
# https://www.nvidia.com/en-us/data-center/rtx-pro-6000-blackwell-server-edition/
# https://www.nvidia.com/en-us/data-center/h200/  https://www.nvidia.com/en-us/data-center/h100/
# https://www.nvidia.com/en-us/data-center/b200/  https://www.nvidia.com/en-us/data-center/a100/
# https://www.nvidia.com/en-us/data-center/l40s/  https://www.nvidia.com/en-us/geforce/graphics-cards/50-series/rtx-5090/
_BY_PCI_DEVICE = {
    "10de:2bb5": GpuFacts("NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0", 97887, 636, Rates(1597, 500)),
    "10de:2bb1": GpuFacts("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "12.0", 97887, None, Rates(1792, 500)),
    "10de:2335": GpuFacts("NVIDIA H200", "9.0", 143771, 616, Rates(4800, 989), nvlink=True),
    "10de:2330": GpuFacts("NVIDIA H100 80GB HBM3", "9.0", 81559, None, Rates(3350, 989), nvlink=True),
    "10de:2901": GpuFacts("NVIDIA B200", "10.0", 183359, None, Rates(8000, 2250), nvlink=True),
    "10de:20b2": GpuFacts("NVIDIA A100-SXM4-80GB", "8.0", 81920, None, Rates(2039, 312), nvlink=True),
    "10de:26b9": GpuFacts("NVIDIA L40S", "8.9", 46068, None, Rates(864, 362)),
    "10de:2b85": GpuFacts("NVIDIA GeForce RTX 5090", "12.0", 32607, None, Rates(1792, 210)),
}


def known_gpus() -> dict[str, GpuFacts]:
    """The table, by PCI id."""
    return dict(_BY_PCI_DEVICE)


def facts_for(pci_device: str) -> GpuFacts | None:
    """Facts of the model with this PCI id ("10de:2bb5"), or None."""
    return _BY_PCI_DEVICE.get(pci_device.lower())
