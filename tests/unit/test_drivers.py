"""What becomes of a host's driver, decided from facts alone."""

from typing import Any

import pytest

from vllm_fleet.driver_host import PREFERENCES
from vllm_fleet.driver_layouts import kernel_kind
from vllm_fleet.drivers import FABRIC_GATE, KERNEL_HOOK, MODPROBE, UNATTENDED, driver_plan
from vllm_fleet.errors import BadInputError
from vllm_fleet.target.gpu_generations import NEWEST, chip_of

RTX_PRO_6000, H100, L40S, A100, V100, B200, GTX_1080 = (
    f"10de:{device}" for device in ("2bb5", "2330", "26b9", "20b2", "1db4", "2901", "1b80")
)
TEXTS = {"modprobe_text": "blacklist nouveau\n", "kernel_hook_text": "#!/bin/sh\n"}


def module(version: str = "580.126.09", *, is_open: bool = True, signer: str | None = None) -> dict[str, Any]:
    licence = "Dual MIT/GPL" if is_open else "NVIDIA"
    return {"version": version, "licence": licence, "open": is_open, "signer": signer, "path": "/x", "vermagic": "x"}


def kernel(release: str = "6.1.0-28-amd64", **known: Any) -> dict[str, Any]:
    return {
        "release": release,
        "running": True,
        "bootable": True,
        "next_boot": True,
        "image_package": f"linux-image-{release}",
        "headers": "available",
        "headers_package": f"linux-headers-{release}",
        "nvidia": None,
        "dkms": [],
        "nouveau_in_initramfs": False,
        **known,
    }


def kernels(*listed: dict[str, Any], **known: Any) -> dict[str, Any]:
    nothing = {"nouveau": False, "nova_core": False, "nova_drm": False}
    return {
        "kernels": list(listed) or [kernel()],
        "secure_boot": "disabled",
        "mok": {"enrolled": None, "pending": None, "certificate": None},
        "loaded": {"nvidia": None, **nothing},
        "blocked": dict.fromkeys(nothing, False),
        "problems": [],
        **known,
    }


def package(name: str, version: str = "580.126.09-1", *, held: bool = False) -> dict[str, Any]:
    return {"name": name, "version": version, "architecture": "amd64", "held": held, "origin": None}


def host(*devices: str, **known: Any) -> dict[str, Any]:
    """A bare Debian 12 with one RTX PRO 6000, or with these GPUs."""
    found = devices or (RTX_PRO_6000,)
    return {
        "schema": 1,
        "distribution": {"id": "debian", "version": "12", "codename": "bookworm", "architecture": "amd64"},
        "gpus": [{"pci_bus_id": f"0000:{n + 1:02x}:00.0", "pci_device": one} for n, one in enumerate(found)],
        "nvswitch": False,
        "packages": [],
        "kernel_packages": [
            {"name": name, "held": False} for name in ("linux-image-6.1.0-28-amd64", "linux-image-amd64")
        ],
        "tools": [],
        "broken": [],
        "kernels": kernels(),
        "loaded_version": None,
        "library": {"version": None, "packaged": None},
        "lock_holders": [],
        "timers": [],
        "serving": [],
        "repositories": [],
        "snapshot": None,
        "boot_id": None,
        "files": {},
        **known,
    }


def working(version: str = "580.126.09", *devices: str, **known: Any) -> dict[str, Any]:
    """A host whose driver came from NVIDIA's repository and works, not set up by this role."""
    names = ("nvidia-driver-cuda", "libcuda1", "nvidia-kernel-open-dkms")
    return host(
        *devices,
        **{
            "packages": [package(name, f"{version}-1") for name in names],
            "tools": ["dkms"],
            "kernels": kernels(kernel(headers="installed", nvidia=module(version))),
            "loaded_version": version,
            "library": {"version": version, "packaged": True},
            **known,
        },
    )


