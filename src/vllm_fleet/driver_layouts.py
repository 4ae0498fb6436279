"""How sources cut the driver into packages, and which versions to take of what a source has.

Package names: https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/ (Debian: nvidia-driver-cuda with
nvidia-kernel-open-dkms; Ubuntu: libnvidia-compute with nvidia-dkms-open, and up to branch 580 the branch in the names),
the archives of Debian and Ubuntu for theirs, and
https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/ for NVSwitch (nvlsm since NVLink 5).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_fleet.driver_host import Host
from vllm_fleet.driver_support import Options, Reason, listed
from vllm_fleet.target.driver_probe import upstream_version
from vllm_fleet.target.gpu_generations import chip_of

_MODULE = re.compile(
    r"nvidia-(?:open-)?kernel-(?:open-)?dkms|nvidia-dkms.*|linux-(?:modules|objects|signatures)-nvidia-.*"
)


@dataclass(frozen=True)
class Want:
    """A package that the driver needs: the first of the names that the source has."""

    names: tuple[str, ...]
    follows: Literal["driver", "branch", "nothing"] = "driver"  # what its version must be that of
    required: bool = True


@dataclass(frozen=True)
class Layout:
    """One way in which a source cuts the driver into packages. The first want carries the driver's version."""

    name: str
    wants: tuple[Want, ...]
    builds: bool  # whether the module is built on the host, by dkms


@dataclass(frozen=True)
class Chosen:
    """A layout of which the source has everything, and the packages' versions."""

    layout: Layout
    version: str
    packages: Mapping[str, str]


def layouts(host: Host, wishes: Options, branch: int, *, open_modules: bool, fabric: bool) -> list[Layout]:
    """The ways in which the source may have cut the driver, the preferred one first."""
    wants = _fabric_wants(host, branch) if fabric else ()
    flavour = "-open" if open_modules else ""
    system, _ = host.distribution
    if system == "ubuntu":
        return (
            _ubuntu_own(host, branch, flavour, wants)
            if wishes.source == "distribution"
            else _ubuntu_nvidia(branch, flavour, wants)
        )
    persistence = Want(("nvidia-persistenced",), "branch", required=False)
    if wishes.source == "distribution":
        module = Want((f"nvidia{flavour}-kernel-dkms",))
        parts = (Want(("libcuda1",)), module, Want(("nvidia-smi",)), persistence, *wants)
        return [Layout("Debian's own", parts, builds=True)]
    module = Want((f"nvidia-kernel{flavour}-dkms",))
    tool = Want(("nvidia-smi",), required=False)  # a package of its own until it went into nvidia-driver-cuda
    parts = (Want(("nvidia-driver-cuda", "libcuda1")), module, tool, persistence, *wants)
    return [Layout("NVIDIA's for Debian", parts, builds=True)]


def _ubuntu_nvidia(branch: int, flavour: str, fabric: tuple[Want, ...]) -> list[Layout]:
    return [
        Layout(
            f"NVIDIA's for Ubuntu, {described}",
            (
                Want((f"libnvidia-compute{end}",)),
                Want((f"nvidia-dkms{end}{flavour}",)),
                Want((f"nvidia-utils{end}",)),
                Want((f"nvidia-compute-utils{end}", "nvidia-persistenced"), "branch", required=False),
                *fabric,
            ),
            builds=True,
        )
        for end, described in ((f"-{branch}", "with the branch in the names"), ("", "without"))
    ]


