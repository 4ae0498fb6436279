"""What to do about a host's NVIDIA driver, and why: a pure function of its facts and the inventory's wishes.

`driver_support` has the matrix, `driver_host` the questions to the host, `driver_layouts` the packages.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm_fleet.driver_host import (
    PREFERENCES,
    RIVALS,
    Host,
    change_refusals,
    header_refusals,
    host_refusals,
    unguarded,
    unproven,
)
from vllm_fleet.driver_layouts import Chosen, Layout, arguments, choose, headers, installed, layouts, pins
from vllm_fleet.driver_support import (
    KEYRINGS,
    Options,
    Reason,
    branch_of,
    excludes_a_flavour,
    flavour,
    listed,
    matrix_refusals,
    newest_kernel,
)
from vllm_fleet.target.driver_probe import is_driver_package, upstream_version
from vllm_fleet.target.gpu_generations import NEWEST, chip_of

UNATTENDED = "/etc/apt/apt.conf.d/52vllm-fleet-gpu-driver"
FABRIC_GATE = "/etc/systemd/system/vllm-.service.d/10-fabric-manager.conf"
MODPROBE = "/etc/modprobe.d/vllm-fleet-gpu-driver.conf"
KERNEL_HOOK = "/etc/kernel/postinst.d/zz-vllm-fleet-gpu-driver"


@dataclass(frozen=True)
class Change:
    """A row of the table of changes."""

    what: str
    now: str
    then: str


@dataclass(frozen=True)
class _Decision:
    """What was decided, for the parts of the plan that follow from it."""

    host: Host
    wishes: Options
    keep: bool  # the installed version stays
    branch: int
    open_modules: bool
    fabric: bool
    ways: Sequence[Layout]
    chosen: Chosen | None
    version: str | None
    replace: bool  # packages change
    unproven: Sequence[str]

    @property
    def builds(self) -> bool:
        """Whether modules are built on the host. Until the source was asked, the preferred layout counts."""
        if self.replace:
            return self.chosen.layout.builds if self.chosen else self.ways[0].builds
        return self.host.builds

    @property
    def rebuild(self) -> bool:
        """Whether a module must be built."""
        return self.builds and (self.replace or bool(self.unproven))


def driver_plan(facts: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Decide what happens to a host's driver.

    Called up to three times with ever more facts: as the host was read; with `candidates`, what the source has; with
    `transaction`, what apt says that it would do.

    Args:
        facts: What the module `driver_facts` read, and `candidates` and `transaction` of `driver_packages` when asked.
        options: Wishes by name, see `Options`.

    Returns:
        `state`: `left` (none of the role's business), `satisfied`, `change` or `refused`. `refusals` and `warnings`:
        codes with sentences. `target`: branch, version (null until the source was asked) and modules. `ask_source`:
        whether the next call needs `candidates`. `source`: arguments for `driver_packages`. `install`: arguments of
        apt-get install. `tools`: packages that a build needs. `build`: archive with the module's source and kernels to
        build it for beside the present driver, or null. `dkms_kernels`: those that must have a module in the end.
        `files`: content by path, null to remove. `changed_files`. `hold`: packages. `mok`: certificate and whether it
        is staged, where secure boot takes no module yet; else null. `stop`: units to stop. `fabric_manager`. `reboot`:
        whether and why. `unproven`: what the disk does not prove yet. `changes`: the rows of the table. `lines`: the
        table as text.

    Raises:
        BadInputError: An option is unknown or nonsense.
    """
    wishes = Options.from_dict(options)
    host = Host(facts)
    if wishes.source == "none" or not facts["gpus"]:
        why = "gpu_driver_source is none" if wishes.source == "none" else "no NVIDIA GPU is on the bus"
        return {**_EMPTY, "lines": [f"The driver is left as it is: {why}."]}
    decision, refusals = _decide(host, wishes)
    transaction = facts.get("transaction")
    if transaction:
        refusals += _foreign_removals(transaction)
    files = _files(decision)
    changed_files = sorted(path for path, text in files.items() if host.file(path) != text)
    hold = _holds(decision, transaction)
    free = [name for name in hold if not host.holds(name)]
    open_ends = [*decision.unproven, *unguarded(host)]
    changing = bool(decision.replace or changed_files or free or open_ends)
    rows = _rows(decision, transaction, files, changed_files, free, open_ends)
    reboot = _reboot(decision)
    tools = _tools(decision)
    return {
        **_EMPTY,
        "state": "refused" if refusals else "change" if changing else "satisfied",
        "refusals": [asdict(reason) for reason in refusals],
        "warnings": [asdict(reason) for reason in _warnings(decision)],
        "target": {
            "branch": decision.branch,
            "version": decision.version,
            "modules": "open" if decision.open_modules else "proprietary",
        },
        "ask_source": "candidates" not in facts and bool(decision.replace or tools),
        "packages_change": decision.replace,
        "source": _source(host, wishes),
        "install": arguments(host, decision.chosen, facts["candidates"], wishes.extra_packages)
        if decision.chosen
        else [],
        "tools": tools,
        "build": _build(decision),
        "dkms_kernels": [kernel["release"] for kernel in host.needed_kernels] if decision.rebuild else [],
        "files": files,
        "changed_files": changed_files,
        "hold": hold,
        "mok": _mok(decision),
        "stop": list(facts["serving"]) if decision.replace else [],
        "fabric_manager": decision.fabric,
        "reboot": reboot,
        "unproven": open_ends,
        "changes": [asdict(row) for row in rows],
        "lines": _table(rows, refusals, reboot),
    }