def settled(facts: dict[str, Any]) -> dict[str, Any]:
    """The same host after the role did what it had planned, its packages aside."""
    plan = driver_plan(facts, {**TEXTS, "driver_works": True})
    return {
        **facts,
        "files": {path: text for path, text in plan["files"].items() if text is not None},
        "packages": [{**one, "held": one["name"] in plan["hold"]} for one in facts["packages"]],
        "kernels": {**facts["kernels"], "blocked": dict.fromkeys(("nouveau", "nova_core", "nova_drm"), True)},
    }


def offer(*versions: str, names: tuple[str, ...] = ()) -> list[dict[str, str]]:
    every = names or (
        "nvidia-driver-cuda",
        "libcuda1",
        "nvidia-kernel-open-dkms",
        "nvidia-kernel-dkms",
        "nvidia-persistenced",
    )
    return [{"name": name, "version": version, "repository": "http://r"} for version in versions for name in every]


def plan(facts: dict[str, Any], **options: Any) -> dict[str, Any]:
    return driver_plan(facts, {**TEXTS, **options})


def codes(facts: dict[str, Any], **options: Any) -> list[str]:
    return [reason["code"] for reason in plan(facts, **options)["refusals"]]


# --- the matrix -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "generation"),
    [
        (RTX_PRO_6000, "Blackwell"),
        (B200, "Blackwell"),
        ("10de:31c2", "Blackwell"),
        (H100, "Hopper"),
        (L40S, "Ada"),
        (A100, "Ampere"),
        ("10de:1eb8", "Turing"),
        ("10de:2182", "Turing"),
        (V100, "Volta"),
        ("10de:1d01", "Pascal"),
        ("10de:3340", NEWEST),
        ("8086:56c0", None),
        ("10de:????", None),
    ],
)
def test_a_generation_is_a_range_of_ids(device: str, generation: str | None) -> None:
    chip = chip_of(device)
    assert (chip.generation if chip else None) == generation


@pytest.mark.parametrize(
    ("device", "branch", "cuda_major", "code"),
    [
        (RTX_PRO_6000, 550, 12, "branch_too_old_for_gpu"),
        (RTX_PRO_6000, 570, 12, None),
        ("10de:31c2", 570, 12, "branch_too_old_for_gpu"),  # B300 came with CUDA 12.9
        (H100, 550, 12, None),
        (H100, 550, 13, "branch_too_old_for_cuda"),
        (H100, 515, 11, "branch_too_old_for_gpu"),
        (V100, 580, 13, None),
        (V100, 590, 13, "branch_too_new_for_gpu"),
        (H100, 590, 13, None),
    ],
)
def test_the_branch_must_suit_gpu_and_cuda(device: str, branch: int, cuda_major: int, code: str | None) -> None:
    assert codes(host(device), branch=branch, cuda_major=cuda_major) == ([code] if code else [])


@pytest.mark.parametrize(
    ("devices", "modules", "outcome"),
    [
        ((RTX_PRO_6000,), "auto", "open"),
        ((RTX_PRO_6000,), "proprietary", "proprietary_refused"),
        ((H100,), "auto", "open"),
        ((H100,), "proprietary", "proprietary"),
        ((V100,), "auto", "proprietary"),
        ((V100,), "open", "open_impossible"),
        ((V100, RTX_PRO_6000), "auto", "gpus_exclude_each_other"),
        ((V100, H100), "auto", "proprietary"),
    ],
)
def test_the_kernel_modules_must_suit_every_gpu(devices: tuple[str, ...], modules: str, outcome: str) -> None:
    made = plan(host(*devices), modules=modules)
    refused = [reason["code"] for reason in made["refusals"]]
    assert (refused or [made["target"]["modules"]]) == [outcome]


def test_an_unknown_gpu_is_taken_for_a_newer_one_and_said_so() -> None:
    made = plan(host("10de:3340"))
    assert made["state"] == "change"
    assert made["target"]["modules"] == "open"
    assert [reason["code"] for reason in made["warnings"]] == ["gpu_unknown"]


