"""What nvidia-smi says of GPUs: XML, text, lists, tables and error messages, as recorded and as damaged.

Expected values were read from the recorded outputs by eye; tests/fixtures/nvidia_smi_outputs.json has their sources.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_fleet.target.gpu_topology import format_ranges, normalise_bus_id, parse_ranges, parse_smi

_FIXTURES = Path(__file__).parent.parent / "fixtures"
OUTPUTS: dict[str, dict[str, Any]] = {
    record["name"]: record for record in json.loads((_FIXTURES / "nvidia_smi_outputs.json").read_text(encoding="utf-8"))
}
XML = (_FIXTURES / "captures" / "rtxpro6000-2x" / "nvidia-smi" / "q-x.xml").read_text(encoding="utf-8")
CSV = (
    "index, name, uuid, pci.bus_id, memory.total [MiB], memory.used [MiB]\n"
    "0, NVIDIA L40S, GPU-a, 00000000:01:00.0, 46068 MiB, 12 MiB\n"
    "1, NVIDIA L40S, GPU-b, 0000000F:21:00.0, 46068 MiB, 13 MiB\n"
)


def parse(name: str) -> dict[str, Any]:
    return parse_smi(OUTPUTS[name]["stdout"])


def codes(parsed: dict[str, Any]) -> set[str]:
    return {entry["code"] for entry in parsed["problems"]}


# How many GPUs each output shows, or the code of the problem it is.
EXPECTED: dict[str, int | str] = {
    "csv_h100_mig": 1,
    "L_h100_mig": 1,
    "L_h200_mig": 1,
    "csv_h100": 1,
    "L_h100": 1,
    "L_l40s": 1,
    "csv_4080s": 1,
    "L_4080s": 1,
    "L_windows_2080s": 1,
    "topo_windows_unsupported": "unrecognised_output",
    "q_rtxpro6000_server_gpu0": 1,
    "q_minor_numbers_rtxpro6000_8x": 8,
    "x_a100_mig": 1,
    "x_rtxpro6000_580": 1,
    "x_tesla_t4": 1,
    "err_handle_unknown": "gpu_unreachable",
    "err_handle_unknown_old_spacing": "gpu_unreachable",
    "err_handle_gpu_is_lost": "gpu_unreachable",
    "err_handle_gpu_is_lost_rc15": "gpu_unreachable",
    "err_handle_detect": "gpu_unreachable",
    "csv_index_gap_error_row": "gpu_unreachable",
    "csv_unknown_error_partial": 3,
    "csv_unknown_error_memory": 1,
    "table_gb10": "unrecognised_output",  # the table of a bare nvidia-smi shortens names; it is not read
    "err_driver_comm": "driver_unreachable",
    "err_nvml_mismatch": "driver_mismatch",
    "err_nvml_unknown": "driver_unreachable",
    "err_no_supported": "no_devices",
    "err_gpu_missing_dmesg": "gpu_unreachable",
    "err_topo_i_flag": "unrecognised_output",
    "csv_rtxpro6000_8x": 8,
    "csv_a4000_mig_na": 2,
    # Not outputs of nvidia-smi.
    "sysfs_l4_aws_g6": "unrecognised_output",
    "container_cli_index_minor": "unrecognised_output",
    "lscpu_gh200_memory_nodes": "unrecognised_output",
    "lscpu_power9_nodes": "unrecognised_output",
    "numactl_H_rtxpro6000_8x": "unrecognised_output",
    "lscpu_rtxpro6000_8x": "unrecognised_output",
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_every_recorded_output(name: str) -> None:
    parsed = parse(name)
    expected = EXPECTED[name]
    if isinstance(expected, int):
        assert [gpu["index"] for gpu in parsed["gpus"]] == list(range(expected))
    else:
        assert parsed["gpus"] == []
        assert codes(parsed) == {expected}
    for entry in parsed["problems"]:
        assert entry["severity"] in ("error", "warning")
        assert entry["message"]
        assert entry["remedy"]


def test_a_full_csv_row() -> None:
    (gpu,) = parse("csv_h100_mig")["gpus"]
    assert gpu["name"] == "NVIDIA H100 80GB HBM3"
    assert gpu["pci_bus_id"] == "0000:00:09.0"
    assert gpu["compute_capability"] == "9.0"
    assert (gpu["memory_total_mib"], gpu["memory_used_mib"], gpu["memory_reserved_mib"]) == (81559, 59, 479)
    assert gpu["mig"]["enabled"] is True
    assert gpu["ecc"] is True
    assert gpu["power_limit_w"] == 700
    assert (gpu["pcie"]["max_generation"], gpu["pcie"]["max_width"]) == (5, 16)
    assert parse("csv_h100_mig")["driver_version"] == "590.48.01"


def test_cells_without_a_value_are_null_and_told() -> None:
    parsed = parse("csv_4080s")
    (gpu,) = parsed["gpus"]
    assert gpu["mig"]["enabled"] is None
    assert gpu["ecc"] is None
    (entry,) = parsed["problems"]
    assert entry["code"] == "value_not_supported"
    assert "mig.enabled, ecc" in entry["message"]


def test_the_reference_card_in_the_text_report() -> None:
    (gpu,) = parse("q_rtxpro6000_server_gpu0")["gpus"]
    assert gpu["minor"] == 2  # while its index is 0
    assert gpu["pci_device"] == "10de:2bb5"
    assert (gpu["memory_total_mib"], gpu["memory_reserved_mib"], gpu["bar1_mib"]) == (97887, 636, 131072)
    assert (gpu["pcie"]["generation"], gpu["pcie"]["max_generation"]) == (1, 5)  # idle
    assert gpu["unified_memory"] is False
    assert parse("q_rtxpro6000_server_gpu0")["cuda_version"] == "13.2"


def test_index_is_not_minor_number() -> None:
    assert [gpu["minor"] for gpu in parse("q_minor_numbers_rtxpro6000_8x")["gpus"]] == [2, 3, 0, 1, 6, 7, 4, 5]


def test_a_report_cut_in_the_middle_gives_what_was_whole() -> None:
    parsed = parse("x_a100_mig")
    (gpu,) = parsed["gpus"]
    assert gpu["name"] == "NVIDIA A100-SXM4-40GB"
    assert gpu["mig"]["enabled"] is True
    assert gpu["mig"]["instances"][0]["memory_total_mib"] == 19968
    assert "output_incomplete" in codes(parsed)


def test_values_with_blanks_around_them() -> None:
    (gpu,) = parse("x_rtxpro6000_580")["gpus"]
    assert gpu["pci_bus_id"] == "0000:01:00.0"
    assert gpu["memory_total_mib"] is None


def test_mig_instances_of_the_list() -> None:
    (gpu,) = parse("L_h200_mig")["gpus"]
    assert [instance["index"] for instance in gpu["mig"]["instances"]] == [0, 1, 2, 3, 4]


def test_a_failed_memory_counter_is_not_unified_memory_and_not_zero() -> None:
    header = "index, name, uuid, driver_version, memory.total [MiB], memory.used [MiB], utilization.gpu [%]\n"
    row = "0, NVIDIA GeForce RTX 3090, GPU-x, 580.82.09, [Unknown Error], [Unknown Error], 0\n"
    parsed = parse_smi(header + row)
    (gpu,) = parsed["gpus"]
    assert gpu["memory_total_mib"] is None
    assert gpu["memory_used_mib"] is None
    assert gpu["unified_memory"] is False
    assert codes(parsed) == {"value_failed"}
    (headless,) = parse("csv_unknown_error_memory")["gpus"]
    assert headless["memory_total_mib"] is None
    assert not headless["unified_memory"]


@pytest.mark.parametrize("cell", ["[N/A]", "N/A", "[Not Supported]", "Not Supported"])
def test_memory_that_the_driver_does_not_count_is_shared_with_the_cpu(cell: str) -> None:
    text = f"index, name, memory.total [MiB]\n0, NVIDIA GB10, {cell}\n"
    (gpu,) = parse_smi(text)["gpus"]
    assert gpu["unified_memory"] is True
    assert gpu["memory_total_mib"] is None


def test_a_table_without_header_names_only_what_its_form_tells() -> None:
    parsed = parse("csv_rtxpro6000_8x")
    assert [gpu["pci_bus_id"] for gpu in parsed["gpus"]][-2:] == ["0000:e1:00.0", "0000:f1:00.0"]
    assert parsed["gpus"][0]["pcie"]["width"] is None  # 5, 16, 600.00 could be anything
    assert parsed["driver_version"] == "595.58.03"
    assert codes(parsed) == {"csv_without_header"}


def test_failed_cells_of_other_columns_are_told_too() -> None:
    parsed = parse("csv_unknown_error_partial")
    assert [gpu["memory_total_mib"] for gpu in parsed["gpus"]] == [49140, 49140, 49140]
    assert sum(entry["code"] == "value_failed" for entry in parsed["problems"]) == 3


@pytest.mark.parametrize("place", ["before", "between", "after"])
@pytest.mark.parametrize("text", [CSV, XML], ids=["csv", "xml"])
def test_a_lost_gpu_leaves_the_others(text: str, place: str) -> None:
    error = "Unable to determine the device handle for GPU0000:C3:00.0: GPU is lost.  Reboot the system\n"
    middle = text.index("\n1, ") + 1 if text is CSV else text.rindex("\t<gpu ")
    position = {"before": 0, "between": middle, "after": len(text)}[place]
    parsed = parse_smi(text[:position] + error + text[position:])
    assert [gpu["name"] for gpu in parsed["gpus"]] == [gpu["name"] for gpu in parse_smi(text)["gpus"]]
    (entry,) = [entry for entry in parsed["problems"] if entry["code"] == "gpu_unreachable"]
    assert entry["pci_bus_id"] == "0000:c3:00.0"


def test_a_gpu_missing_from_the_report_makes_the_numbers_uncertain() -> None:
    parsed = parse_smi("Unable to determine the device handle for GPU0000:05:00.0: Unknown Error\n" + XML)
    assert [gpu["index"] for gpu in parsed["gpus"]] == [None, None]  # nvidia-smi may count the lost one or not


def test_a_row_cut_short_keeps_its_whole_cells() -> None:
    parsed = parse_smi(CSV[: CSV.rindex("8 MiB, 13")])  # "... 0000000F:21:00.0, 4606"
    assert parsed["gpus"][1]["pci_bus_id"] == "000f:21:00.0"
    assert parsed["gpus"][1]["memory_total_mib"] is None  # not 4606
    assert "row_damaged" in codes(parsed)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda text: text.replace("\n", "\r\n"), id="CRLF"),
        pytest.param(lambda text: "\x1b[32m" + text + "\x1b[0m", id="ANSI"),
        pytest.param(lambda text: "\n\n" + text + "\n\n", id="blank lines"),
        pytest.param(lambda text: "$ nvidia-smi\n" + text, id="prompt"),
        pytest.param(lambda text: text.encode(), id="bytes"),
    ],
)
@pytest.mark.parametrize("text", [CSV, XML], ids=["csv", "xml"])
def test_damage_that_hides_nothing_changes_nothing(text: str, damage: Any) -> None:
    assert parse_smi(damage(text)) == parse_smi(text)


def test_nounits() -> None:
    bare = parse_smi(CSV.replace(" MiB", ""))
    assert [gpu["memory_total_mib"] for gpu in bare["gpus"]] == [46068, 46068]


def test_failing_hardware_is_told() -> None:
    sick = XML.replace("<dram_uncorrectable>0<", "<dram_uncorrectable>3<", 1)
    sick = sick.replace("<remapped_row_failure>No<", "<remapped_row_failure>Yes<", 1)
    sick = sick.replace("<gpu_recovery_action>None<", "<gpu_recovery_action>Reset<", 1)
    parsed = parse_smi(sick)
    assert codes(parsed) == {"ecc_uncorrected", "row_remap_failed", "recovery_needed"}
    assert parsed["gpus"][1]["problems"] == []


def test_processes_hold_memory() -> None:
    process = "<process_info><pid>411</pid><type>C</type><used_memory>300 MiB</used_memory></process_info>"
    parsed = parse_smi(XML.replace("<processes>", f"<processes>{process}", 1))
    assert parsed["gpus"][0]["holders"] == [{"pid": 411, "user": None, "unit": None, "memory_mib": 300}]


@pytest.mark.parametrize(
    ("name", "vgpu"),
    [("GRID A100-40C", True), ("NVIDIA L40S-48C", True), ("NVIDIA A100-SXM4-80GB", None), ("NVIDIA H100 PCIe", None)],
)
def test_a_vgpu_shows_by_its_profile_name(name: str, *, vgpu: bool | None) -> None:
    (gpu,) = parse_smi(f"index, name\n0, {name}\n")["gpus"]
    assert gpu["vgpu"] is vgpu


@pytest.mark.parametrize(
    ("printed", "sysfs"),
    [
        ("00000000:C3:00.0", "0000:c3:00.0"),
        ("0000000F:01:00.0", "000f:01:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("01:00.0", "0000:01:00.0"),
        ("0000:c1:00", "0000:c1:00.0"),
        ("N/A", None),
        ("", None),
    ],
)
def test_addresses_are_spelled_as_in_sysfs(printed: str, sysfs: str | None) -> None:
    assert normalise_bus_id(printed) == sysfs


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-2,8", [0, 1, 2, 8]), ("", []), ("5", [5]), ("N/A", None), ("5-2", None), ("-1", None), ("0-99999999", None)],
)
def test_ranges(text: str, numbers: list[int] | None) -> None:
    assert parse_ranges(text) == numbers


@given(st.sets(st.integers(0, 300)))
def test_ranges_read_back_as_written(numbers: set[int]) -> None:
    assert parse_ranges(format_ranges(numbers)) == sorted(numbers)


@given(st.sampled_from(sorted(OUTPUTS)), st.data())
def test_damage_never_raises_and_leaves_no_bare_nothing(name: str, data: st.DataObject) -> None:
    text = OUTPUTS[name]["stdout"]
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        text = text[:start] + data.draw(st.text(max_size=8)) + text[start + data.draw(st.integers(0, 60)) :]
    parsed = parse_smi(text)
    assert parsed["gpus"] or parsed["problems"]


@given(st.data())
def test_a_cut_report_never_shows_half_a_number(data: st.DataObject) -> None:
    cut = XML[: data.draw(st.integers(0, len(XML)))]
    whole = {json.dumps(value) for gpu in parse_smi(XML)["gpus"] for value in gpu.values()}
    for gpu in parse_smi(cut)["gpus"]:
        for key, value in gpu.items():
            if not isinstance(value, (dict, list)) and value is not None:
                assert json.dumps(value) in whole, key


@given(st.text())
def test_any_text_is_survived(text: str) -> None:
    parsed = parse_smi(text)
    assert not [gpu for gpu in parsed["gpus"] if gpu["memory_total_mib"] == 0 and not re.search(r"\b0\b", text)]