_EMPTY: Mapping[str, Any] = {
    "state": "left",
    "refusals": [],
    "warnings": [],
    "target": {"branch": None, "version": None, "modules": None},
    "ask_source": False,
    "packages_change": False,
    "source": None,
    "install": [],
    "tools": [],
    "build": None,
    "dkms_kernels": [],
    "files": {},
    "changed_files": [],
    "hold": [],
    "mok": None,
    "stop": [],
    "fabric_manager": False,
    "reboot": {"needed": False, "why": ""},
    "unproven": [],
    "changes": [],
    "lines": [],
}


def _decide(host: Host, wishes: Options) -> tuple[_Decision, list[Reason]]:
    """Keep, replace or refuse."""
    facts, current = host.facts, host.version
    keep = current is not None and _may_stay(host, current, wishes)
    branch = branch_of(current) if keep and current else wishes.branch
    open_modules, refusals = flavour(facts["gpus"], branch, wishes)
    refusals = host_refusals(host, wishes) + matrix_refusals(facts["gpus"], branch, wishes) + refusals
    fabric = wishes.fabric_manager == "yes" or (wishes.fabric_manager == "auto" and bool(facts["nvswitch"]))
    ways = layouts(host, wishes, branch, open_modules=open_modules, fabric=fabric)
    replace = not (keep and installed(host, ways))
    chosen: Chosen | None = None
    if replace and "candidates" in facts and not refusals:
        exact = current if keep and current else wishes.version
        chosen, why_not = choose(ways, facts["candidates"], branch, exact)
        refusals += why_not
    version = (chosen.version if chosen else None) if replace else current
    open_ends = unproven(host, version, open_modules=open_modules) if version else []
    decision = _Decision(
        host, wishes, keep, branch, open_modules, fabric, ways, chosen, version, replace, () if replace else open_ends
    )
    if replace:
        refusals += change_refusals(host, wishes)
    if decision.rebuild and (chosen or not _may_be_signed(decision)):
        refusals += header_refusals(host)
    return decision, refusals


def _may_stay(host: Host, current: str, wishes: Options) -> bool:
    """Whether the installed version is what was asked for, or does as well and was not asked to go."""
    if wishes.version:
        return current == wishes.version
    gpus = host.facts["gpus"]
    if matrix_refusals(gpus, branch_of(current), wishes):
        return False
    open_modules, _ = flavour(gpus, branch_of(current), wishes)
    present = [kernel["nvidia"]["open"] for kernel in host.needed_kernels if kernel["nvidia"]]
    if (wishes.modules != "auto" or excludes_a_flavour(gpus)) and any(one != open_modules for one in present):
        return False
    return branch_of(current) == wishes.branch or not wishes.replace_working


def _may_be_signed(decision: _Decision) -> bool:
    """Whether a source that was not asked yet may have modules that need no headers."""
    return any(not layout.builds for layout in decision.ways)