@pytest.mark.parametrize(
    ("system", "version", "architecture", "source", "code"),
    [
        ("debian", "13", "amd64", "nvidia", None),
        ("ubuntu", "24.04", "arm64", "nvidia", None),
        ("debian", "12", "arm64", "nvidia", "no_repository"),
        ("debian", "12", "arm64", "distribution", None),
        ("debian", "11", "amd64", "nvidia", "distribution_unsupported"),
        ("fedora", "43", "amd64", "distribution", "distribution_unsupported"),
    ],
)
def test_distributions(system: str, version: str, architecture: str, source: str, code: str | None) -> None:
    release = {"id": system, "version": version, "codename": "x", "architecture": architecture}
    assert codes(host(distribution=release), source=source) == ([code] if code else [])


def test_the_keyring_is_that_of_the_distribution_and_proven_by_its_checksum() -> None:
    release = {"id": "ubuntu", "version": "24.04", "codename": "noble", "architecture": "arm64"}
    source = plan(host(distribution=release))["source"]
    assert source["keyring_url"].endswith("/ubuntu2404/sbsa/cuda-keyring_1.1-1_all.deb")
    assert len(source["keyring_checksum"]) == 64
    assert codes(host(), keyring_url="http://mirror/keyring.deb") == ["no_checksum"]


# --- what stays, what goes ------------------------------------------------------------------------------------------


def test_a_bare_host_is_asked_about_before_it_is_changed() -> None:
    made = plan(host())
    assert made["ask_source"]
    assert made["target"]["version"] is None
    assert any("the newest 580 that it has, open modules, from nvidia" in line for line in made["lines"])
    answered = plan(host(candidates=offer("580.95.05-1", "580.126.09-1", "590.48.01-1")))
    assert not answered["ask_source"]
    assert answered["target"]["version"] == "580.126.09"
    assert answered["install"] == [
        "nvidia-driver-cuda=580.126.09-1",
        "nvidia-kernel-open-dkms=580.126.09-1",
        "nvidia-persistenced=580.126.09-1",
    ]


def test_headers_of_the_running_kernel_and_of_later_ones_come_first() -> None:
    assert plan(host())["tools"] == ["dkms", "linux-headers-6.1.0-28-amd64", "linux-headers-amd64"]
    assert plan(host())["files"][KERNEL_HOOK] == TEXTS["kernel_hook_text"]
    hwe = [{"name": "linux-image-generic-hwe-24.04", "held": False}]
    facts = host(kernels=kernels(kernel("6.14.0-33-generic", headers="installed")), kernel_packages=hwe)
    assert plan(facts)["tools"] == ["dkms", "linux-headers-generic-hwe-24.04"]


@pytest.mark.parametrize("flag", ["running", "next_boot"])
def test_a_kernel_without_headers_stops_everything_and_is_named(flag: str) -> None:
    other = {"running": False, "next_boot": False, flag: True}
    facts = host(kernels=kernels(kernel(), kernel("6.1.0-31-amd64", headers="missing", **other)))
    made = plan(facts)
    assert [reason["code"] for reason in made["refusals"]] == ["headers_missing"]
    assert "linux-headers-6.1.0-31-amd64" in made["refusals"][0]["message"]


def test_an_old_kernel_without_headers_is_only_worth_a_warning() -> None:
    facts = host(kernels=kernels(kernel(), kernel("5.10.0-8-amd64", headers="missing", running=False, next_boot=False)))
    made = plan(facts)
    assert made["refusals"] == []
    assert "kernels_without_module" in [reason["code"] for reason in made["warnings"]]


def test_a_branch_that_the_source_lacks_is_refused_with_those_it_has() -> None:
    made = plan(host(candidates=offer("550.163.01-2", "570.211.01-1")))
    assert [reason["code"] for reason in made["refusals"]] == ["not_offered"]
    assert "its branches are 550, 570" in made["refusals"][0]["message"]


