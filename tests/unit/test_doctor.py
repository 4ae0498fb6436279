"""The table of all problems of all hosts, and the playbook that prints it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_fleet import doctor

_REPOSITORY = Path(__file__).parent.parent.parent
_CAPTURES = _REPOSITORY / "tests" / "fixtures" / "captures"


def entry(severity: str, code: str, message: str = "It is so.") -> dict[str, str]:
    return {"severity": severity, "code": code, "message": message, "remedy": "Do this."}


def probed(*problems: dict[str, str]) -> dict[str, Any]:
    return {"ansible_facts": {"gpu_topology": {"problems": list(problems)}}}


RESULTS = {
    "gpu-b": probed(entry("warning", "bar1_small"), entry("error", "xid", "word " * 60)),
    "gpu-a": probed(entry("warning", "mixed_gpus")),
    "gpu-c": probed(),
    "gpu-d": {"unreachable": True, "msg": "ssh: connect to host\n port 22: timed out"},
    "gpu-e": {"failed": True, "msg": "The module interpreter '/usr/bin/python3' was not found."},
}


def test_errors_first_then_by_host() -> None:
    rows = [(found.host, found.severity, found.code) for found in doctor.examine(RESULTS)]
    assert rows == [
        ("gpu-b", "error", "xid"),
        ("gpu-d", "error", "unreachable"),
        ("gpu-e", "error", "no_result"),
        ("gpu-a", "warning", "mixed_gpus"),
        ("gpu-b", "warning", "bar1_small"),
    ]


def test_the_table_is_readable() -> None:
    report = doctor.report(RESULTS)
    lines = report["lines"]
    assert lines[0].split() == ["host", "severity", "code", "message,", "remedy"]
    assert lines[-1] == "5 hosts: 3 errors, 2 warnings"
    assert (report["errors"], report["warnings"]) == (3, 2)
    assert max(map(len, lines)) <= doctor.WIDTH
    text = "\n".join(lines)
    assert "ssh: connect to host port 22: timed out" in text
    assert text.count("-> Do this.") == 3
    assert text.count("word") == 60  # wrapped, not cut


def test_a_healthy_fleet_is_one_line() -> None:
    assert doctor.report({"gpu-c": probed()})["lines"] == ["1 host: 0 errors, 0 warnings"]


def play(tmp_path: Path, hosts: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    inventory = tmp_path / "hosts.yml"
    settings = {"ansible_connection": "local", "ansible_become": False, "ansible_python_interpreter": sys.executable}
    group = {"vars": settings, "hosts": hosts}
    inventory.write_text(yaml.safe_dump({"all": {"children": {"gpu_hosts": group}}}), encoding="utf-8")
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    return subprocess.run(
        [program, "-i", str(inventory), str(_REPOSITORY / "playbooks" / "doctor.yml"), *arguments],
        env={**os.environ, "ANSIBLE_CONFIG": str(_REPOSITORY / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


def saved_host(tmp_path: Path, name: str) -> dict[str, str]:
    """Variables of a host that is a saved one."""
    folder = _CAPTURES / name
    program = tmp_path / f"nvidia-smi-{name}"
    program.write_text(
        f'#!/bin/sh\ncd "{folder}/nvidia-smi" || exit 9\ncase "$1" in -q) cat q-x.xml ;; *) cat topo-m.txt ;; esac\n',
        encoding="utf-8",
    )
    program.chmod(0o755)
    return {
        "vllm_plan_sysfs_root": f"{folder}/sys",
        "vllm_plan_procfs_root": f"{folder}/proc",
        "vllm_plan_nvidia_smi": str(program) if (folder / "nvidia-smi").is_dir() else str(tmp_path / "absent"),
        "probe_kernel_log": f"{folder}/kernel.log",
    }


def test_the_playbook_shows_all_hosts_and_fails_on_an_error(tmp_path: Path) -> None:
    """The first host does not answer (nothing listens on port 1), the second is well, the third has no driver."""
    gone = {
        "ansible_connection": "ssh",
        "ansible_host": "127.0.0.1",
        "ansible_port": 1,
        "ansible_ssh_common_args": "-o ConnectTimeout=3",
    }
    hosts = {
        "a-gone": gone,
        "b-well": saved_host(tmp_path, "rtxpro6000-8x-2nodes"),
        "c-bare": saved_host(tmp_path, "no-driver"),
    }
    done = play(tmp_path, hosts)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "3 hosts: 2 errors, 1 warning" in done.stdout
    table = done.stdout.partition("Show the problems")[2]
    for host, code in (("a-gone", "unreachable"), ("c-bare", "driver_missing"), ("c-bare", "links_from_pci_tree")):
        assert any(line.split()[:3:2] == [host, code] for line in table.splitlines()), table


@pytest.mark.parametrize(("strict", "status"), [("false", 0), ("true", 2)])
def test_warnings_fail_only_when_asked(tmp_path: Path, strict: str, status: int) -> None:
    host = saved_host(tmp_path, "rtxpro6000-8x-2nodes") | {"probe_kernel_log": str(tmp_path / "no-log")}
    done = play(tmp_path, {"warned": host}, "-e", f"doctor_strict={strict}")
    assert "1 host: 0 errors, 1 warning" in done.stdout
    assert done.returncode == status