def _foreign_removals(transaction: Mapping[str, Any]) -> list[Reason]:
    """A driver change removes drivers; where apt would take anything else away, a person must look."""
    ours = re.compile(r".*nvidia.*|lib(?:cuda|nv)\w*|cuda-drivers.*|glx-.*|update-glx")
    foreign = sorted(record["name"] for record in transaction["remove"] if not ours.fullmatch(record["name"]))
    if not foreign:
        return []
    return [
        Reason(
            "foreign_removals",
            f"apt would also remove what is no part of a driver: {listed(foreign[:8])}. See why with apt-get "
            "--simulate, remove or upgrade these yourself, then run this again.",
        )
    ]


# --- files and holds ------------------------------------------------------------------------------------------------

_FAMILIES = (
    "nvidia-* libnvidia-* libcuda1 libcudadebugger1 libnvcuvid1 libnvoptix1 libnvsdm firmware-nvidia-* cuda-drivers "
    "cuda-drivers-* xserver-xorg-video-nvidia*"
)
_OWN_VERSIONS = "nvidia-modprobe nvidia-settings nvidia-xconfig nvidia-imex*"

_UNATTENDED_TEXT = """// Written by the role gpu_driver: libraries that move alone break every new program.
Unattended-Upgrade::Package-Blacklist {
  "nvidia-";
  "libnvidia-";
  "libcuda1";
  "libnvcuvid1";
  "libnvoptix1";
  "firmware-nvidia-";
  "cuda-drivers";
  "linux-(modules|objects|signatures)-nvidia-";
};
"""

_FABRIC_GATE_TEXT = """# Written by the role gpu_driver: without the fabric manager CUDA does not start on NVSwitches.
[Unit]
Requires=nvidia-fabricmanager.service
After=nvidia-fabricmanager.service
"""


def _preferences(versions: Iterable[str]) -> str:
    """Preferences that leave the driver one version of one origin."""
    pinned = "\n".join(
        f"Package: {_FAMILIES}\nPin: version {version}\nPin-Priority: 1001\n" for version in sorted(set(versions))
    )
    return f"""# Written by the role gpu_driver: the driver has one version from one origin; of the entries that fit,
# apt takes the first. To move to another version, change gpu_driver_version or gpu_driver_branch and deploy.

{pinned}
# Helpers that have versions of their own.
Package: {_OWN_VERSIONS}
Pin: version *
Pin-Priority: 500

# Every other driver, whoever offers it.
Package: {_FAMILIES}
Pin: version [0-9][0-9][0-9].*
Pin-Priority: -1
"""


def _files(decision: _Decision) -> dict[str, str | None]:
    """Content of every file that the role owns; None for one that must not be there."""
    host, wishes = decision.host, decision.wishes
    files: dict[str, str | None] = {MODPROBE: wishes.modprobe_text, UNATTENDED: _UNATTENDED_TEXT}
    if decision.chosen:
        files[PREFERENCES] = _preferences(pins(decision.chosen, host.facts["candidates"]))
    elif decision.version and not _pins_all(host):
        own = [package["version"] for package in host.packages.values() if upstream_version(package["version"])]
        files[PREFERENCES] = _preferences(own)
    # Modules that a distribution built come with a kernel's own packages, after its scripts ran.
    verify = wishes.kernel_policy == "verify" and decision.builds
    optional = {
        KERNEL_HOOK: wishes.kernel_hook_text if verify else None,
        FABRIC_GATE: _FABRIC_GATE_TEXT if decision.fabric else None,
    }
    files |= {path: text for path, text in optional.items() if text is not None or host.file(path) is not None}
    return files


def _pins_all(host: Host) -> bool:
    """Whether the preferences that are there allow exactly what is installed."""
    pinned = set(re.findall(r"^Pin: version (\S+)\nPin-Priority: 1001$", host.file(PREFERENCES) or "", re.MULTILINE))
    own = {package["version"] for package in host.packages.values() if upstream_version(package["version"])}
    return bool(pinned) and own <= pinned


def _holds(decision: _Decision, transaction: Mapping[str, Any] | None) -> list[str]:
    """Packages to hold: all of the driver, and with the policy hold the kernels' too."""
    host, chosen = decision.host, decision.chosen
    names = set(host.packages)
    if transaction:
        names -= {record["name"] for record in transaction["remove"]}
        names |= {one["name"] for one in transaction["install"] if is_driver_package(one["name"], one["to"])}
    elif chosen:
        names |= {name for name, version in chosen.packages.items() if is_driver_package(name, version)}
    kernels = [package["name"] for package in host.facts["kernel_packages"]]
    return sorted(names) + (sorted(kernels) if decision.wishes.kernel_policy == "hold" else [])


