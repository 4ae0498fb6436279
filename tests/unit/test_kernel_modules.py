"""Kernels and their NVIDIA modules, from files laid out as Debian and Ubuntu do and from what their tools printed.

Recorded in Debian 13 (kmod 34.2, dkms 3.2.2, initramfs-tools 0.148, apt 3.0, GRUB 2.12) unless a test says otherwise.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_fleet.target.kernel_modules import (
    MISSING_PROGRAM,
    parse_dkms_status,
    parse_grub_menu,
    parse_modinfo,
    probe_kernels,
    run_command,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

GRUB = (Path(__file__).parent.parent / "fixtures" / "kernels" / "grub_debian13.cfg").read_text()
STANDARD, CLOUD = "6.12.118+deb13-amd64", "6.12.118+deb13-cloud-amd64"

NOT_EFI = (1, "", "EFI variables are not supported on this system\n")
MODINFO = """\
filename:       /lib/modules/{release}/updates/dkms/{name}.ko.xz
alias:          char-major-195-*
version:        {version}
supported:      external
license:        {licence}
firmware:       nvidia/{version}/gsp_tu10x.bin
softdep:        pre: ecdh_generic,ecdsa_generic
depends:        {depends}
name:           nvidia
retpoline:      Y
vermagic:       {release} SMP preempt mod_unload modversions{space}
{signature}parm:           NvSwitchRegDwords:NvSwitch regkey (charp)
"""
SIGNATURE = """\
sig_id:         PKCS#7
signer:         DKMS module signing key
sig_key:        33:8A:0B:11:6D:0D:4E:D4:5B:7A:0C:59:11:E1:10:0B:08:1C:2E:57
sig_hashalgo:   sha256
signature:      30:64:02:30:0C:56:EB:D7:CE:42:59:0D:6E:15:75:79:49:31:0C:53:
		23:06:8C:39:59:EF:B9:D5:64:CD:9E:A1:52:C0:40:B4:7F:A3:C0:FA:
"""
LISTING = """\
drwxr-xr-x   2 root     root            0 Dec  1 07:44 usr/lib/modules/x/kernel/drivers/gpu/drm/nouveau
-rw-r--r--   1 root     root       955568 Nov 20 17:06 usr/lib/modules/x/kernel/drivers/gpu/drm/nouveau/nouveau.ko.xz
-rw-r--r--   1 root     root          127 Nov  1  2025 etc/modprobe.d/dkms.conf
"""
# What Debian 13's open driver 550.163.01-2 says of the kernel 6.12.118, shortened.
FAILED_BUILD = """\
Tue Dec  1 08:16:23 UTC 2026

Building module(s)
# command: env NV_VERBOSE=1 make -j2 modules KERNEL_UNAME=6.12.118+deb13-amd64
 CONFTEST: dma_fence_set_error
  x86_64-linux-gnu-gcc-14 -Wp,-MMD,nvidia/.nv-pci.o.d -nostdinc -Werror=implicit-int -Wno-error -c -o nvidia/nv-pci.o
/var/lib/dkms/nvidia-current-open/550.163.01/build/nvidia/nv-pci.c: In function 'nv_resize_pcie_bars':
/var/lib/dkms/nvidia-current-open/550.163.01/build/nvidia/nv-pci.c:237:9: error: too few arguments to function
make[4]: *** [scripts/Makefile.build:234: /var/lib/dkms/nvidia-current-open/550.163.01/build/nvidia/nv-pci.o] Error 1
make[4]: *** Waiting for unfinished jobs....
make: *** [Makefile:140: modules] Error 2

