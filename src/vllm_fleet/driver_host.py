"""A host as the module `driver_facts` read it, and the questions that are asked of it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_fleet.driver_support import DISTRIBUTIONS, REPOSITORIES, Options, Reason, listed
from vllm_fleet.target.driver_probe import upstream_version

PREFERENCES = "/etc/apt/preferences.d/00-vllm-fleet-gpu-driver"

RIVALS = ("nouveau", "nova_core", "nova_drm")
_BUILT_HERE = re.compile(r"nvidia-(?:open-)?kernel-(?:open-)?dkms|nvidia-dkms.*")


@dataclass(frozen=True)
class Host:
    """The facts."""

    facts: Mapping[str, Any]

    @property
    def distribution(self) -> tuple[str, str]:
        """Id and version, ("debian", "13")."""
        release = self.facts["distribution"]
        return (release["id"], release["version"])

    @property
    def repository(self) -> str | None:
        """NVIDIA's repository for this host, `debian13/x86_64`."""
        return REPOSITORIES.get((*self.distribution, self.facts["distribution"]["architecture"]))

    @property
    def kernels(self) -> list[Mapping[str, Any]]:
        """Those that can be booted."""
        return [kernel for kernel in self.facts["kernels"]["kernels"] if kernel.get("bootable", True)]

    @property
    def needed_kernels(self) -> list[Mapping[str, Any]]:
        """Those that run or start next: they must have the module. The others get it where their headers allow."""
        return [kernel for kernel in self.kernels if kernel["running"] or kernel["next_boot"]]

    @property
    def packages(self) -> dict[str, Mapping[str, Any]]:
        """Installed packages of the driver by name."""
        return {package["name"]: package for package in self.facts["packages"]}

    @property
    def versions(self) -> list[str]:
        """Versions of the driver that packages are of; more than one is an upgrade that was done by half."""
        own = (
            package["version"]
            for name, package in self.packages.items()
            if not name.startswith(("linux-", "nvidia-persistenced"))
        )
        return sorted({version for version in map(upstream_version, own) if version})

    @property
    def version(self) -> str | None:
        """The version that is installed; None when there is none, or more than one."""
        return self.versions[0] if len(self.versions) == 1 else None

    @property
    def builds(self) -> bool:
        """Whether the installed module is built on the host."""
        return any(map(_BUILT_HERE.fullmatch, self.packages))

    @property
    def managed(self) -> bool:
        """Whether this role has set the driver up before: then the holds are its own."""
        return self.file(PREFERENCES) is not None

    def file(self, path: str) -> str | None:
        """Content of a file that the role may manage."""
        return (self.facts.get("files") or {}).get(path)

    def holds(self, name: str) -> bool:
        """Whether a package is held."""
        records = [*self.facts["packages"], *self.facts["kernel_packages"]]
        return any(record["name"] == name and record["held"] for record in records)


def host_refusals(host: Host, wishes: Options) -> list[Reason]:
    """What must be settled on the host first, whatever the driver."""
    facts, refusals = host.facts, []
    if host.distribution not in DISTRIBUTIONS:
        refusals.append(
            Reason(
                "distribution_unsupported",
                f"This host runs {' '.join(host.distribution).strip() or 'an unknown distribution'}; drivers are "
                "installed on Debian 12 and 13 and Ubuntu 22.04 and 24.04. Install the driver yourself and set "
                "gpu_driver_source: none.",
            )
        )
    elif wishes.source == "nvidia" and host.repository is None and not wishes.keyring_url:
        refusals.append(
            Reason(
                "no_repository",
                f"NVIDIA has no repository for {' '.join(host.distribution)} on "
                f"{facts['distribution']['architecture']}. Set gpu_driver_source to distribution or mirror.",
            )
        )
    if wishes.source == "nvidia" and wishes.keyring_url and not wishes.keyring_checksum:
        refusals.append(
            Reason(
                "no_checksum",
                f"gpu_driver_keyring_url names {wishes.keyring_url}, and gpu_driver_keyring_checksum is empty. Give "
                "the SHA-256 of that file: whoever controls the keyring controls the host.",
            )
        )
    if facts["broken"]:
        refusals.append(
            Reason(
                "dpkg_broken",
                f"dpkg left packages unfinished: {listed(facts['broken'][:5])}. Finish or remove them first: "
                "dpkg --configure -a, then apt-get --fix-broken install.",
            )
        )
    library = facts["library"]
    if library["version"] and library["packaged"] is False:
        refusals.append(
            Reason(
                "driver_not_packaged",
                f"Driver {library['version']} was installed past the package manager (no package owns its library), as "
                "NVIDIA's .run installer does; packages on top of it would break both. Remove it with "
                "nvidia-uninstall, or keep it and set gpu_driver_source: none.",
            )
        )
    return refusals


