"""What is to be set on a host, how, and how it is taken back."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_fleet.target.host_tuning import (
    BadWishError,
    Host,
    Setting,
    decide,
    kernel_arguments,
    read_gpus,
    reboot_needed,
    table,
)

UUIDS = [f"GPU-0000000{index}-aaaa-bbbb-cccc-dddddddddddd" for index in range(2)]
BRIDGES = ["0000:00:01.1", "0000:80:01.1"]
NOTHING: dict[str, Any] = {
    "persistence": False,
    "nvidia_uvm": False,
    "limits": False,
    "transparent_hugepages": "",
    "numa_balancing_off": False,
    "iommu": "",
    "acs_redirect_off": False,
    "power_limits_w": {},
    "graphics_clocks_mhz": {},
}
TOPOLOGY = {"architecture": "x86_64", "pcie": {"iommu": "translated", "acs_redirect": list(BRIDGES)}}


def gpu(uuid: str, persistence: str) -> str:
    return f"""<gpu id="0"><uuid>{uuid}</uuid><persistence_mode>{persistence}</persistence_mode><gpu_power_readings>
<current_power_limit>600.00 W</current_power_limit><min_power_limit>150.00 W</min_power_limit>
<max_power_limit>600.00 W</max_power_limit></gpu_power_readings></gpu>"""


REPORT = f"<nvidia_smi_log>{gpu(UUIDS[0], 'Disabled')}{gpu(UUIDS[1], 'Enabled')}</nvidia_smi_log>"


def config(control: int) -> bytes:
    """Config space of a bridge whose only extended capability is ACS."""
    space = bytearray(0x110)
    space[0x100:0x104] = (0x0001_000D).to_bytes(4, "little")
    space[0x106:0x108] = control.to_bytes(2, "little")
    return bytes(space)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host where everything can be set, as root would."""
    files = {
        "sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never\n",
        "proc/sys/kernel/numa_balancing": "1\n",
        "proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/md0 ro\n",
        "proc/modules": "nvidia_uvm 2031616 0 - Live 0x0\nnvidia 104071168 1 nvidia_uvm, Live 0x0\n",
        "etc/default/grub": "",
        "bin/update-grub": "",
        "bin/setpci": "",
        "bin/nvidia-smi": "",
        "bin/nvidia-modprobe": "",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.chmod(0o755)
    for bridge in BRIDGES:
        folder = tmp_path / "sys/bus/pci/devices" / bridge
        folder.mkdir(parents=True)
        (folder / "config").write_bytes(config(0x001D))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return Host(str(tmp_path / "sys"), str(tmp_path / "proc"), str(tmp_path / "etc"), "nvidia-smi")


def decided(
    host: Host, remembered: dict[str, Any] | None = None, topology: dict[str, Any] = TOPOLOGY, **wishes: Any
) -> tuple[list[Setting], dict[str, Any]]:
    return decide(host, {**NOTHING, **wishes}, topology, REPORT, remembered or {})


def test_nothing_is_touched_that_nobody_asked_for(host: Host) -> None:
    assert decided(host) == ([], {})


def test_kernel_values_are_set_and_restored(host: Host) -> None:
    settings, memory = decided(host, transparent_hugepages="madvise", numa_balancing_off=True)
    pages, balancing = settings
    assert (pages.now, pages.wanted, pages.state) == ("always", "madvise", "changes")
    for setting, value in ((pages, "always"), (balancing, "1")):
        assert setting.start
        assert setting.stop
        path = Path(setting.subject)
        assert os.system(setting.start) == 0  # noqa: S605  (as the unit runs it)
        path_was_set = path.read_text()
        assert path_was_set.strip() == setting.wanted
        assert os.system(setting.stop) == 0  # noqa: S605
        assert path.read_text().strip() == value
    assert set(memory) == {"transparent_hugepages", "numa_balancing"}


def test_the_value_from_before_is_remembered_once_it_is_ours(host: Host) -> None:
    """A second deploy must not take what the first one set for the owner's own value."""
    _, memory = decided(host, transparent_hugepages="madvise")
    Path(host.sysfs, "kernel/mm/transparent_hugepage/enabled").write_text("always [madvise] never\n")
    (again,), kept = decided(host, memory, transparent_hugepages="madvise")
    assert again.state == "as wanted"
    assert again.stop
    assert "echo always" in again.stop
    assert kept == memory
    _, dropped = decided(host, memory)
    assert dropped == {}


def test_what_cannot_be_written_is_skipped_and_says_why(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container; what is right there already is not a complaint."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    pages, balancing, *bridges = decided(
        host, transparent_hugepages="always", numa_balancing_off=True, acs_redirect_off=True
    )[0]
    assert (pages.state, pages.start) == ("as wanted", None)
    assert (balancing.state, balancing.start) == ("skipped", None)
    assert {bridge.state for bridge in bridges} == {"skipped"}
    assert all(setting.why for setting in [balancing, *bridges])


def test_a_kernel_without_the_value_is_skipped(host: Host) -> None:
    Path(host.procfs, "sys/kernel/numa_balancing").unlink()
    (balancing,) = decided(host, numa_balancing_off=True)[0]
    assert (balancing.state, balancing.now) == ("skipped", "absent")


# IOMMU and ACS


def test_the_iommu_waits_for_a_boot(host: Host) -> None:
    """T33: passthrough by a kernel argument, said until it is in force."""
    (first,) = decided(host, iommu="passthrough")[0]
    assert first.state == "changes"
    assert kernel_arguments([first]) == ["iommu=pt"]
    drop_in = Path(host.etc, "default/grub.d/90-vllm-fleet.cfg")
    drop_in.parent.mkdir()
    drop_in.write_text('GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX iommu=pt"\n')
    (waiting,) = decided(host, iommu="passthrough")[0]
    assert waiting.state == "at the next boot"
    assert reboot_needed([waiting])
    Path(host.procfs, "cmdline").write_text("root=/dev/md0 ro iommu=pt\n")
    booted = {**TOPOLOGY, "pcie": {"iommu": "passthrough", "acs_redirect": []}}
    (done,) = decided(host, topology=booted, iommu="passthrough")[0]
    assert done.state == "as wanted"
    assert not reboot_needed([done])
    assert kernel_arguments([done]) == ["iommu=pt"]  # still ours to keep


def test_a_host_that_boots_so_anyway_gets_no_argument(host: Host) -> None:
    booted = {**TOPOLOGY, "pcie": {"iommu": "passthrough", "acs_redirect": []}}
    (setting,) = decided(host, topology=booted, iommu="passthrough")[0]
    assert setting.state == "as wanted"
    assert kernel_arguments([setting]) == []


@pytest.mark.parametrize("missing", ["etc/default/grub", "bin/update-grub"])
def test_without_grub_the_argument_is_named_and_not_set(host: Host, missing: str) -> None:
    (Path(host.etc).parent / missing).unlink()
    (setting,) = decided(host, iommu="off")[0]
    assert setting.state == "skipped"
    assert setting.why
    assert "intel_iommu=off amd_iommu=off" in setting.why
    assert kernel_arguments([setting]) == []


def test_arm_has_its_own_argument(host: Host) -> None:
    arm = {**TOPOLOGY, "architecture": "aarch64"}
    assert kernel_arguments(decided(host, topology=arm, iommu="passthrough")[0]) == ["iommu.passthrough=1"]
    assert decided(host, topology=arm, iommu="off")[0][0].state == "skipped"


def test_acs_is_cleared_on_exactly_the_bridges_that_redirect(host: Host) -> None:
    """T34: the exact bridges; and the word that was there comes back."""
    topology = {**TOPOLOGY, "pcie": {"iommu": "off", "acs_redirect": BRIDGES[:1]}}
    (setting,), memory = decided(host, topology=topology, acs_redirect_off=True)
    assert (setting.subject, setting.now, setting.wanted) == (BRIDGES[0], "001d", "0011")
    assert setting.start
    assert setting.stop
    assert setting.start.endswith(f"-s {BRIDGES[0]} ECAP_ACS+6.w=0:c")
    assert setting.stop.endswith(f"-s {BRIDGES[0]} ECAP_ACS+6.w=001d")
    # After it was cleared the probe does not list the bridge any more, and the next boot would bring it back.
    Path(host.sysfs, "bus/pci/devices", BRIDGES[0], "config").write_bytes(config(0x0011))
    cleared = {**TOPOLOGY, "pcie": {"iommu": "off", "acs_redirect": []}}
    (again,), kept = decided(host, memory, cleared, acs_redirect_off=True)
    assert (again.state, again.start, again.stop) == ("as wanted", setting.start, setting.stop)
    assert kept == memory


def test_unreadable_bridges_are_said(host: Host) -> None:
    topology = {**TOPOLOGY, "pcie": {"iommu": "off", "acs_redirect": None}}
    (setting,) = decided(host, topology=topology, acs_redirect_off=True)[0]
    assert setting.state == "skipped"


# Per GPU


def test_persistence_is_taken_back_only_where_it_was_off(host: Host) -> None:
    off, on = decided(host, persistence=True)[0]
    assert (off.state, on.state) == ("changes", "as wanted")
    assert off.start
    assert off.start.endswith(f"-i {UUIDS[0]} -pm 1")
    assert off.stop
    assert off.stop.endswith(f"-i {UUIDS[0]} -pm 0")
    assert on.stop is None


def test_power_limits_go_by_uuid_and_come_back(host: Host) -> None:
    """T58: a limit as a setting with its price, for cards that lock up under heat."""
    first, second = decided(host, power_limits_w={"all": 500, UUIDS[1]: "450"})[0]
    assert (first.wanted, second.wanted) == ("500 W", "450 W")
    assert second.start
    assert second.start.endswith(f"-i {UUIDS[1]} -pl 450")
    assert second.stop
    assert second.stop.endswith(f"-i {UUIDS[1]} -pl 600")
    assert first.price


def test_clocks_are_locked_and_freed(host: Host) -> None:
    (setting,) = decided(host, graphics_clocks_mhz={UUIDS[0]: [1200, 2400]})[0]
    assert setting.start
    assert setting.start.endswith("-lgc 1200,2400")
    assert setting.stop
    assert setting.stop.endswith("-rgc")


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"power_limits_w": {"all": 700}}, "150 to 600 W"),
        ({"power_limits_w": {"all": "much"}}, "a number of watts"),
        ({"power_limits_w": {"GPU-other": 450}}, "GPU-other"),
        ({"graphics_clocks_mhz": {"all": 2400}}, "the lowest and the highest clock"),
        ({"graphics_clocks_mhz": {"all": [1200, "fast"]}}, "the lowest and the highest clock"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_changes(host: Host, wishes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadWishError, match=said):
        decided(host, **wishes)


def test_a_report_of_an_older_driver_is_read_too() -> None:
    report = (
        "<nvidia_smi_log><gpu id='1'><uuid>GPU-1</uuid><persistence_mode>Enabled</persistence_mode><power_readings>"
        "<power_limit>350.00 W</power_limit><min_power_limit>N/A</min_power_limit></power_readings></gpu>"
        "</nvidia_smi_log>"
    )
    (gpu,) = read_gpus(f"some warning\n{report}\n")
    assert (gpu["power_limit_w"], gpu["min_power_limit_w"], gpu["persistence"]) == (350.0, None, "Enabled")
    assert read_gpus("NVIDIA-SMI has failed") == []


# The rest


def test_uvm_is_loaded_with_its_device_files(host: Host) -> None:
    (setting,) = decided(host, nvidia_uvm=True)[0]
    assert setting.state == "as wanted"
    assert setting.start
    assert setting.start.endswith("nvidia-modprobe -u -c=0")
    assert setting.stop is None


def test_limits_of_shells_are_a_file(host: Host) -> None:
    """T48: what systemd does not read; units carry their own."""
    assert decided(host, limits=True)[0][0].state == "changes"
    path = Path(host.etc, "security/limits.d/90-vllm-fleet.conf")
    path.parent.mkdir(parents=True)
    path.write_text("")
    assert decided(host, limits=True)[0][0].state == "as wanted"


def test_the_table_states_every_price(host: Host) -> None:
    wishes = copy.deepcopy(NOTHING) | {
        "persistence": True,
        "nvidia_uvm": True,
        "limits": True,
        "transparent_hugepages": "madvise",
        "numa_balancing_off": True,
        "iommu": "passthrough",
        "acs_redirect_off": True,
        "power_limits_w": {"all": 450},
        "graphics_clocks_mhz": {"all": [1200, 2400]},
    }
    settings, _ = decide(host, wishes, TOPOLOGY, REPORT, {})
    lines = table(settings)
    assert lines[0].split() == ["setting", "of", "now", "wanted", "state", "price"]
    assert len(lines) == 1 + len(settings) == 14
    assert all(
        setting.price and line.rstrip().endswith(setting.price)
        for setting, line in zip(settings, lines[1:], strict=True)
    )
    documented = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text()
    assert [setting.name for setting in settings if f"`{setting.name}`" not in documented] == []