# exit code: 2
# elapsed time: 00:12:54
----------------------------------------------------------------
"""
BLOCK = "blacklist nouveau\ninstall nouveau /bin/false\n"


class Host:
    """A host of files under `root`, whose programs print what they were recorded to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.says: dict[tuple[str, ...], tuple[int, str, str]] = {
            ("uname", "-r"): (0, f"{STANDARD}\n", ""),
            ("mokutil", "--sb-state"): NOT_EFI,
        }
        self.dkms = ""

    def run(self, argv: Sequence[str]) -> tuple[int, str, str]:
        if tuple(argv) == ("dkms", "status"):
            return 0, self.dkms, ""
        return self.says.get(tuple(argv), (MISSING_PROGRAM, "", f"{argv[0]}: not found"))

    def write(self, path: str, text: str = "") -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def kernel(self, release: str, *, headers: bool = True) -> None:
        self.write(f"boot/vmlinuz-{release}")
        self.write(f"lib/modules/{release}/modules.dep", "kernel/drivers/net/ethernet/nvidia/forcedeth.ko.xz:\n")
        if headers:
            self.write(f"usr/src/linux-headers-{release}/Makefile")
            (self.root / f"lib/modules/{release}/build").symlink_to(f"/usr/src/linux-headers-{release}")

    def module(  # what there is of `nvidia` for a kernel
        self, release: str, name: str = "nvidia", *, version: str = "550.163.01", licence: str = "Dual MIT/GPL",
        signature: str = SIGNATURE, built_for: str = "",
    ) -> None:  # fmt: skip
        with (self.root / f"lib/modules/{release}/modules.dep").open("a") as listed:
            listed.write(f"updates/dkms/{name}.ko.xz: kernel/drivers/gpu/drm/drm.ko.xz\n")
            listed.write(f"updates/dkms/{name}-uvm.ko.xz: updates/dkms/{name}.ko.xz\n")
        output = MODINFO.format(
            release=release, name=name, version=version, licence=licence, depends="drm", signature=signature, space=" "
        )
        output = output.replace(f"vermagic:       {release}", f"vermagic:       {built_for or release}")
        self.says["modinfo", "-k", release, name] = (0, output, "")

    def probe(self) -> dict[str, Any]:
        return probe_kernels(self.run, str(self.root))

    def kernels(self) -> dict[str, dict[str, Any]]:
        return {kernel["release"]: kernel for kernel in self.probe()["kernels"]}

    def problems(self) -> list[str]:
        return [entry["code"] for entry in self.probe()["problems"]]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path)
    host.kernel(STANDARD)
    return host


# --- kernels --------------------------------------------------------------------------------------------------------


def test_a_bare_host_has_its_kernel_and_no_problem(host: Host) -> None:
    image = f"/boot/vmlinuz-{STANDARD}"
    host.says["dpkg-query", "--search", image] = (0, f"linux-image-{STANDARD}: {image}\n", "")
    assert host.probe() == {
        "kernels": [
            {
                "release": STANDARD,
                "running": True,
                "bootable": True,
                "next_boot": True,
                "image_package": f"linux-image-{STANDARD}",
                "headers": "installed",
                "headers_package": f"linux-headers-{STANDARD}",
                "nvidia": None,
                "dkms": [],
                "nouveau_in_initramfs": None,
            }
        ],
        "secure_boot": "unsupported",
        "mok": {"enrolled": None, "pending": None, "certificate": None},
        "loaded": {"nvidia": None, "nouveau": False, "nova_core": False, "nova_drm": False},
        "blocked": {"nouveau": False, "nova_core": False, "nova_drm": False},
        "problems": [],
    }


def test_kernels_come_newest_first_by_number(host: Host) -> None:
    host.kernel("6.12.90+deb13-amd64")
    host.kernel("6.2.0-1-amd64")
    assert list(host.kernels()) == [STANDARD, "6.12.90+deb13-amd64", "6.2.0-1-amd64"]


def test_a_running_kernel_that_was_removed_is_listed_and_told(host: Host) -> None:
    host.says["uname", "-r"] = (0, "6.12.90+deb13-amd64\n", "")
    gone = host.kernels()["6.12.90+deb13-amd64"]
    assert (gone["running"], gone["bootable"], gone["next_boot"]) == (True, False, False)
    assert host.problems() == ["running_kernel_gone"]


def test_an_image_without_modules_is_no_kernel(host: Host) -> None:
    host.write("boot/vmlinuz-6.1.0-28-amd64")
    host.write("boot/vmlinuz-6.12.118+deb13-amd64.dpkg-tmp")
    assert list(host.kernels()) == [STANDARD]
    assert host.problems() == ["kernel_without_modules"]


def test_headers_are_installed_available_or_missing(host: Host) -> None:
    host.kernel("6.12.116+deb13-amd64", headers=False)
    host.kernel("6.12.99-custom", headers=False)
    policy = (
        "linux-headers-6.12.116+deb13-amd64:\n  Installed: (none)\n  Candidate: 6.12.116-1\n  Version table:\n"
        "     6.12.116-1 500\n        500 http://security.example trixie-security/main amd64 Packages\n"
        "linux-headers-6.12.99-custom:\n  Installed: (none)\n  Candidate: (none)\n  Version table:\n"
    )
    asked = [f"linux-headers-{release}" for release in ("6.12.116+deb13-amd64", "6.12.99-custom")]
    host.says["apt-cache", "policy", *asked] = (0, policy, "")
    assert {release: kernel["headers"] for release, kernel in host.kernels().items()} == {
        STANDARD: "installed",
        "6.12.116+deb13-amd64": "available",
        "6.12.99-custom": "missing",
    }