def test_a_version_of_which_a_part_is_missing_is_passed_over_or_refused() -> None:
    whole = offer("580.95.05-1")
    half = offer("580.126.09-1", names=("nvidia-driver-cuda",))
    assert plan(host(candidates=whole + half))["target"]["version"] == "580.95.05"
    assert codes(host(candidates=whole + half), version="580.126.09") == ["source_incomplete"]


def test_a_driver_that_works_and_will_do_stays() -> None:
    kept = plan(working("595.58.03"), driver_works=True)
    assert not kept["packages_change"]
    assert kept["target"]["version"] == "595.58.03"
    assert [reason["code"] for reason in kept["warnings"]] == ["kept"]
    assert plan(working("595.58.03"), replace_working=True)["packages_change"]
    assert plan(working("595.58.03"), version="580.126.09")["packages_change"]
    assert plan(working("570.211.01"))["packages_change"]  # not for CUDA 13
    assert not plan(working("570.211.01"), cuda_major=12)["packages_change"]


def test_a_proprietary_module_stays_only_where_both_would_do() -> None:
    proprietary = kernels(kernel(headers="installed", nvidia=module(is_open=False)))
    assert plan(working("580.126.09", RTX_PRO_6000, kernels=proprietary))["packages_change"]
    assert plan(working("580.126.09", H100, kernels=proprietary), modules="open")["packages_change"]
    # The disk must show what is asked for: a kept driver is not called wrong for its licence.
    assert plan(working("580.126.09", V100, kernels=proprietary))["unproven"] == plan(working())["unproven"]


def test_a_settled_host_needs_nothing() -> None:
    made = plan(settled(working()), driver_works=True)
    assert made["state"] == "satisfied"
    assert made["changes"] == []
    assert made["lines"] == ["The driver is as wanted; nothing will change."]


@pytest.mark.parametrize("path", [MODPROBE, UNATTENDED, PREFERENCES, KERNEL_HOOK])
def test_every_guard_is_missed_when_it_is_gone(path: str) -> None:
    facts = settled(working())
    made = plan({**facts, "files": {**facts["files"], path: None}}, driver_works=True)
    assert made["state"] == "change"
    assert made["changed_files"] == [path]
    assert not made["packages_change"]


def test_libraries_that_moved_alone_are_told_and_mended() -> None:
    half = [package("libcuda1", "580.159.04-1"), package("nvidia-kernel-open-dkms", "580.126.09-1")]
    facts = working(packages=half, library={"version": "580.159.04", "packaged": True})
    made = plan(facts)
    assert {"half_upgraded", "version_mismatch"} <= {reason["code"] for reason in made["warnings"]}
    assert made["packages_change"]


def test_a_loaded_module_older_than_its_library_needs_a_reboot() -> None:
    facts = settled(working())
    made = plan({**facts, "loaded_version": "580.95.05"})
    assert made["state"] == "satisfied"
    assert made["reboot"] == {
        "needed": True,
        "why": "the loaded module is 580.95.05, and the driver on disk 580.126.09",
    }
    assert [reason["code"] for reason in made["warnings"]] == ["version_mismatch"]


@pytest.mark.parametrize("rival", ["nouveau", "nova_core", "nova_drm"])
def test_another_driver_that_holds_the_gpus_needs_a_reboot(rival: str) -> None:
    nothing = {"nvidia": None, "nouveau": False, "nova_core": False, "nova_drm": False}
    made = plan(host(kernels=kernels(loaded={**nothing, rival: True})))
    assert made["reboot"] == {"needed": True, "why": f"{rival} is loaded and holds the GPUs"}


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        (
            {"nvidia": None, "dkms": [{"module": "nvidia", "version": "580.126.09", "state": "added"}]},
            "has no NVIDIA module",
        ),
        ({"nvidia": module("580.95.05")}, "is 580.95.05, not 580.126.09"),
        ({"nvidia": module(is_open=False)}, "has licence NVIDIA, not Dual MIT/GPL"),
        (
            {"nvidia": module(), "dkms": [{"module": "nvidia", "version": "580.126.09", "state": "broken"}]},
            "is broken, not installed",
        ),
        ({"nvidia": module(), "nouveau_in_initramfs": True}, "still holds nouveau"),
    ],
)
def test_an_installation_that_ended_well_is_not_believed(after: dict[str, Any], sentence: str) -> None:
    facts = settled(working())
    facts["kernels"]["kernels"] = [kernel(headers="installed", **after)]
    made = plan(facts, version="580.126.09")
    assert made["state"] != "satisfied"
    assert any(sentence in open_end for open_end in made["unproven"])


