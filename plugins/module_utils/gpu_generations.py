"""GPU generation and compute capability from the PCI device id, for hosts whose driver is not there to tell them.

Standard library only, Python 3.9: this runs on target hosts.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

__all__ = ["NEWEST", "Chip", "chip_of"]


class Chip(NamedTuple):
    """A range of device ids: one family of chips."""

    first: int
    last: int
    generation: str
    compute_capability: str


# NVIDIA gives each family of chips its own range of ids. Ranges from the PCI ID database
# (https://pci-ids.ucw.cz/read/PC/10de) and, for Blackwell, the device table in the README of
# https://github.com/NVIDIA/open-gpu-kernel-modules; capabilities from https://developer.nvidia.com/cuda-gpus and
# https://developer.nvidia.com/cuda-legacy-gpus.
_CHIPS = (
    Chip(0x0FC0, 0x103F, "Kepler", "3.5"),  # GK107, GK110
    Chip(0x1180, 0x12FF, "Kepler", "3.5"),  # GK104, GK106, GK208
    Chip(0x1340, 0x13BF, "Maxwell", "5.0"),  # GM107, GM108
    Chip(0x13C0, 0x143F, "Maxwell", "5.2"),  # GM204, GM206
    Chip(0x15F0, 0x15FF, "Pascal", "6.0"),  # GP100
    Chip(0x1600, 0x17FF, "Maxwell", "5.2"),  # GM200, GM204
    Chip(0x1B00, 0x1D7F, "Pascal", "6.1"),  # GP102, GP104, GP106, GP107, GP108
    Chip(0x1D80, 0x1DFF, "Volta", "7.0"),  # GV100
    Chip(0x1E00, 0x1FFF, "Turing", "7.5"),  # TU102, TU104, TU106, TU117
    Chip(0x2080, 0x20FF, "Ampere", "8.0"),  # GA100
    Chip(0x2180, 0x21FF, "Turing", "7.5"),  # TU116
    Chip(0x2200, 0x22FF, "Ampere", "8.6"),  # GA102
    Chip(0x2300, 0x23FF, "Hopper", "9.0"),  # GH100
    Chip(0x2400, 0x25FF, "Ampere", "8.6"),  # GA103, GA104, GA106, GA107
    Chip(0x2600, 0x28FF, "Ada", "8.9"),  # AD102, AD103, AD104, AD106, AD107
    Chip(0x2900, 0x29FF, "Blackwell", "10.0"),  # GB100
    Chip(0x2B00, 0x2DFF, "Blackwell", "12.0"),  # GB202, GB203, GB206, GB207
    Chip(0x2E00, 0x2EFF, "Blackwell", "12.1"),  # GB10
    Chip(0x2F00, 0x2FFF, "Blackwell", "12.0"),  # GB205
    Chip(0x3180, 0x31FF, "Blackwell", "10.3"),  # GB110
)

NEWEST = "newer than Blackwell"


def chip_of(pci_device: Optional[str]) -> Optional[Chip]:
    """The family of a GPU such as `10de:2bb5`.

    Returns:
        The family; one of generation `NEWEST` and no capability for an id above all that are known, since NVIDIA counts
        upwards; None for an id between the known ones, and for what is no id of NVIDIA's.
    """
    vendor, _, device = (pci_device or "").lower().partition(":")
    try:
        number = int(device, 16) if vendor == "10de" else -1
    except ValueError:
        return None
    if number > _CHIPS[-1].last:
        return Chip(number, number, NEWEST, "")
    return next((chip for chip in _CHIPS if chip.first <= number <= chip.last), None)
