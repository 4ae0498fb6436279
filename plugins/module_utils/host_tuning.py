"""Which settings of a GPU host differ from what is wanted, how to set them, and how to take each back.

Reads sysfs, procfs and nvidia-smi; decides nothing that an inventory did not ask for, and changes nothing: what a boot
forgets becomes a pair of commands in a unit, the second of which restores the value that was there before, and the rest
becomes files. What cannot be set here, as in a container whose sysfs is read-only, is skipped and says why.

Standard library only, Python 3.9: this runs on target hosts.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, NamedTuple, Optional

from .host_probe import ACS_REDIRECT, acs_control

__all__ = ["BadWishError", "Host", "Setting", "decide", "kernel_arguments", "read_gpus", "reboot_needed", "table"]

# What each setting costs; docs/tuning.md has the same table.
_PRICES = {
    "persistence": "a few watts per idle GPU",
    "nvidia_uvm": "none",
    "transparent_hugepages": "programs that do not ask get no huge pages",
    "numa_balancing": "programs that are not pinned stay where they started",
    "iommu": "devices are no longer kept out of memory; a reboot",
    "acs": "GPUs reach each other's memory unchecked; no pass-through to VMs",
    "power_limit": "prompts are read slower under load",
    "clocks": "no boost above the range",
    "limits": "none",
}
# Kernel arguments by IOMMU mode and machine; an argument of the other vendor is ignored by the kernel.
_IOMMU_ARGUMENTS = {
    ("passthrough", "x86_64"): ["iommu=pt"],
    ("passthrough", "aarch64"): ["iommu.passthrough=1"],
    ("off", "x86_64"): ["intel_iommu=off", "amd_iommu=off"],
}
_KERNEL_ARGUMENTS = "kernel arguments"
_SKIPPED = "skipped"
_NEXT_BOOT = "at the next boot"
_REBOOT = "reboot the host to make it so"
_READ_ONLY = "read-only here, as in a container"


class BadWishError(ValueError):
    """What an inventory asks for cannot be: the message names it and what to do."""


class Host(NamedTuple):
    """Where things are on a host; a copy of the first two stands for a simulated one."""

    sysfs: str = "/sys"
    procfs: str = "/proc"
    etc: str = "/etc"
    nvidia_smi: str = "nvidia-smi"


class Setting(NamedTuple):
    """One setting of a host.

    `state` is `as wanted`, `changes`, `at the next boot` or `skipped`; `why` says what is in the way. `start` and
    `stop` are commands of the unit, `stop` restoring what was there before; None where a file does it.
    """

    name: str
    subject: str
    now: str
    wanted: str
    state: str
    price: str
    why: Optional[str] = None
    start: Optional[str] = None
    stop: Optional[str] = None


def read_gpus(report: str) -> list[dict[str, Any]]:
    """UUID, persistence mode and power limits in watts of each GPU, from `nvidia-smi -q -x`; unknown is None."""
    document = re.search(r"<nvidia_smi_log>.*</nvidia_smi_log>", report, re.DOTALL)
    gpus = []
    for record in ET.fromstring(document[0]).findall("gpu") if document else []:  # noqa: S314  (printed by this host)

        def watts(name: str, record: ET.Element = record) -> Optional[float]:
            # Older drivers call the group power_readings and the limit power_limit.
            text = record.findtext(f"gpu_power_readings/{name}") or record.findtext(f"power_readings/{name}") or ""
            match = re.match(r"([\d.]+) W", text)
            return float(match[1]) if match else None

        gpus.append(
            {
                "uuid": record.findtext("uuid"),
                "persistence": record.findtext("persistence_mode"),
                "power_limit_w": watts("current_power_limit") or watts("power_limit"),
                "min_power_limit_w": watts("min_power_limit"),
                "max_power_limit_w": watts("max_power_limit"),
            },
        )
    return gpus


def decide(
    host: Host, wishes: dict[str, Any], topology: dict[str, Any], report: str, remembered: dict[str, Any]
) -> tuple[list[Setting], dict[str, Any]]:
    """Compare a host with what is wanted.

    Args:
        host: Where to read.
        wishes: As the module `host_tuning` takes them.
        topology: The fact `gpu_topology`.
        report: What `nvidia-smi -q -x` prints.
        remembered: Values from before the first change, as an earlier call returned them.

    Returns:
        The settings, and the values to remember.

    Raises:
        BadWishError: A GPU that is not there, or a limit out of its range.
    """
    room = _Room(host, wishes, topology, read_gpus(report), remembered)
    settings = [
        *room.persistence(),
        *room.nvidia_uvm(),
        *room.limits(),
        *room.transparent_hugepages(),
        *room.numa_balancing(),
        *room.iommu(),
        *room.acs(),
        *room.power_limits(),
        *room.clocks(),
    ]
    return settings, room.memory


def _number(wish: Any, variable: str, what: str) -> float:
    """Numbers of a command line come as text."""
    try:
        return float(wish)
    except (TypeError, ValueError):
        raise BadWishError(f"{variable} holds {wish!r}; it must be {what} for each GPU's UUID, or for all.") from None


class _Room:
    """One host while it is looked at; `memory` collects the values from before."""

    def __init__(
        self,
        host: Host,
        wishes: dict[str, Any],
        topology: dict[str, Any],
        gpus: list[dict[str, Any]],
        remembered: dict[str, Any],
    ) -> None:
        self.host, self.wishes, self.topology, self.gpus = host, wishes, topology, gpus
        self.remembered = remembered
        self.memory: dict[str, Any] = {}
        self.smi = shutil.which(host.nvidia_smi) or host.nvidia_smi

    def before(self, kind: str, subject: str, now: Any) -> Any:
        """The value from before the first change: remembered, or what is there now."""
        value = self.remembered.get(kind, {}).get(subject, now)
        self.memory.setdefault(kind, {})[subject] = value
        return value

    def read(self, *parts: str) -> Optional[str]:
        try:
            return Path(*parts).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None

    # --- per GPU

    def persistence(self) -> list[Setting]:
        if not self.wishes["persistence"]:
            return []
        settings = []
        for gpu in self.gpus:
            now = gpu["persistence"] or "unknown"
            before = self.before("persistence", gpu["uuid"], now)
            stop = f"{self.smi} -i {gpu['uuid']} -pm 0" if before == "Disabled" else None
            start = f"{self.smi} -i {gpu['uuid']} -pm 1"
            settings.append(self._set("persistence", gpu["uuid"], now, "Enabled", start, stop))
        return settings

    def power_limits(self) -> list[Setting]:
        settings = []
        for gpu, wish in self._by_gpu("power_limits_w"):
            wanted = _number(wish, "host_tuning_power_limits_w", "a number of watts")
            low, high = gpu["min_power_limit_w"], gpu["max_power_limit_w"]
            if None not in (low, high) and not low <= wanted <= high:
                raise BadWishError(
                    f"host_tuning_power_limits_w asks for {wanted:g} W on {gpu['uuid']}, and this GPU takes {low:g} to "
                    f"{high:g} W. Choose a value between them, or take the GPU out of the variable."
                )
            now = gpu["power_limit_w"]
            if now is None:
                why = "the GPU tells no power limit"
                settings.append(self._skip("power_limit", gpu["uuid"], "unknown", f"{wanted:g} W", why))
                continue
            before = self.before("power_limit_w", gpu["uuid"], now)
            start, stop = (f"{self.smi} -i {gpu['uuid']} -pl {value:g}" for value in (wanted, before))
            settings.append(self._set("power_limit", gpu["uuid"], f"{now:g} W", f"{wanted:g} W", start, stop))
        return settings

    def clocks(self) -> list[Setting]:
        """Locked clocks cannot be read, so they count as set once the unit has them."""
        settings = []
        for gpu, wish in self._by_gpu("graphics_clocks_mhz"):
            what = "the lowest and the highest clock in MHz, [1200, 2400]"
            ends = wish if isinstance(wish, list) and len(wish) == 2 else [None]  # noqa: PLR2004  (two ends)
            low, high = sorted(int(_number(end, "host_tuning_graphics_clocks_mhz", what)) for end in [*ends, 0][:2])
            wanted = f"{low}-{high} MHz"
            start = f"{self.smi} -i {gpu['uuid']} -lgc {low},{high}"
            stop = f"{self.smi} -i {gpu['uuid']} -rgc"
            settings.append(self._set("clocks", gpu["uuid"], wanted, wanted, start, stop))
        return settings

    def _by_gpu(self, wish: str) -> list[tuple[dict[str, Any], Any]]:
        """GPUs that a variable names, by UUID or as `all`; a UUID wins over `all`."""
        wanted = self.wishes[wish]
        unknown = sorted(set(wanted) - {"all"} - {gpu["uuid"] for gpu in self.gpus})
        if unknown:
            present = ", ".join(str(gpu["uuid"]) for gpu in self.gpus) or "none"
            raise BadWishError(
                f"host_tuning_{wish} names {', '.join(unknown)}, which this host does not have. It has {present}. "
                "Correct the UUID (nvidia-smi -L lists them), or take it out of the variable."
            )
        named = [(gpu, wanted.get(gpu["uuid"], wanted.get("all"))) for gpu in self.gpus]
        return [(gpu, value) for gpu, value in named if value is not None]

    # --- kernel

    def nvidia_uvm(self) -> list[Setting]:
        """Memory of CUDA goes through this module, and an engine that may gain no privileges cannot have it loaded."""
        if not self.wishes["nvidia_uvm"]:
            return []
        modules = self.read(self.host.procfs, "modules") or ""
        now = "loaded" if re.search(r"^nvidia_uvm ", modules, re.MULTILINE) else "not loaded"
        if now != "loaded" and not Path("/lib/modules", os.uname().release).is_dir():
            why = "the running kernel's modules are not here, as in a container"
            return [self._skip("nvidia_uvm", "module", now, "loaded", why)]
        helper = shutil.which("nvidia-modprobe")  # makes the device files too
        start = f"{helper} -u -c=0" if helper else f"{shutil.which('modprobe') or 'modprobe'} nvidia-uvm"
        return [self._set("nvidia_uvm", "module", now, "loaded", start, None)]

    def limits(self) -> list[Setting]:
        if not self.wishes["limits"]:
            return []
        there = Path(self.host.etc, "security/limits.d/90-vllm-fleet.conf").exists()
        state = "as wanted" if there else "changes"
        now = "set" if there else "the distribution's"
        return [Setting("limits", "memlock, nofile of shells", now, "unlimited, 1048576", state, _PRICES["limits"])]

    def transparent_hugepages(self) -> list[Setting]:
        wanted = self.wishes["transparent_hugepages"]
        path = Path(self.host.sysfs, "kernel/mm/transparent_hugepage/enabled")
        told = self.read(str(path))
        chosen = re.search(r"\[(\w+)\]", told or "")  # the kernel lists all modes and marks the one in force
        return self._kernel_value("transparent_hugepages", path, chosen[1] if chosen else told, wanted)

    def numa_balancing(self) -> list[Setting]:
        if not self.wishes["numa_balancing_off"]:
            return []
        path = Path(self.host.procfs, "sys/kernel/numa_balancing")
        return self._kernel_value("numa_balancing", path, self.read(str(path)), "0")

    def _kernel_value(self, name: str, path: Path, now: Optional[str], wanted: str) -> list[Setting]:
        """A value that is set by writing to a file of the kernel."""
        if not wanted:
            return []
        if now is None:
            return [self._skip(name, str(path), "absent", wanted, "this kernel does not have it")]
        if not os.access(path, os.W_OK):
            row = self._set(name, str(path), now, wanted, None, None)
            return [row if now == wanted else self._skip(name, str(path), now, wanted, _READ_ONLY)]
        before = self.before(name, str(path), now)
        start, stop = (f"/bin/sh -c {shlex.quote(f'echo {value} >{path}')}" for value in (wanted, before))
        return [self._set(name, str(path), now, wanted, start, stop)]

    # --- IOMMU and ACS

    def iommu(self) -> list[Setting]:
        wanted = self.wishes["iommu"]
        if not wanted:
            return []
        now = self.topology["pcie"]["iommu"]
        arguments = _IOMMU_ARGUMENTS.get((wanted, self.topology["architecture"] or "x86_64"))
        if arguments is None:
            why = f"no kernel argument for that on {self.topology['architecture']}"
            return [self._skip("iommu", _KERNEL_ARGUMENTS, now, wanted, why)]
        words = " ".join(arguments)
        booted = (self.read(self.host.procfs, "cmdline") or "").split()
        file = Path(self.host.etc, "default/grub.d/90-vllm-fleet.cfg")
        if now == wanted and not file.exists():
            return [Setting("iommu", "host", now, wanted, "as wanted", _PRICES["iommu"])]
        if not Path(self.host.etc, "default/grub").exists() or not shutil.which("update-grub"):
            why = f"no GRUB here: add {words} to the kernel's command line yourself"
            return [self._skip("iommu", _KERNEL_ARGUMENTS, now, words, why)]
        in_force = set(arguments) <= set(booted)
        state = "as wanted" if in_force else _NEXT_BOOT
        if words not in (self.read(str(file)) or ""):
            state = "changes"
        reason = None if in_force else _REBOOT
        return [Setting("iommu", _KERNEL_ARGUMENTS, now, words, state, _PRICES["iommu"], reason)]

    def acs(self) -> list[Setting]:
        if not self.wishes["acs_redirect_off"]:
            return []
        found = self.topology["pcie"]["acs_redirect"]
        if found is None:
            return [self._skip("acs", "bridges", "unknown", "no redirect", "their config space is not readable")]
        setpci = shutil.which("setpci") or "/usr/bin/setpci"  # installed by the role
        if self.host.sysfs != "/sys":
            setpci += f" -A linux-sysfs -O sysfs.path={self.host.sysfs}/bus/pci"
        settings = []
        for bridge in sorted({*found, *self.remembered.get("acs", {})}):
            path = Path(self.host.sysfs, "bus/pci/devices", bridge, "config")
            try:
                control = acs_control(path.read_bytes())
            except OSError:
                control = None
            if control is None:
                settings.append(self._skip("acs", bridge, "unknown", "no redirect", f"{path} is not readable"))
                continue
            now = f"{control:04x}"
            if not os.access(path, os.W_OK):
                settings.append(self._skip("acs", bridge, now, "no redirect", _READ_ONLY))
                continue
            before = self.before("acs", bridge, now)
            start = f"{setpci} -s {bridge} ECAP_ACS+6.w=0:{ACS_REDIRECT:x}"
            stop = f"{setpci} -s {bridge} ECAP_ACS+6.w={before}"
            wanted = f"{control & ~ACS_REDIRECT:04x}"
            settings.append(self._set("acs", bridge, now, wanted, start, stop))
        return settings

    # --- rows

    def _set(self, name: str, subject: str, now: str, wanted: str, *commands: Optional[str]) -> Setting:
        state = "as wanted" if now == wanted else "changes"
        return Setting(name, subject, now, wanted, state, _PRICES[name], None, *commands)

    def _skip(self, name: str, subject: str, now: str, wanted: str, why: str) -> Setting:
        return Setting(name, subject, now, wanted, _SKIPPED, _PRICES[name], why)


def reboot_needed(settings: list[Setting]) -> bool:
    """Whether a boot is still missing for what is wanted."""
    return any(setting.why == _REBOOT for setting in settings)


def kernel_arguments(settings: list[Setting]) -> list[str]:
    """What the kernel's command line must have for the settings."""
    rows = [s for s in settings if s.subject == _KERNEL_ARGUMENTS and s.state != _SKIPPED]
    return [word for setting in rows for word in setting.wanted.split()]


def table(settings: list[Setting]) -> list[str]:
    """The settings as aligned lines."""
    rows = [("setting", "of", "now", "wanted", "state", "price")]
    rows += [
        (s.name, s.subject, s.now, s.wanted, f"{s.state}: {s.why}" if s.why else s.state, s.price) for s in settings
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]  # noqa: B905