def test_the_next_kernel_without_a_module_is_mended_before_anything_reboots() -> None:
    facts = settled(working())
    later = kernel("6.1.0-31-amd64", running=False, headers="available")
    facts["kernels"]["kernels"] = [later, kernel(headers="installed", next_boot=False, nvidia=module())]
    made = plan(facts, driver_works=True)
    assert made["state"] == "change"
    assert not made["packages_change"]
    assert "linux-headers-6.1.0-31-amd64" in made["tools"]
    assert made["dkms_kernels"] == ["6.1.0-31-amd64", "6.1.0-28-amd64"]


def test_a_driver_from_nvidias_installer_is_not_touched() -> None:
    facts = host(library={"version": "580.126.09", "packaged": False}, loaded_version="580.126.09")
    assert codes(facts) == ["driver_not_packaged"]
    assert plan(facts, source="none")["state"] == "left"


def test_a_host_without_gpus_is_left_alone() -> None:
    assert plan({**host(), "gpus": []})["state"] == "left"


# --- apt ------------------------------------------------------------------------------------------------------------


def test_other_branches_and_the_other_flavour_go_in_the_same_transaction() -> None:
    mixed = [
        package("libnvidia-compute-550", "550.163.01-0ubuntu1"),
        package("nvidia-kernel-dkms", "550.163.01-2"),
        package("libcuda1", "550.163.01-2"),
        package("nvidia-persistenced", "550.163.01-1"),
    ]
    made = plan(host(packages=mixed, candidates=offer("580.126.09-1")))
    assert made["install"] == [
        "libcuda1=580.126.09-1",
        "nvidia-driver-cuda=580.126.09-1",
        "nvidia-kernel-open-dkms=580.126.09-1",
        "nvidia-persistenced=580.126.09-1",
        "libnvidia-compute-550-",
        "nvidia-kernel-dkms-",
    ]


def test_ubuntus_signed_modules_come_before_any_build() -> None:
    noble = {"id": "ubuntu", "version": "24.04", "codename": "noble", "architecture": "amd64"}
    facts = host(
        distribution=noble,
        kernels=kernels(kernel("6.8.0-45-generic", headers="missing"), secure_boot="enabled"),
        kernel_packages=[{"name": "linux-image-generic", "held": False}],
    )
    driver = (
        "libnvidia-compute-580-server",
        "nvidia-utils-580-server",
        "nvidia-headless-no-dkms-580-server-open",
        "nvidia-dkms-580-server-open",
    )
    userland = offer("580.126.09-0ubuntu0.24.04.1", names=driver)
    modules = offer(
        "6.8.0-45.45+1",
        names=("linux-modules-nvidia-580-server-open-6.8.0-45-generic", "linux-modules-nvidia-580-server-open-generic"),
    )
    made = plan({**facts, "candidates": userland + modules}, source="distribution")
    assert made["refusals"] == []
    assert made["mok"] is None
    assert made["build"] is None
    assert made["tools"] == []
    assert "linux-modules-nvidia-580-server-open-generic=6.8.0-45.45+1" in made["install"]
    assert not any(argument.startswith("nvidia-dkms") for argument in made["install"])
    # None for this kernel: built here, which secure boot and the headers have a say in.
    built = plan({**facts, "candidates": userland}, source="distribution")
    assert [reason["code"] for reason in built["refusals"]] == ["headers_missing"]
    assert built["mok"] == {"certificate": None, "pending": False}


