"""Which driver a GPU and a CUDA need: the support matrix, and what an inventory may wish.

Sources of the matrix:

- First and last branch by generation: "CUDA Toolkit, Driver, and Architecture Matrix",
  https://docs.nvidia.com/datacenter/tesla/drivers/cuda-toolkit-driver-and-architecture-matrix.html; the branch that
  came with a toolkit, and the oldest branch for a CUDA major: tables 2 and 3 of
  https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/index.html
- Open and proprietary modules: https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/kernel-modules.html
  (open from Turing on, from branch 515); Blackwell only open:
  https://developer.nvidia.com/blog/nvidia-transitions-fully-towards-open-source-gpu-kernel-modules/
- Life of the branches:
  https://docs.nvidia.com/datacenter/tesla/drivers/supported-drivers-and-cuda-toolkit-versions.html
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from vllm_fleet.errors import BadInputError
from vllm_fleet.target.driver_probe import upstream_version
from vllm_fleet.target.gpu_generations import NEWEST, Chip, chip_of


@dataclass(frozen=True)
class Reason:
    """A refusal or a warning: a stable code, and a sentence or two with what to do."""

    code: str
    message: str


def listed(items: Iterable[str]) -> str:
    """Items as a sentence has them."""
    return ", ".join(items) or "none"


def branch_of(version: str) -> int:
    """580 of 580.126.09."""
    return int(version.partition(".")[0])


# --- the matrix -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Support:
    """What a GPU generation needs."""

    first_branch: int
    last_branch: int | None  # the last that drives it; None: supported by the newest
    modules: Literal["open", "either", "proprietary"]


# By generation and, where a later chip of it came with a later branch, by compute capability.
_SUPPORT: dict[str, Support] = {
    "Kepler": Support(331, 470, "proprietary"),
    "Maxwell": Support(352, 580, "proprietary"),
    "Pascal": Support(375, 580, "proprietary"),
    "Volta": Support(384, 580, "proprietary"),
    "Turing": Support(410, None, "either"),
    "Ampere": Support(450, None, "either"),
    "Ada": Support(520, None, "either"),
    "Hopper": Support(520, None, "either"),
    "Blackwell": Support(570, None, "open"),
    NEWEST: Support(580, None, "open"),
}
_FIRST_BRANCH_OF_CHIP = {"8.6": 455, "10.3": 575, "12.1": 580}
FIRST_BRANCH_WITH_OPEN_MODULES = 515
FIRST_BRANCH_BY_CUDA = {11: 450, 12: 525, 13: 580}

# The newest kernel that a branch is known to build for. A later one is no refusal: the build is tried first, beside the
# present driver. 535 and 550 are Debian 12's and 13's, for their kernels; 580 builds for 7.1 from 580.159.04 on (its
# release notes, https://www.nvidia.com/en-gb/drivers/details/271293/, and
# https://github.com/void-linux/void-packages/issues/61087).
_NEWEST_KERNEL = {535: (6, 1), 550: (6, 12), 580: (7, 0)}
_NEWEST_KERNEL_FROM = {(580, 159): (7, 1)}

# Distributions that NVIDIA has repositories for, by dpkg's architecture, as the repositories are called
# (https://developer.download.nvidia.com/compute/cuda/repos/). Debian has none for arm64:
# https://github.com/NVIDIA/cuda-repo-management/issues/39
REPOSITORIES = {
    ("debian", "12", "amd64"): "debian12/x86_64",
    ("debian", "13", "amd64"): "debian13/x86_64",
    ("ubuntu", "22.04", "amd64"): "ubuntu2204/x86_64",
    ("ubuntu", "24.04", "amd64"): "ubuntu2404/x86_64",
    ("ubuntu", "22.04", "arm64"): "ubuntu2204/sbsa",
    ("ubuntu", "24.04", "arm64"): "ubuntu2404/sbsa",
}
DISTRIBUTIONS = {("debian", "12"), ("debian", "13"), ("ubuntu", "22.04"), ("ubuntu", "24.04")}
# SHA-256 of cuda-keyring_1.1-1_all.deb in each of them; the same values as in Google's GPU installer
# (https://github.com/GoogleCloudPlatform/compute-gpu-installation) and, for sbsa, several others'.
KEYRINGS = {
    "debian12/x86_64": "e7f219eab6fe4819cdb5c15b98233dc3420302d9c00883219cd3d896857cf48d",
    "debian13/x86_64": "dd28f1f6ba0038180d6b23f846cefca1e3de4c9327751665241370bacea452a1",
    "ubuntu2204/x86_64": "d93190d50b98ad4699ff40f4f7af50f16a76dac3bb8da1eaaf366d47898ff8df",
    "ubuntu2404/x86_64": "d2a6b11c096396d868758b86dab1823b25e14d70333f1dfa74da5ddaf6a06dba",
    "ubuntu2204/sbsa": "36d1aed84dfcf93ee9a0212d149f1c4187db92e03ab96a759ec0689aa438fd9e",
    "ubuntu2404/sbsa": "6ea7d2737648936820e85677177957a0f6521b840d98eb0bbae0a4f003fa7249",
}


# --- what the inventory wants ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Wishes of the inventory, by the names of the role's variables, and what the role knows besides."""

    source: str = "nvidia"
    branch: int = 580
    version: str = ""  # an exact one; empty: the newest of the branch, kept until this changes
    modules: str = "auto"
    cuda_major: int = 13
    replace_working: bool = False
    stop_serving: bool = False
    release_holds: bool = False
    kernel_policy: str = "verify"
    fabric_manager: str = "auto"
    repository_url: str = "https://developer.download.nvidia.com/compute/cuda/repos"
    keyring_url: str = ""
    keyring_checksum: str = ""
    mirror_url: str = ""
    mirror_suite: str = "/"
    mirror_components: tuple[str, ...] = ()
    mirror_key: str = ""
    extra_packages: tuple[str, ...] = ()
    driver_works: bool = False  # what the topology says: nvidia-smi answers and lists every GPU
    modprobe_text: str = ""  # of the file that keeps other modules from the GPUs
    kernel_hook_text: str = ""  # of the script that refuses a kernel without a module

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Check and read wishes.

        Raises:
            BadInputError: One is unknown or nonsense; the message names it and what it may be.
        """
        known = {field.name for field in fields(cls)}
        for key in data:
            if key not in known:
                raise BadInputError(f"Unknown driver option {key!r}. Known: {', '.join(sorted(known))}.")
        given = {key: value for key, value in data.items() if value is not None}
        for key, choices in _CHOICES.items():
            if given.get(key, choices[0]) not in choices:
                raise BadInputError(f"gpu_driver_{key} is {given[key]!r}; it may be {', '.join(choices)}.")
        given |= {key: _whole_number(key, given[key]) for key in ("branch", "cuda_major") if key in given}
        given |= {key: tuple(given.get(key, ())) for key in ("mirror_components", "extra_packages")}
        version = str(given.get("version", ""))
        if version:
            given["branch"] = branch_of(_exact(version))
        if given.get("source") == "mirror" and not (given.get("mirror_url") and given.get("mirror_key")):
            raise BadInputError(
                "gpu_driver_source is mirror, which needs gpu_driver_mirror_url and gpu_driver_mirror_key."
            )
        if given.get("cuda_major", 13) not in FIRST_BRANCH_BY_CUDA:
            known_majors = ", ".join(map(str, FIRST_BRANCH_BY_CUDA))
            raise BadInputError(f"gpu_driver_cuda_major is {given['cuda_major']}; known are {known_majors}.")
        return cls(**given)


def _whole_number(key: str, value: Any) -> int:
    # Ansible hands numbers from the command line over as text.
    if not str(value).isdigit():
        raise BadInputError(f"gpu_driver_{key} is {value!r}; it must be a number such as 580 or 13.")
    return int(value)


def _exact(version: str) -> str:
    if upstream_version(version) != version:
        raise BadInputError(f"gpu_driver_version is {version!r}; it must be a version such as 580.126.09, or empty.")
    return version


_CHOICES = {
    "source": ("nvidia", "distribution", "mirror", "none"),
    "modules": ("auto", "open", "proprietary"),
    "kernel_policy": ("verify", "hold"),
    "fabric_manager": ("auto", "yes", "no"),
}


# --- rules ----------------------------------------------------------------------------------------------------------


def _first_branch(chip: Chip) -> int:
    return _FIRST_BRANCH_OF_CHIP.get(chip.compute_capability, _SUPPORT[chip.generation].first_branch)


def matrix_refusals(gpus: Sequence[Mapping[str, Any]], branch: int, options: Options) -> list[Reason]:
    """Why a branch will not do for these GPUs and this CUDA."""
    refusals = []
    for gpu in gpus:
        chip = chip_of(gpu["pci_device"])
        if chip is None:
            continue
        support, first = _SUPPORT[chip.generation], _first_branch(chip)
        label = f"GPU {gpu['pci_bus_id']} ({gpu['pci_device']}) is of generation {chip.generation}"
        if branch < first:
            refusals.append(
                Reason(
                    "branch_too_old_for_gpu",
                    f"{label}, which branch {first} is the first to drive; branch {branch} does not know it. Set "
                    f"gpu_driver_branch to {max(first, FIRST_BRANCH_BY_CUDA[options.cuda_major])} or later, from a "
                    "source that has it.",
                )
            )
        elif support.last_branch is not None and branch > support.last_branch:
            refusals.append(
                Reason(
                    "branch_too_new_for_gpu",
                    f"{label}; branch {support.last_branch} is the last that drives it. Set gpu_driver_branch to "
                    f"{support.last_branch} or earlier, or take the card out.",
                )
            )
    least = FIRST_BRANCH_BY_CUDA[options.cuda_major]
    if branch < least:
        refusals.append(
            Reason(
                "branch_too_old_for_cuda",
                f"CUDA {options.cuda_major}, which the engine is built for, needs branch {least} or later; "
                f"branch {branch} is older. Set gpu_driver_branch to {least} or later, from a source that has it.",
            )
        )
    return refusals


def flavour(gpus: Sequence[Mapping[str, Any]], branch: int, options: Options) -> tuple[bool, list[Reason]]:
    """Whether the open modules are taken, and what speaks against what was asked."""
    chips = {gpu["pci_bus_id"]: chip_of(gpu["pci_device"]) for gpu in gpus}
    needs: dict[str, list[str]] = {"open": [], "either": [], "proprietary": []}
    for bus_id, chip in chips.items():
        if chip:
            needs[_SUPPORT[chip.generation].modules].append(f"{bus_id} ({chip.generation})")
    if needs["open"] and needs["proprietary"]:
        return True, [
            Reason(
                "gpus_exclude_each_other",
                f"No kernel module drives all GPUs of this host: {listed(needs['open'])} need the open one, "
                f"{listed(needs['proprietary'])} the proprietary one. Take one kind out.",
            )
        ]
    if options.modules == "proprietary" and needs["open"]:
        return True, [
            Reason(
                "proprietary_refused",
                f"gpu_driver_modules is proprietary, and GPU {listed(needs['open'])} works with the open kernel "
                "modules only: the proprietary one would load and find no device. Set gpu_driver_modules to auto.",
            )
        ]
    if options.modules == "open" and needs["proprietary"]:
        return False, [
            Reason(
                "open_impossible",
                f"gpu_driver_modules is open, and GPU {listed(needs['proprietary'])} is older than Turing, which the "
                "open kernel modules do not drive. Set gpu_driver_modules to auto.",
            )
        ]
    wants_open = options.modules != "proprietary" and not needs["proprietary"]
    return wants_open and branch >= FIRST_BRANCH_WITH_OPEN_MODULES, []


def excludes_a_flavour(gpus: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some GPU works with one kind of kernel module only."""
    chips = filter(None, (chip_of(gpu["pci_device"]) for gpu in gpus))
    return any(_SUPPORT[chip.generation].modules != "either" for chip in chips)


def newest_kernel(branch: int, version: str | None) -> tuple[int, int] | None:
    """The newest kernel that a version, or a branch, is known to build for; None where nothing is known."""
    minor = int((version or f"{branch}.0").split(".")[1])
    later = [limit for (own, least), limit in _NEWEST_KERNEL_FROM.items() if own == branch and minor >= least]
    return later[0] if later else _NEWEST_KERNEL.get(branch)