def test_a_header_tree_that_leads_nowhere_is_not_installed(host: Host) -> None:
    (host.root / f"usr/src/linux-headers-{STANDARD}/Makefile").unlink()
    assert host.kernels()[STANDARD]["headers"] == "missing"


# --- what starts next -----------------------------------------------------------------------------------------------


def next_boot(host: Host) -> list[str]:
    return [release for release, kernel in host.kernels().items() if kernel["next_boot"]]


@pytest.mark.parametrize(
    ("default", "environment", "release"),
    [
        ("0", "", CLOUD),
        ("1>2", "", STANDARD),
        ("1", "", CLOUD),
        ("9", "", CLOUD),
        ("nothing of the kind", "", CLOUD),
        ("gnulinux-advanced-/dev/vda>gnulinux-6.12.118+deb13-amd64-advanced-/dev/vda", "", STANDARD),
        (f"Advanced options for Debian GNU/Linux>Debian GNU/Linux, with Linux {STANDARD}", "", STANDARD),
        ("${saved_entry}", "", CLOUD),
        ("${saved_entry}", "saved_entry=1>2\n", STANDARD),
        ("${saved_entry}", "saved_entry=0\nprev_saved_entry=1>2\n", STANDARD),
        ("0", "next_entry=1>2\n", STANDARD),
        ("0", "saved_entry=1>2\n", CLOUD),
    ],
)
def test_grub_starts_what_its_menu_and_environment_say(
    host: Host, default: str, environment: str, release: str
) -> None:
    host.kernel(CLOUD)
    host.write("boot/grub/grub.cfg", GRUB.replace('set default="0"', f'set default="{default}"'))
    host.write("boot/grub/grubenv", f"# GRUB Environment Block\n{environment}{'#' * 900}")
    assert next_boot(host) == [release]


def test_grub_names_images_from_the_file_system_of_boot(host: Host) -> None:
    host.kernel(CLOUD)
    host.write("boot/grub/grub.cfg", GRUB.replace("/boot/vmlinuz", "/vmlinuz"))
    assert next_boot(host) == [CLOUD]


def test_the_links_count_where_there_is_no_boot_loader(host: Host) -> None:
    host.kernel(CLOUD)
    (host.root / "vmlinuz").symlink_to(f"boot/vmlinuz-{STANDARD}")
    assert next_boot(host) == [STANDARD]
    assert host.problems() == []


@pytest.mark.parametrize("unreadable", ["boot/grub/grub.cfg", "boot/loader/entries/debian.conf", "boot/other"])
def test_every_kernel_may_be_next_where_nothing_says(host: Host, unreadable: str) -> None:
    host.kernel(CLOUD)
    host.write(unreadable)
    assert next_boot(host) == [CLOUD, STANDARD]
    assert host.problems() == ["next_boot_unknown"]


def test_the_only_kernel_is_the_next(host: Host) -> None:
    assert next_boot(host) == [STANDARD]
    assert host.problems() == []


def test_the_recorded_menu_is_read_whole() -> None:
    default, menu = parse_grub_menu(GRUB)
    assert default == "0"
    assert [entry.names for entry in menu] == [
        ("Debian GNU/Linux", "gnulinux-simple-/dev/vda"),
        ("Advanced options for Debian GNU/Linux", "gnulinux-advanced-/dev/vda"),
        ("UEFI Firmware Settings", "uefi-firmware"),
    ]
    assert [entry.image for entry in menu[1].entries] == [
        f"/boot/vmlinuz-{release}" for release in (CLOUD, CLOUD, STANDARD, STANDARD)
    ]


# --- the module -----------------------------------------------------------------------------------------------------