def change_refusals(host: Host, wishes: Options) -> list[Reason]:
    """What must be settled before packages of the driver may change."""
    refusals = []
    held = sorted(name for name, package in host.packages.items() if package["held"])
    if held and not host.managed and not wishes.release_holds:
        refusals.append(
            Reason(
                "held",
                f"Somebody holds packages of the driver: {listed(held)}. If that may end, run apt-mark unhold "
                f"{' '.join(held)}, or set gpu_driver_release_holds: true.",
            )
        )
    serving = host.facts["serving"]
    if serving and not wishes.stop_serving:
        refusals.append(
            Reason(
                "serving",
                f"This host serves ({listed(serving)}), and a driver cannot be changed under a running engine. Drain "
                "it and stop these units, or set gpu_driver_stop_serving: true, which stops them as systemd does "
                "(requests in flight end within the unit's stop deadline).",
            )
        )
    return refusals


def header_refusals(host: Host) -> list[Reason]:
    """Kernels for which no module can be built: without their headers an install would end well and leave nothing."""
    return [
        Reason(
            "headers_missing",
            f"{kernel['headers_package']} is neither installed nor in any source, so no module can be built for kernel "
            f"{kernel['release']}, which {'runs' if kernel['running'] else 'starts next'}. Boot into a kernel whose "
            "headers the sources have (upgrade the kernel's meta package and reboot), or add the source that has them.",
        )
        for kernel in host.needed_kernels
        if kernel["headers"] == "missing" and not kernel["nvidia"]
    ]


def unproven(host: Host, version: str, *, open_modules: bool) -> list[str]:
    """What keeps the driver from loading after the next boot, in sentences; empty when the disk proves that it will.

    An install that ended well proves nothing: a dkms build that failed is no failure of apt.
    """
    kernels, found = host.facts["kernels"], []
    for kernel in host.needed_kernels:
        release, module = kernel["release"], kernel["nvidia"]
        builds = sorted({build["state"] for build in kernel["dkms"] if build["version"].startswith(version)})
        if module is None:
            found.append(f"Kernel {release} has no NVIDIA module (dkms status: {listed(builds)}).")
            continue
        if module["version"] != version:
            found.append(f"The module of kernel {release} is {module['version']}, not {version}.")
        if set(builds) - {"installed"}:
            found.append(f"dkms status of {version} for kernel {release} is {listed(builds)}, not installed.")
        if module["open"] != open_modules:
            wanted = "Dual MIT/GPL (open)" if open_modules else "NVIDIA (proprietary)"
            found.append(f"The module of kernel {release} has licence {module['licence']}, not {wanted}.")
        if kernels["secure_boot"] == "enabled" and not module["signer"]:
            found.append(f"Secure boot is on, and the module of kernel {release} is not signed.")
    return found


def unguarded(host: Host) -> list[str]:
    """What may take the GPUs before the driver can, in sentences."""
    kernels = host.facts["kernels"]
    found = [
        f"{rival} is not kept out by modprobe.d (a blacklist and an install line)."
        for rival in RIVALS
        if not kernels["blocked"][rival]
    ]
    found += [
        f"The initramfs of kernel {kernel['release']} still holds nouveau, which would take the GPUs first."
        for kernel in host.needed_kernels
        if kernel["nouveau_in_initramfs"]
    ]
    return found