@pytest.mark.parametrize(("names", "branch"), [("-580", 580), ("", 590)])
def test_nvidias_names_for_ubuntu_with_and_without_the_branch(names: str, branch: int) -> None:
    noble = {"id": "ubuntu", "version": "24.04", "codename": "noble", "architecture": "amd64"}
    own = (f"libnvidia-compute{names}", f"nvidia-dkms{names}-open", f"nvidia-utils{names}")
    made = plan(host(distribution=noble, candidates=offer(f"{branch}.48.01-0ubuntu1", names=own)), branch=branch)
    assert made["install"] == sorted(f"{name}=" + f"{branch}.48.01-0ubuntu1" for name in own)


@pytest.mark.parametrize(
    ("device", "nvswitch", "wish", "expected"),
    [
        (RTX_PRO_6000, False, "auto", []),
        (H100, True, "auto", ["nvidia-fabricmanager-580"]),
        (B200, True, "auto", ["nvidia-fabricmanager-580", "nvlsm"]),
        (B200, False, "yes", ["nvidia-fabricmanager-580", "nvlsm"]),
        (H100, True, "no", []),
    ],
)
def test_the_fabric_manager_comes_only_where_there_is_a_fabric(
    *, device: str, nvswitch: bool, wish: str, expected: list[str]
) -> None:
    more = offer("580.126.09-1", names=("nvidia-fabricmanager-580",)) + offer("2025.10.14-1", names=("nvlsm",))
    made = plan(host(device, nvswitch=nvswitch, candidates=offer("580.126.09-1") + more), fabric_manager=wish)
    assert [one.partition("=")[0] for one in made["install"] if "fabric" in one or "nvlsm" in one] == expected
    assert (made["files"].get(FABRIC_GATE) is not None) == bool(expected)


def test_a_fabric_manager_of_another_version_is_no_choice() -> None:
    facts = host(
        H100,
        nvswitch=True,
        candidates=offer("580.126.09-1") + offer("580.95.05-1", names=("nvidia-fabricmanager-580",)),
    )
    assert codes(facts) == ["source_incomplete"]


def test_preferences_leave_one_version_and_let_helpers_be() -> None:
    text = plan(host(candidates=offer("580.126.09-1", "590.48.01-1")))["files"][PREFERENCES]
    assert "Pin: version 580.126.09-1\nPin-Priority: 1001" in text
    assert "590" not in text
    assert text.index("nvidia-modprobe") < text.index("Pin-Priority: -1")


def test_the_kernels_are_held_only_where_that_is_the_policy() -> None:
    facts = working()
    assert "linux-image-amd64" not in plan(facts)["hold"]
    held = plan(facts, kernel_policy="hold")
    assert "linux-image-amd64" in held["hold"]
    assert KERNEL_HOOK not in held["files"]
    both = plan({**facts, "files": {KERNEL_HOOK: "x"}}, kernel_policy="hold")
    assert both["files"][KERNEL_HOOK] is None


def test_holds_of_others_are_respected_and_our_own_are_not_in_the_way() -> None:
    held = [package("libcuda1", "570.211.01-1", held=True), package("nvidia-kernel-open-dkms", "570.211.01-1")]
    facts = working("570.211.01", packages=held)
    assert codes(facts) == ["held"]
    assert codes(facts, release_holds=True) == []
    assert codes({**facts, "files": {PREFERENCES: "ours"}}) == []


def test_broken_packages_and_running_engines_are_settled_first() -> None:
    assert codes(host(broken=["linux-image-x: half-configured"])) == ["dpkg_broken"]
    serving = working("570.211.01", serving=["vllm-minimax-m2-5-0.service"])
    assert codes(serving) == ["serving"]
    stopped = plan(serving, stop_serving=True)
    assert stopped["stop"] == ["vllm-minimax-m2-5-0.service"]
    # Nothing of the driver changes: the engine may go on.
    assert plan(settled(working(serving=["vllm-minimax-m2-5-0.service"])), driver_works=True)["state"] == "satisfied"