def test_nvidias_module_is_read(host: Host) -> None:
    host.module(STANDARD, version="580.159.04")
    assert host.kernels()[STANDARD]["nvidia"] == {
        "version": "580.159.04",
        "licence": "Dual MIT/GPL",
        "signer": "DKMS module signing key",
        "path": f"/lib/modules/{STANDARD}/updates/dkms/nvidia.ko.xz",
        "vermagic": f"{STANDARD} SMP preempt mod_unload modversions",
        "open": True,
    }
    assert host.problems() == []


def test_an_unsigned_proprietary_module_is_read(host: Host) -> None:
    host.module(STANDARD, "nvidia-current", licence="NVIDIA", signature="")
    module = host.kernels()[STANDARD]["nvidia"]
    assert (module["open"], module["signer"], module["licence"]) == (False, None, "NVIDIA")


@pytest.mark.parametrize(("target", "licence"), [("nvidia-current-open", "Dual MIT/GPL"), ("nvidia-current", "NVIDIA")])
def test_debians_settings_choose_among_its_modules(host: Host, target: str, licence: str) -> None:
    host.module(STANDARD, "nvidia-current", licence="NVIDIA")
    host.module(STANDARD, "nvidia-current-open")
    # As nvidia-open-kernel-support 550.163.01 has it, which update-alternatives links there.
    host.write("etc/nvidia/nvidia-modprobe.conf", f"install nvidia modprobe -i {target} $CMDLINE_OPTS\n")
    (host.root / "etc/modprobe.d").mkdir()
    (host.root / "etc/modprobe.d/nvidia.conf").symlink_to("/etc/nvidia/nvidia-modprobe.conf")
    assert host.kernels()[STANDARD]["nvidia"]["licence"] == licence


def test_a_module_built_for_another_kernel_is_told(host: Host) -> None:
    host.module(STANDARD, built_for="6.12.90+deb13-amd64")
    assert host.problems() == ["module_of_other_kernel"]


def test_a_module_that_modinfo_cannot_read_is_told_and_counts_as_none(host: Host) -> None:
    host.module(STANDARD)
    host.says["modinfo", "-k", STANDARD, "nvidia"] = (1, "", "modinfo: ERROR: could not get modinfo from 'nvidia'")
    assert host.kernels()[STANDARD]["nvidia"] is None
    assert host.problems() == ["module_unreadable"]


def test_a_next_kernel_without_module_is_told_where_another_has_one(host: Host) -> None:
    host.kernel(CLOUD)
    host.module(STANDARD)
    host.write("boot/grub/grub.cfg", GRUB)
    assert host.problems() == ["next_boot_without_module"]


def test_a_loaded_module_other_than_the_one_on_disk_is_told(host: Host) -> None:
    host.module(STANDARD, version="580.159.04")
    host.write("sys/module/nvidia/version", "550.163.01\n")
    assert host.problems() == ["loaded_module_differs"]


def test_modinfo_keeps_the_first_of_several_fields() -> None:
    fields = parse_modinfo("filename: (builtin)\nalias: a\nalias: b\n\t\t*NOTE* Ignored: yes\nsigner:\t\n")
    assert fields == {"filename": "(builtin)", "alias": "a", "signer": ""}


# --- dkms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "parsed"),
    [
        # dkms 2.8, 3.0, 3.2 (its source: do_status)
        ("nvidia, 470.256.02: added", ("nvidia", "470.256.02", None, "added", "")),
        (
            "nvidia, 550.163.01, 6.1.0-28-amd64, x86_64: installed",
            ("nvidia", "550.163.01", "6.1.0-28-amd64", "installed", ""),
        ),
        ("nvidia/580.159.04: added", ("nvidia", "580.159.04", None, "added", "")),
        ("nvidia-current-open/550.163.01: broken", ("nvidia-current-open", "550.163.01", None, "broken", "")),
        (
            f"nvidia-current-open/550.163.01, {STANDARD}, x86_64: built",
            ("nvidia-current-open", "550.163.01", STANDARD, "built", ""),
        ),
        (
            "nvidia/550.163.01, 6.12.9, x86_64: installed (WARNING! Diff between built and installed module!)",
            ("nvidia", "550.163.01", "6.12.9", "installed", "WARNING! Diff between built and installed module!"),
        ),
        (
            "nvidia/550, 6.12.9, x86_64: installed (Original modules exist) (Built modules are missing in …)",
            ("nvidia", "550", "6.12.9", "installed", "Original modules exist; Built modules are missing in …"),
        ),
        (
            "nvidia/550, 5.14.0-1.el9.x86_64, x86_64: installed-weak from 5.14.0",
            ("nvidia", "550", "5.14.0-1.el9.x86_64", "installed-weak", "from 5.14.0"),
        ),
    ],
)  # fmt: skip
def test_dkms_status_old_and_new(line: str, parsed: tuple[str, ...]) -> None:
    assert parse_dkms_status(f"{line}\n") == [parsed]