# --- what the change needs ------------------------------------------------------------------------------------------


def _source(host: Host, wishes: Options) -> dict[str, Any]:
    """Arguments of the module `driver_packages`."""
    if wishes.source == "mirror":
        return {
            "kind": "mirror",
            "mirror_url": wishes.mirror_url,
            "mirror_suite": wishes.mirror_suite,
            "mirror_components": list(wishes.mirror_components),
            "mirror_key": wishes.mirror_key,
        }
    if wishes.source == "distribution":
        return {"kind": "distribution"}
    own = f"{wishes.repository_url}/{host.repository}/cuda-keyring_1.1-1_all.deb"
    return {
        "kind": "nvidia",
        "keyring_url": wishes.keyring_url or own,
        "keyring_checksum": wishes.keyring_checksum or KEYRINGS.get(host.repository or "", ""),
    }


def _tools(decision: _Decision) -> list[str]:
    """Packages that a build needs; dkms brings the compiler."""
    if not decision.rebuild:
        return []
    signing = ["mokutil", "openssl"] if decision.host.facts["kernels"]["secure_boot"] == "enabled" else []
    missing = [name for name in ["dkms", *signing] if name not in decision.host.facts["tools"]]
    return [*missing, *headers(decision.host)]


def _build(decision: _Decision) -> dict[str, Any] | None:
    """What to build beside the present driver before it goes; None when there is none to lose, or nothing to build."""
    chosen, host = decision.chosen, decision.host
    if chosen is None or not chosen.layout.builds or not (decision.wishes.driver_works or host.packages):
        return None
    package = next(name for name in chosen.packages if "dkms" in name and "no-dkms" not in name)
    archive = f"{package}_{chosen.packages[package].replace(':', '%3a')}_*.deb"
    return {"archive": archive, "kernels": [kernel["release"] for kernel in host.needed_kernels]}


def _mok(decision: _Decision) -> dict[str, Any] | None:
    """What secure boot asks for before a module that is built here can load; None when nothing."""
    kernels = decision.host.facts["kernels"]
    if not decision.rebuild or kernels["secure_boot"] != "enabled" or kernels["mok"]["enrolled"]:
        return None
    return {"certificate": kernels["mok"]["certificate"], "pending": bool(kernels["mok"]["pending"])}


def _reboot(decision: _Decision) -> dict[str, Any]:
    """Whether the kernel must start anew before the driver works, and why."""
    host, version = decision.host, decision.version
    kernels, loaded = host.facts["kernels"], host.facts["loaded_version"]
    rivals = [rival for rival in RIVALS if kernels["loaded"][rival]]
    reasons = [f"{listed(rivals)} is loaded and holds the GPUs"] if rivals else []
    if loaded and loaded != version and (version or decision.replace):
        reasons.append(f"the loaded module is {loaded}, and the driver on disk {version or 'will be another'}")
    running = [kernel for kernel in host.kernels if kernel["running"]]
    if running and not running[0]["nvidia"] and running[0]["headers"] == "missing":
        reasons.append(f"kernel {running[0]['release']}, which runs, has no module")
    return {"needed": bool(reasons), "why": "; ".join(reasons)}


# --- what a person should know --------------------------------------------------------------------------------------