def test_apt_may_take_drivers_away_and_nothing_else() -> None:
    facts = host(candidates=offer("580.126.09-1"))
    gone = [{"name": "libnvidia-compute-550", "from": "550.1-1"}, {"name": "postgresql-17", "from": "17.2-1"}]
    transaction = {"install": [{"name": "libcuda1", "from": None, "to": "580.126.09-1"}], "remove": gone}
    made = plan({**facts, "transaction": transaction})
    assert [reason["code"] for reason in made["refusals"]] == ["foreign_removals"]
    assert "postgresql-17" in made["refusals"][0]["message"]
    fine = plan({**facts, "transaction": {**transaction, "remove": gone[:1]}})
    assert fine["refusals"] == []
    assert "libcuda1" in fine["hold"]
    assert any(line.startswith("package libnvidia-compute-550") and line.endswith("removed") for line in fine["lines"])


# --- secure boot and kernels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("secure_boot", "enrolled", "needs"),
    [
        ("disabled", None, False),
        ("unsupported", None, False),
        ("enabled", False, True),
        ("enabled", None, True),
        ("enabled", True, False),
    ],
)
def test_secure_boot_wants_its_key_before_anything_is_touched(
    *, secure_boot: str, enrolled: bool | None, needs: bool
) -> None:
    mok = {"enrolled": enrolled, "pending": False, "certificate": "/var/lib/dkms/mok.pub"}
    made = plan(host(kernels=kernels(secure_boot=secure_boot, mok=mok)))
    assert (made["mok"] is not None) == needs
    assert ("mokutil" in made["tools"]) == (secure_boot == "enabled")


def test_an_unsigned_module_under_secure_boot_is_not_proven() -> None:
    facts = settled(working())
    facts["kernels"]["secure_boot"] = "enabled"
    facts["kernels"]["mok"]["enrolled"] = True
    assert any("not signed" in sentence for sentence in plan(facts)["unproven"])


def test_a_kernel_later_than_the_matrix_knows_is_told_and_tried() -> None:
    made = plan(host(kernels=kernels(kernel("7.2.0-1-amd64"))))
    assert [reason["code"] for reason in made["warnings"]] == ["kernel_unproven"]
    assert made["refusals"] == []


def test_the_new_module_is_built_beside_a_driver_that_would_go() -> None:
    assert plan(host(candidates=offer("580.126.09-1")))["build"] is None
    facts = working("570.211.01", candidates=offer("580.126.09-1"))
    assert plan(facts, driver_works=True)["build"] == {
        "archive": "nvidia-kernel-open-dkms_580.126.09-1_*.deb",
        "kernels": ["6.1.0-28-amd64"],
    }


@pytest.mark.parametrize(
    ("release", "kind"),
    [
        ("6.1.0-28-amd64", "amd64"),
        ("6.1.0-28-cloud-amd64", "cloud-amd64"),
        ("6.12.48+deb13-amd64", "amd64"),
        ("6.8.0-45-generic", "generic"),
        ("6.14.0-1015-aws", "aws"),
        ("6.8.0-1012-nvidia-64k", "nvidia-64k"),
    ],
)
def test_the_kind_of_a_kernel(release: str, kind: str) -> None:
    assert kernel_kind(release) == kind


# --- input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sauce": "nvidia"}, "Unknown driver option 'sauce'"),
        ({"source": "ppa"}, "gpu_driver_source is 'ppa'; it may be nvidia"),
        ({"version": "latest"}, "gpu_driver_version is 'latest'"),
        ({"version": "580.126.09-1"}, "gpu_driver_version is '580.126.09-1'"),
        ({"branch": "stable"}, "gpu_driver_branch is 'stable'"),
        ({"cuda_major": 14}, "known are 11, 12, 13"),
        ({"source": "mirror"}, "needs gpu_driver_mirror_url"),
    ],
)
def test_nonsense_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message.replace("(", r"\(")):
        plan(host(), **options)