def test_what_dkms_says_besides_is_no_module() -> None:
    assert parse_dkms_status("Error! nvidia/550: Missing the module source directory or the link.\n\n") == []


def states(host: Host) -> dict[str, list[tuple[str, str]]]:
    return {
        release: [(entry["version"], entry["state"]) for entry in kernel["dkms"]]
        for release, kernel in host.kernels().items()
    }


def test_dkms_by_kernel(host: Host) -> None:
    host.kernel(CLOUD)
    host.dkms = (
        f"nvidia/550.163.01, {STANDARD}, x86_64: installed\n"
        f"nvidia/580.159.04, {STANDARD}, x86_64: built\n"
        f"nvidia/580.159.04, {CLOUD}, x86_64: installed\n"
        "nvidia-fs/2.24: added\nzfs/2.3.2: added\n"
    )
    assert states(host) == {
        CLOUD: [("550.163.01", "added"), ("580.159.04", "installed")],
        STANDARD: [("550.163.01", "installed"), ("580.159.04", "built")],
    }


@pytest.mark.parametrize(
    "remark",
    ["WARNING! Diff between built and installed module!", "WARNING! Missing some built modules!",
     "Differences between built and installed modules", "Built modules are missing in the kernel modules folder"],
)  # fmt: skip
def test_an_installed_module_that_is_not_the_built_one_is_broken(host: Host, remark: str) -> None:
    host.dkms = f"nvidia/550.163.01, {STANDARD}, x86_64: installed ({remark})\n"
    host.module(STANDARD)
    assert states(host) == {STANDARD: [("550.163.01", "broken")]}
    assert host.problems() == ["dkms_broken"]


@pytest.mark.parametrize(
    "head",
    [f"DKMS (dkms-3.2.2) make.log for nvidia/580.159.04 for kernel {CLOUD} (x86_64)",
     f"DKMS make.log for nvidia-580.159.04 for kernel {CLOUD} (x86_64)"],
)  # fmt: skip
def test_a_failed_build_is_broken_with_its_error_and_leaves_the_others(host: Host, head: str) -> None:
    host.kernel(CLOUD)
    host.write("boot/grub/grub.cfg", GRUB)
    host.module(STANDARD)
    host.module(CLOUD)
    host.dkms = (
        f"nvidia/550.163.01, {CLOUD}, x86_64: installed\nnvidia/550.163.01, {STANDARD}, x86_64: installed\n"
        "nvidia/580.159.04: added\n"
    )
    host.write("var/lib/dkms/nvidia/580.159.04/build/make.log", f"{head}\n{FAILED_BUILD}")
    assert states(host) == {
        CLOUD: [("550.163.01", "installed"), ("580.159.04", "broken")],
        STANDARD: [("550.163.01", "installed"), ("580.159.04", "added")],
    }
    (problem,) = host.probe()["problems"]
    assert problem["code"] == "dkms_broken"
    assert "nv-pci.c:237:9: error: too few arguments to function" in problem["message"]


def test_a_module_whose_source_is_gone_is_broken(host: Host) -> None:
    host.dkms = "nvidia/550.163.01: broken\n"
    assert states(host) == {STANDARD: [("550.163.01", "broken")]}


# --- what is in the way ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        BLOCK,
        "blacklist nouveau\ninstall nouveau /usr/bin/true\n",
        "blacklist nouveau\ninstall \\\nnouveau /bin/false\n",
    ],
)
def test_blocked_takes_a_blacklist_and_an_install_line(host: Host, text: str) -> None:
    host.write("etc/modprobe.d/vllm-fleet.conf", text)
    assert host.probe()["blocked"] == {"nouveau": True, "nova_core": False, "nova_drm": False}


@pytest.mark.parametrize(
    "text",
    [
        "blacklist nouveau\n",
        "install nouveau /bin/false\n",
        "blacklist nouveau\ninstall nouveau modprobe -i nouveau\n",
        "#blacklist nouveau\ninstall nouveau /bin/false\n",
        "options nouveau modeset=0\n",
    ],
)
def test_less_does_not_block(host: Host, text: str) -> None:
    host.write("etc/modprobe.d/vllm-fleet.conf", text)
    assert host.probe()["blocked"]["nouveau"] is False


