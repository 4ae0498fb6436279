"""What nvidia-smi says of GPUs: XML, text, lists, tables and error messages, as recorded and as damaged.

Expected values were read from the recorded outputs by eye; tests/fixtures/nvidia_smi_outputs.json has their sources.
"""

import html
import json
import re
from collections.abc import Callable
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
    "table_gb10": 1,
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


def each_line(before: str) -> Callable[[str], str]:
    return lambda text: re.sub("^", lambda _: before, text, flags=re.MULTILINE)


# The ways in which an output comes to us; none of them hides anything.
CARRIED: dict[str, Callable[[str], object]] = {
    "quoted mail": each_line("> "),
    "shell comment": each_line("# "),
    "indented": each_line("    "),
    "docker compose": each_line("vllm-1  | "),
    "pdsh": each_line("gpu-node-03: "),
    "mpirun, whose prefix looks like XML": each_line("[1,0]<stdout>:"),
    "journal": each_line("Apr 06 03:02:45 gpu-a vllm[123]: "),
    "ray, coloured, with a comma": each_line("\x1b[36m(Worker pid=12, ip=10.0.0.1)\x1b[0m "),
    "line numbers": lambda text: "\n".join(f"{n:6d}\t{line}" for n, line in enumerate(text.split("\n"), 1)),
    "code fence": lambda text: f"```\n{text}\n```",
    "inline code": lambda text: f"`{text}`",
    "no-break spaces": lambda text: text.replace(" ", "\xa0"),
    "HTML": lambda text: f"<pre>{html.escape(text)}</pre>",
    "JSON": lambda text: json.dumps({"stdout": text}),
    "JSON with escaped slashes": lambda text: json.dumps(text).replace("/", "\\/"),
    "Ansible's stdout_lines": lambda text: json.dumps({"stdout_lines": text.split("\n")}, indent=1),
    "JSON list on one line": lambda text: json.dumps(text.split("\n")),
    "Windows PowerShell's UTF-16": lambda text: text.encode("utf-16"),
    "CRLF twice": lambda text: text.replace("\n", "\r\r\n"),
    "after a command line": lambda text: f"root@gpu0:~# nvidia-smi\n{text}",
}


@pytest.mark.parametrize("way", CARRIED)
def test_how_an_output_was_carried_changes_nothing(way: str) -> None:
    """For the outputs with GPUs; of an error the sentence counts, and that is looked for anywhere."""
    texts = {"csv": CSV, "xml": XML, "table": TABLE}
    texts |= {name: OUTPUTS[name]["stdout"] for name, expected in EXPECTED.items() if isinstance(expected, int)}
    different = [
        name
        for name, text in texts.items()
        if parse_smi(CARRIED[way](text))["gpus"] != parse_smi(text)["gpus"]  # type: ignore[arg-type]
    ]
    assert different == []


# The narrow table of drivers before 530. 0 has MIG about to go off, a shortened name and ECC errors; 1 fails.
TABLE = """\
| NVIDIA-SMI 470.57.02    Driver Version: 470.57.02    CUDA Version: 11.4     |
|-------------------------------+----------------------+----------------------+
| GPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | GPU-Util  Compute M. |
|                               |                      |               MIG M. |
|===============================+======================+======================|
|   0  NVIDIA A100-SXM...  On   | 00000000:07:00.0 Off |                    2 |
| N/A   39C    P0    53W / 400W |      0MiB / 40536MiB |      0%      Default |
|                               |                      |             Enabled* |
+-------------------------------+----------------------+----------------------+
|   1  Tesla T4            Off  | 0000000F:0F:00.0 Off |                  Off |
|ERR!   39C   ERR!   ERR! / 70W |     18MiB / 15109MiB |    ERR!      Default |
|                               |                      |                  N/A |
+-------------------------------+----------------------+----------------------+
| MIG devices:                                                                |
| GPU  GI  CI  MIG |         Memory-Usage |        Vol|         Shared        |
|  0    7   0   0  |      3MiB /  4864MiB | 14      0 |  1   0    0    0    0 |
+-----------------------------------------------------------------------------+
| Processes:                                                                  |
|  GPU   GI   CI        PID   Type   Process name                  GPU Memory |
|    1   N/A  N/A      4242      C   python                             18MiB |
|    1      4300    C+G   ...xlib/Xorg   N/A |
+-----------------------------------------------------------------------------+
"""


def test_the_plain_table() -> None:
    parsed = parse_smi(TABLE)
    first, second = parsed["gpus"]
    assert (first["index"], first["pci_bus_id"], first["memory_total_mib"]) == (0, "0000:07:00.0", 40536)
    assert first["name"] is None  # shortened: the 40 and the 80 GB card begin alike
    assert (first["ecc"], first["mig"]["enabled"], first["power_limit_w"]) == (True, True, 400)
    assert (second["name"], second["pci_bus_id"], second["ecc"]) == ("Tesla T4", "000f:0f:00.0", False)
    assert [(holder["pid"], holder["memory_mib"]) for holder in second["holders"]] == [(4242, 18), (4300, None)]
    assert codes(parsed) == {"ecc_uncorrected", "value_failed"}
    assert (parsed["driver_version"], parsed["cuda_version"]) == ("470.57.02", "11.4")


