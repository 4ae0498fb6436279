"""Facts of GPU models by PCI device id, for hosts whose driver is not there yet to tell them.

A plan made from these is the feasibility plan: the deploy plans again from measured facts once the driver is up.
"""

from typing import NamedTuple


class GpuFacts(NamedTuple):
    """What nvidia-smi reports on a GPU of this model."""

    name: str | None
    compute_capability: str | None
    memory_total_mib: int | None
    memory_reserved_mib: int | None


# Totals and reserved as nvidia-smi printed them on one card of each kind; ids from the PCI id database
# (https://pci-ids.ucw.cz/read/PC/10de).
_BY_PCI_DEVICE = {
    "10de:2bb5": GpuFacts("NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0", 97887, 636),
    "10de:2335": GpuFacts("NVIDIA H200", "9.0", 143771, 616),
    "10de:2330": GpuFacts("NVIDIA H100 80GB HBM3", "9.0", 81559, None),
}


def facts_for(pci_device: str) -> GpuFacts | None:
    """Facts of the model with this PCI id ("10de:2bb5"), or None."""
    return _BY_PCI_DEVICE.get(pci_device.lower())