def test_blocked_may_come_from_two_files_and_with_dashes(host: Host) -> None:
    host.write("usr/lib/modprobe.d/a.conf", "blacklist nova-core\nblacklist nova_drm\nblacklist nova\n")
    host.write("etc/modprobe.d/b.conf", "install nova_core /bin/false\ninstall nova-drm /bin/false\n")
    assert host.probe()["blocked"] == {"nouveau": False, "nova_core": True, "nova_drm": False}
    host.write("etc/modprobe.d/c.conf", "install nova /bin/false\n")
    assert host.probe()["blocked"]["nova_drm"] is True


def test_a_file_in_etc_masks_its_namesake(host: Host) -> None:
    host.write("usr/lib/modprobe.d/nouveau.conf", BLOCK)
    host.write("etc/modprobe.d/nouveau.conf", "")
    host.write("etc/modprobe.d/nouveau.conf.bak", BLOCK)
    assert host.probe()["blocked"]["nouveau"] is False


def test_loaded_modules(host: Host) -> None:
    host.write("proc/modules", "nouveau 3149824 1 - Live 0x0\ndrm 1 1 nouveau, Live 0x0\nnova 16384 0 - Live 0x0\n")
    host.write(
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs-builder)\n",
    )
    assert host.probe()["loaded"] == {"nvidia": "580.159.04", "nouveau": True, "nova_core": False, "nova_drm": True}


def initramfs(host: Host, listing: str) -> None:
    host.write(f"boot/initrd.img-{STANDARD}")
    host.says["lsinitramfs", "-l", f"/boot/initrd.img-{STANDARD}"] = (0, listing, "")


def test_nouveau_starts_from_an_initramfs_that_has_it(host: Host) -> None:
    initramfs(host, LISTING)
    assert host.kernels()[STANDARD]["nouveau_in_initramfs"] is True


def test_nouveau_starts_from_no_initramfs_without_it(host: Host) -> None:
    initramfs(host, LISTING.replace("/nouveau.ko.xz", "/nouveau.txt"))
    assert host.kernels()[STANDARD]["nouveau_in_initramfs"] is False


def test_nouveau_is_kept_out_by_the_settings_that_came_along(host: Host) -> None:
    settings = host.write("etc/modprobe.d/zz.conf", BLOCK)
    copy = "-rw-r--r--   1 root     root           {0:2} Dec  1 07:44 etc/modprobe.d/zz.conf\n"
    initramfs(host, LISTING + copy.format(len(BLOCK)))
    assert host.kernels()[STANDARD]["nouveau_in_initramfs"] is False
    initramfs(host, LISTING + copy.format(12))  # an older version of the file
    assert host.kernels()[STANDARD]["nouveau_in_initramfs"] is True
    initramfs(host, LISTING + copy.format(len(BLOCK)))
    os.utime(settings, (4e9, 4e9))  # written after the image
    assert host.kernels()[STANDARD]["nouveau_in_initramfs"] is True


def test_an_initramfs_made_by_dracut_alone_is_listed_by_its_own_tool(host: Host) -> None:
    host.write(f"boot/initrd.img-{STANDARD}")
    host.says["lsinitrd", f"/boot/initrd.img-{STANDARD}"] = (0, f"Image: /boot/x: 34M\n========\n{LISTING}", "")
    assert host.kernels()[STANDARD]["nouveau_in_initramfs"] is True


def test_an_initramfs_that_cannot_be_listed_is_told(host: Host) -> None:
    host.write(f"boot/initrd.img-{STANDARD}")
    host.says["lsinitramfs", "-l", f"/boot/initrd.img-{STANDARD}"] = (1, "", "cpio: premature end of archive")
    assert host.kernels()[STANDARD]["nouveau_in_initramfs"] is None
    assert host.problems() == ["initramfs_unreadable"]


# --- secure boot ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ((0, "SecureBoot enabled\n", ""), "enabled"),
        ((0, "SecureBoot disabled\n", ""), "disabled"),
        ((0, "SecureBoot disabled\nPlatform is in Setup Mode\n", ""), "disabled"),
        ((0, "SecureBoot enabled\nSecureBoot validation is disabled in shim\n", ""), "disabled"),
        (NOT_EFI, "unsupported"),
        ((1, "", "This system doesn't support Secure Boot\n"), "unsupported"),
    ],
)
def test_secure_boot_by_mokutil(host: Host, said: tuple[int, str, str], state: str) -> None:
    host.says["mokutil", "--sb-state"] = said
    assert host.probe()["secure_boot"] == state