def test_the_plain_table_of_windows() -> None:
    (gpu,) = parse_smi(
        "|   0  NVIDIA GeForce RTX 2080 ...  WDDM  |   00000000:01:00.0  On |                  N/A |\n"
        "|  0%   45C    P8             18W /  250W |     612MiB /   8192MiB |      3%      Default |\n"
    )["gpus"]
    assert (gpu["memory_total_mib"], gpu["memory_used_mib"], gpu["ecc"]) == (8192, 612, None)


def test_the_plain_table_without_memory_is_memory_shared_with_the_cpu() -> None:
    (gpu,) = parse("table_gb10")["gpus"]
    assert (gpu["name"], gpu["pci_bus_id"]) == ("NVIDIA GB10", "000f:01:00.0")
    assert (gpu["memory_total_mib"], gpu["unified_memory"]) == (None, True)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("'nvidia-smi' is not recognized as an internal or external command,\r\noperable program", "driver_missing"),
        ("Command 'nvidia-smi' not found, but can be installed with:\nsudo apt install", "driver_missing"),
        ("zsh: command not found: nvidia-smi", "driver_missing"),
        ("bash: nvidia-smi: command not found", "driver_missing"),
        ('exec: "nvidia-smi": executable file not found in $PATH: unknown', "driver_missing"),
        ("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.", "driver_missing"),
        ("Failed to initialize NVML: Insufficient Permissions", "driver_unreachable"),
        ("Unable to determine the device handle for GPU2: 0000:81:00.0: Unknown Error", "gpu_unreachable"),
        ("WARNING: infoROM is corrupted at gpu 0000:3B:00.0", "inforom_corrupted"),
    ],
)
def test_sentences_of_shells_and_drivers(text: str, code: str) -> None:
    parsed = parse_smi(text)
    assert parsed["gpus"] == []
    assert codes(parsed) == {code}


def test_the_address_in_a_numbered_handle_error() -> None:
    (entry,) = parse_smi("Unable to determine the device handle for GPU2: 0000:81:00.0: Unknown Error")["problems"]
    assert entry["pci_bus_id"] == "0000:81:00.0"  # not GPU "2"


@pytest.mark.parametrize(
    "text",
    [
        "name, age\nBob, 5\n",
        "index, name\n0, foo\n1, bar\n",
        "0, AMD Instinct MI300X, 196592 MiB\n",
        "I have two cards, NVIDIA H100 and L40S, on 2 nodes\n",
        "[1,0]<stdout>:NVIDIA-SMI was not run\n",
        "<lshw><gpu>AMD</gpu></lshw>",
        "say <gpu id> for the card",
    ],
)
def test_text_that_only_looks_like_an_output_has_no_gpu(text: str) -> None:
    parsed = parse_smi(text)
    assert parsed["gpus"] == []
    assert parsed["problems"]


def test_names_alone_and_names_of_old_drivers() -> None:
    parsed = parse_smi("NVIDIA H100 80GB HBM3, 81559 MiB\nNVIDIA H100 80GB HBM3, 81559 MiB\n")
    assert [gpu["name"] for gpu in parsed["gpus"]] == ["NVIDIA H100 80GB HBM3"] * 2
    assert [gpu["memory_total_mib"] for gpu in parsed["gpus"]] == [None, None]  # it could be the used or the free
    assert [gpu["name"] for gpu in parse_smi("0, A100-SXM4-40GB, 40536 MiB\n")["gpus"]] == ["A100-SXM4-40GB"]


@pytest.mark.parametrize("answer", ["GPU is lost", "[GPU requires reset]"])
def test_a_lost_gpu_in_its_place_has_no_name_and_is_an_error(answer: str) -> None:
    """Drivers keep the record of a lost GPU, with this in every field."""
    first = XML.index("<product_name>")
    record = re.sub(r">[^<\n]+<", f">{answer}<", XML[first : XML.index("</gpu>")])
    parsed = parse_smi(XML[:first] + record + XML[XML.index("</gpu>") :])
    lost, other = parsed["gpus"]
    assert (lost["name"], lost["uuid"], lost["memory_total_mib"]) == (None, None, None)
    assert lost["pci_bus_id"] == "0000:01:00.0"
    assert [entry["severity"] for entry in parsed["problems"] if entry["code"] == "gpu_lost"] == ["error"]
    assert (other["name"], other["problems"]) == ("NVIDIA RTX PRO 6000 Blackwell Server Edition", [])


def test_failing_hardware_in_the_text_report() -> None:
    report = (
        "Attached GPUs : 1\nGPU 00000000:06:00.0\n    Product Name : NVIDIA H100\n    GPU Recovery Action : Reset\n"
        "    ECC Errors\n        Volatile\n            DRAM Correctable : 7\n            DRAM Uncorrectable : 2\n"
        "    Remapped Rows\n        Pending : Yes\n        Remapping Failure Occurred : No\n"
    )
    assert codes(parse_smi(report)) == {"ecc_uncorrected", "recovery_needed", "row_remap_pending"}


def test_double_bit_errors_of_old_cards_are_uncorrectable_ones() -> None:
    volatile = "<single_bit><total>4</total></single_bit><double_bit><total>{}</total></double_bit>"  # V100, driver 450
    report = (
        '<nvidia_smi_log><gpu id="0000:02:00.0"><ecc_errors><volatile>{}</volatile></ecc_errors></gpu></nvidia_smi_log>'
    )
    assert codes(parse_smi(report.format(volatile.format(1)))) == {"ecc_uncorrected"}
    assert codes(parse_smi(report.format(volatile.format(0)))) == set()


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