def _ubuntu_own(host: Host, branch: int, flavour: str, fabric: tuple[Want, ...]) -> list[Layout]:
    """Ubuntu's: modules that Ubuntu built and signed, by kernel; else those that dkms builds."""
    releases = [kernel["release"] for kernel in host.needed_kernels]
    kinds = sorted({kernel_kind(release) for release in releases})
    signed, built = [], []
    for server in ("-server", ""):
        name = f"{branch}{server}"
        userland = (
            Want((f"libnvidia-compute-{name}",)),
            Want((f"nvidia-utils-{name}",)),
            Want((f"nvidia-headless-no-dkms-{name}{flavour}",)),
        )
        modules = f"linux-modules-nvidia-{name}{flavour}"
        prebuilt = [Want((f"{modules}-{release}",), "nothing") for release in releases]
        # The meta package brings the modules of every later kernel of this kind.
        prebuilt += [Want((f"{modules}-{kind}",), "nothing", required=False) for kind in kinds]
        described = f"Ubuntu's {name}{flavour}"
        signed.append(Layout(f"{described}, signed", (*userland, *prebuilt, *fabric), builds=False))
        source = Want((f"nvidia-dkms-{name}{flavour}",))
        built.append(Layout(f"{described}, built here", (*userland, source, *fabric), builds=True))
    return signed + built


def _fabric_wants(host: Host, branch: int) -> tuple[Want, ...]:
    """The fabric manager, of exactly the driver's version; with NVLink 5 also its subnet manager."""
    manager = Want((f"nvidia-fabricmanager-{branch}", "nvidia-fabricmanager"))
    chips = [chip_of(gpu["pci_device"]) for gpu in host.facts["gpus"]]
    nvlink5 = any(chip and chip.compute_capability.startswith("10.") for chip in chips)
    return (manager, Want(("nvlsm",), "nothing")) if nvlink5 else (manager,)


def kernel_kind(release: str) -> str:
    """Kind of a kernel, as its meta packages are called: generic of 6.8.0-45-generic, amd64 of 6.12.48+deb13-amd64."""
    parts = release.split("-")
    while len(parts) > 1 and parts[0][:1].isdigit():
        parts.pop(0)
    return "-".join(parts)


def headers(host: Host) -> list[str]:
    """Headers to install: of each kernel that can have them, and the meta packages that bring those of later ones."""
    names = [kernel["headers_package"] for kernel in host.kernels if kernel["headers"] == "available"]
    present = {package["name"] for package in host.facts["kernel_packages"]}
    for kernel in host.needed_kernels:
        kind = re.escape(kernel_kind(kernel["release"]))
        metas = sorted(name for name in present if re.fullmatch(rf"linux-image-{kind}(?:-hwe-[\d.]+)?", name))
        names += [name.replace("linux-image-", "linux-headers-") for name in metas]
    return [name for name in dict.fromkeys(names) if name not in present]


def installed(host: Host, ways: Sequence[Layout]) -> bool:
    """Whether every part of the driver is installed, cut as in any source."""
    names = set(host.packages)
    if any(all(set(want.names) & names for want in layout.wants if want.required) for layout in ways):
        return True
    # A driver of another source: its parts have other names. It will do when there is a module and the library.
    fabric = [want for want in ways[0].wants if want.names[-1] in ("nvidia-fabricmanager", "nvlsm")]
    has_library = host.facts["library"]["version"] == host.version
    return has_library and any(map(_MODULE.fullmatch, names)) and all(set(want.names) & names for want in fabric)


# --- what a source has ----------------------------------------------------------------------------------------------


def _order(version: str) -> list[tuple[int, str]]:
    return [(int(number or 0), text) for number, text in re.findall(r"(\d+)|(\D+)", version)]


def _of_branch(version: str, branch: int) -> bool:
    return version.startswith(f"{branch}.")