def _warnings(decision: _Decision) -> list[Reason]:
    """What stops nothing and should be known."""
    host, wishes, found = decision.host, decision.wishes, []
    facts = host.facts
    if len(host.versions) > 1:
        found.append(
            Reason(
                "half_upgraded",
                f"Packages of drivers {listed(host.versions)} are installed together, as an upgrade of the libraries "
                "alone leaves them.",
            )
        )
    library, loaded = facts["library"]["version"], facts["loaded_version"]
    if library and loaded and library != loaded:
        found.append(
            Reason(
                "version_mismatch",
                f"The loaded kernel module is {loaded}, the library on disk {library}: programs that start now fail "
                "with a driver/library version mismatch, those that run go on. A reboot loads the library's module.",
            )
        )
    if decision.keep and decision.branch != wishes.branch and not wishes.version:
        found.append(
            Reason(
                "kept",
                f"Driver {host.version} is kept, since it will do for these GPUs and CUDA {wishes.cuda_major}, "
                f"although gpu_driver_branch is {wishes.branch}. To replace it, set gpu_driver_version, or "
                "gpu_driver_replace_working: true.",
            )
        )
    newest = newest_kernel(decision.branch, decision.version)
    for kernel in host.needed_kernels:
        number = re.match(r"(\d+)\.(\d+)", kernel["release"])
        if newest and number and (int(number[1]), int(number[2])) > newest and not kernel["nvidia"]:
            found.append(
                Reason(
                    "kernel_unproven",
                    f"Branch {decision.branch} is known to build for kernels up to {newest[0]}.{newest[1]}; "
                    f"{kernel['release']} is later. The build is tried before a working driver goes.",
                )
            )
    for gpu in facts["gpus"]:
        chip = chip_of(gpu["pci_device"])
        if chip is None or chip.generation == NEWEST:
            found.append(
                Reason(
                    "gpu_unknown",
                    f"GPU {gpu['pci_bus_id']} ({gpu['pci_device']}) is not in the support matrix; it is taken for one "
                    "that needs the open modules and a recent branch. Whether it works shows after the install.",
                )
            )
    bare = [kernel for kernel in host.kernels if kernel["headers"] == "missing" and not kernel["nvidia"]]
    others = [kernel["release"] for kernel in bare if kernel not in host.needed_kernels]
    if others and decision.builds:
        found.append(
            Reason(
                "kernels_without_module",
                f"Kernels {listed(others)} can be booted by hand and will have no NVIDIA module: no source has their "
                "headers.",
            )
        )
    return found


def _rows(  # noqa: PLR0917  (each is a kind of row)
    decision: _Decision,
    transaction: Mapping[str, Any] | None,
    files: Mapping[str, str | None],
    changed_files: Sequence[str],
    free: Sequence[str],
    open_ends: Sequence[str],
) -> list[Change]:
    """One row for everything that will be other than it is."""
    host, wishes, chosen = decision.host, decision.wishes, decision.chosen
    rows = []
    if decision.replace:
        then = decision.version or wishes.version or f"the newest {wishes.branch} that it has"
        modules = "open" if decision.open_modules else "proprietary"
        rows.append(Change("driver", listed(host.versions), f"{then}, {modules} modules, from {wishes.source}"))
        rows += [Change(unit, "serves", "stopped") for unit in host.facts["serving"]]
    rows += [Change(f"package {name}", "-", "installed") for name in headers(host) if decision.rebuild]
    if transaction:
        rows += [Change(f"package {one['name']}", one["from"] or "-", one["to"]) for one in transaction["install"]]
        rows += [Change(f"package {one['name']}", one["from"] or "?", "removed") for one in transaction["remove"]]
    elif chosen:
        for name, wanted in sorted(chosen.packages.items()):
            rows.append(Change(f"package {name}", host.packages.get(name, {}).get("version", "-"), wanted))
    for path in changed_files:
        now = "-" if host.file(path) is None else "other"
        rows.append(Change(path, now, "removed" if files[path] is None else "written"))
    if free:
        rows.append(Change(f"{len(free)} packages", "free", "held, and kept out of unattended upgrades"))
    if not decision.replace:
        rows += [Change("on disk", sentence, "mended") for sentence in open_ends]
    return rows


_WIDEST = 64  # of a column, in characters


def _table(rows: Sequence[Change], refusals: Sequence[Reason], reboot: Mapping[str, Any]) -> list[str]:
    """The table as lines."""
    cells = [("what", "now", "then"), *((row.what, row.now, row.then) for row in rows)]
    widths = [min(max(len(cell[column]) for cell in cells), _WIDEST) for column in (0, 1)]
    lines = [f"{what:<{widths[0]}}  {now:<{widths[1]}}  {then}" for what, now, then in cells]
    if not rows:
        lines = ["The driver is as wanted; nothing will change."]
    if reboot["needed"]:
        lines.append(f"A reboot is needed: {reboot['why']}.")
    return lines + [f"Refused: {reason.message}" for reason in refusals]
