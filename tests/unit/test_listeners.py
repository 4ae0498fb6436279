"""Who holds a port: read from this machine's own procfs, and from kernel text written by hand."""

import os
import socket
from pathlib import Path

from vllm_fleet.target.listeners import listeners, listening_inodes, unit_from_cgroup


def test_names_the_program_that_really_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = listeners([port])
    assert [(entry["port"], entry["pid"]) for entry in found] == [(port, os.getpid())]
    assert found[0]["program"]


def test_a_free_port_has_no_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert listeners([port]) == []


def test_a_connected_socket_is_not_a_listener() -> None:
    # 0x1F41 = 8001; state 01 is ESTABLISHED, 0A is LISTEN (kernel: proc_net_tcp.rst).
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:1F41 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 111 1\n"
        "   1: 0100007F:1F42 0100007F:D431 01 00000000:00000000 00:00000000 00000000     0        0 222 1\n"
    )
    assert listening_inodes(table) == {8001: ["111"]}


def test_a_listener_whose_process_is_hidden_still_counts(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(
        "header\n 0: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 333 1\n"
    )
    assert listeners([8000], str(tmp_path)) == [{"port": 8000, "pid": None, "program": None, "unit": None}]


def test_unit_is_read_from_both_cgroup_versions() -> None:
    assert unit_from_cgroup("0::/system.slice/vllm-a-0.service\n") == "vllm-a-0.service"
    assert (
        unit_from_cgroup("5:cpu:/x\n1:name=systemd:/system.slice/vllm-gateway.service/worker\n")
        == "vllm-gateway.service"
    )
    assert unit_from_cgroup("0::/user.slice/user-0.slice/session-3.scope\n") == "session-3.scope"
    assert unit_from_cgroup("0::/\n") is None