def choose(
    ways: Sequence[Layout], candidates: Sequence[Mapping[str, str]], branch: int, version: str
) -> tuple[Chosen | None, list[Reason]]:
    """The first layout of which the source has everything at one version of the driver, the newest that fits.

    Args:
        ways: Layouts in order of preference.
        candidates: Packages that the source has: `name`, `version`.
        branch: The branch wanted.
        version: The exact version wanted; empty for the newest of the branch.

    Returns:
        The choice, or None and why there is none.
    """
    offered: dict[str, list[str]] = {}
    for candidate in candidates:
        offered.setdefault(candidate["name"], []).append(candidate["version"])
    for versions in offered.values():
        versions.sort(key=_order, reverse=True)
    lacking = []
    for layout in ways:
        known = {upstream_version(one) or "" for name in layout.wants[0].names for one in offered.get(name, [])}
        fitting = [one for one in known if one == version or (not version and _of_branch(one, branch))]
        for upstream in sorted(fitting, key=_order, reverse=True):
            packages, missing = _packages_at(layout, offered, upstream, branch)
            if not missing:
                return Chosen(layout, upstream, packages), []
            lacking.append(f"{layout.name} at {upstream} lacks {listed(missing)}")
    return None, [_nothing_fits({one for own in offered.values() for one in own}, lacking, branch, version)]


def _nothing_fits(offered: Iterable[str], lacking: Sequence[str], branch: int, version: str) -> Reason:
    wanted = version or f"branch {branch}"
    if lacking:
        return Reason(
            "source_incomplete",
            f"The source has {wanted}, and not all of it: {'; '.join(lacking[:3])}. A driver's parts must be of one "
            "version. Choose another gpu_driver_version or gpu_driver_source.",
        )
    versions = sorted({one for one in map(upstream_version, offered) if one}, key=_order)
    branches = sorted({one.partition(".")[0] for one in versions})
    same = [one for one in versions if version and _of_branch(one, branch)]
    of_branch = f", of branch {branch} it has {listed(same[-4:])}" if same else ""
    return Reason(
        "not_offered",
        f"The source has no {wanted}; its branches are {listed(branches)}{of_branch}. Choose one of these, or another "
        "gpu_driver_source. Debian's own drivers are in its components contrib, non-free and non-free-firmware, which "
        "must be among the host's sources.",
    )


def _packages_at(
    layout: Layout, offered: Mapping[str, Sequence[str]], upstream: str, branch: int
) -> tuple[dict[str, str], list[str]]:
    """Package versions for one version of the driver, and the wants that the source cannot meet."""
    packages: dict[str, str] = {}
    missing = []
    for want in layout.wants:
        for name in want.names:
            versions = list(offered.get(name, []))
            exact = [one for one in versions if upstream_version(one) == upstream]
            same_branch = [one for one in versions if _of_branch(upstream_version(one) or "", branch)]
            found = {"driver": exact, "branch": exact or same_branch, "nothing": versions}[want.follows]
            if found:
                packages[name] = found[0]
                break
        else:
            if want.required:
                missing.append(want.names[0])
    return packages, missing


def arguments(host: Host, chosen: Chosen, candidates: Sequence[Mapping[str, str]], extra: Sequence[str]) -> list[str]:
    """Arguments of apt-get install: the driver, what else of it is installed at its version, `name-` for the rest."""
    install = dict(chosen.packages)
    remove = []
    at_version: dict[str, str] = {}
    for candidate in sorted(candidates, key=lambda one: _order(one["version"])):
        if upstream_version(candidate["version"]) == chosen.version:
            at_version[candidate["name"]] = candidate["version"]
    for name, package in host.packages.items():
        if name in install:
            continue
        if _MODULE.fullmatch(name):
            # Objects and signatures come with the signed modules that they belong to.
            part = name.startswith(("linux-objects-", "linux-signatures-")) and not chosen.layout.builds
            remove += [] if part else [name]
        elif name in at_version:
            install[name] = at_version[name]
        elif upstream_version(package["version"]) != chosen.version and name != "nvidia-persistenced":
            remove.append(name)
    pinned = [f"{name}={version}" for name, version in sorted(install.items())]
    return [*pinned, *(f"{name}-" for name in sorted(remove)), *extra]


def pins(chosen: Chosen, candidates: Iterable[Mapping[str, str]]) -> list[str]:
    """Package versions that the driver's packages may have: all that the source has of the driver's version."""
    of_driver = {one["version"] for one in candidates if upstream_version(one["version"]) == chosen.version}
    return sorted(of_driver | {one for one in chosen.packages.values() if upstream_version(one)})