@pytest.mark.parametrize(
    ("variable", "shim", "state"),
    [
        (b"\x06\0\0\0\x01", None, "enabled"),
        (b"\x06\0\0\0\x00", None, "disabled"),
        (b"\x06\0\0\0\x01", b"\x06\0\0\0\x01", "disabled"),
        (b"\x06\0\0\0\x01", b"\x06\0\0\0\x00", "enabled"),
        (None, None, "unknown"),
    ],
)
def test_secure_boot_by_the_variable(host: Host, variable: bytes | None, shim: bytes | None, state: str) -> None:
    del host.says["mokutil", "--sb-state"]
    folder = host.root / "sys/firmware/efi/efivars"
    folder.mkdir(parents=True)
    if variable:
        (folder / "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c").write_bytes(variable)
    if shim:
        (folder / "MokSBStateRT-605dab50-e046-4300-abb6-3dd810dd8b23").write_bytes(shim)
    assert host.probe()["secure_boot"] == state
    assert host.problems() == (["secure_boot_unknown"] if state == "unknown" else [])


def test_a_host_without_efi_has_no_secure_boot(host: Host) -> None:
    del host.says["mokutil", "--sb-state"]
    assert host.probe()["secure_boot"] == "unsupported"


def signed_host(host: Host, said: str, certificate: str = "/var/lib/dkms/mok.pub") -> Host:
    host.says["mokutil", "--sb-state"] = (0, "SecureBoot enabled\n", "")
    host.says["mokutil", "--test-key", certificate] = (1, f"{certificate} {said}\n", "")
    host.write(certificate[1:])
    host.module(STANDARD)
    return host


@pytest.mark.parametrize(
    ("said", "state", "problems"),
    [
        ("is not enrolled", (False, False), ["mok_not_enrolled"]),
        ("is already enrolled", (True, False), []),
        ("is already in the built-in trusted keyring", (True, False), []),
        ("is already in the enrollment request", (False, True), ["mok_not_enrolled"]),
        ("cannot be read", (None, None), []),
    ],
)
def test_the_key_that_dkms_signs_with(
    host: Host, said: str, state: tuple[bool | None, bool | None], problems: list[str]
) -> None:
    probe = signed_host(host, said).probe()
    assert (probe["mok"]["enrolled"], probe["mok"]["pending"]) == state
    assert [entry["code"] for entry in probe["problems"]] == problems


def test_a_configured_key_goes_before_ubuntus_and_that_before_dkms_own(host: Host) -> None:
    host.write("var/lib/dkms/mok.pub")
    assert host.probe()["mok"]["certificate"] == "/var/lib/dkms/mok.pub"
    host.write("var/lib/shim-signed/mok/MOK.der")
    assert host.probe()["mok"]["certificate"] == "/var/lib/shim-signed/mok/MOK.der"
    host.write("etc/dkms/framework.conf", "# mok_certificate=/var/lib/dkms/mok.pub\n")
    host.write("etc/dkms/framework.conf.d/site.conf", 'mok_certificate="/etc/keys/site.der"\n')
    host.write("etc/keys/site.der")
    assert host.probe()["mok"]["certificate"] == "/etc/keys/site.der"


def test_an_unsigned_module_is_told_where_secure_boot_is_on(host: Host) -> None:
    host.module(STANDARD, signature="")
    assert host.problems() == []
    host.says["mokutil", "--sb-state"] = (0, "SecureBoot enabled\n", "")
    assert host.problems() == ["module_unsigned"]


# --- this machine ---------------------------------------------------------------------------------------------------


def test_programs_run_in_the_c_locale_and_never_raise() -> None:
    assert run_command(["sh", "-c", "echo $LC_ALL; echo oops >&2; exit 3"]) == (3, "C\n", "oops\n")
    assert run_command(["no-such-program-here"])[0] == MISSING_PROGRAM


def test_this_machine_is_probed_whatever_it_is() -> None:
    probe = probe_kernels(run_command)
    assert [kernel["release"] for kernel in probe["kernels"] if kernel["running"]] == [os.uname().release]
