"""What a gateway balances over, when some hosts were not reached, have left, or disagree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_fleet.gateway import GatewayError, backends

RELOAD = Path(__file__).parents[2] / "roles" / "model_gateway" / "files" / "gateway-reload"


def plan(model: str = "m", address: str = "10.0.0.1", ports: tuple[int, ...] = (8001,)) -> dict[str, Any]:
    return {
        "model": {"served_name": model},
        "replicas": [{"name": f"m-{i}", "bind_address": address, "port": port} for i, port in enumerate(ports)],
    }


def test_every_replica_of_every_planned_host_is_a_server() -> None:
    entries = backends({"a": plan(ports=(8001, 8002)), "b": plan(address="10.0.0.2")}, {}, ["a", "b"], "a")
    assert [server["name"] for entry in entries.values() for server in entry["servers"]] == ["a.m-0", "a.m-1", "b.m-0"]
    assert entries["b"]["servers"] == [{"name": "b.m-0", "address": "10.0.0.2", "port": 8001}]


def test_a_host_that_was_not_reached_keeps_its_former_entry() -> None:
    former = backends({"a": plan(), "b": plan(address="10.0.0.2")}, {}, ["a", "b"], "a")
    entries = backends({"a": plan(ports=(8001, 8002))}, former, ["a", "b"], "a")
    assert len(entries["a"]["servers"]) == 2
    assert entries["b"] == former["b"]


def test_a_host_that_left_the_inventory_goes() -> None:
    former = backends({"a": plan(), "b": plan(address="10.0.0.2")}, {}, ["a", "b"], "a")
    assert list(backends({"a": plan()}, former, ["a"], "a")) == ["a"]


def test_hosts_with_different_models_are_named_and_who_was_not_reached() -> None:
    former = backends({"b": plan("old", "10.0.0.2")}, {}, ["b"], "a")
    with pytest.raises(GatewayError, match=r"a serves new; b serves old \(not reached in this run\)"):
        backends({"a": plan("new")}, former, ["a", "b"], "a")


def test_a_replica_on_another_hosts_loopback_cannot_be_reached() -> None:
    with pytest.raises(GatewayError, match="vllm_plan_bind_address of b"):
        backends({"b": plan(address="127.0.0.1")}, {}, ["b"], "a")
    assert backends({"a": plan(address="127.0.0.1")}, {}, ["a"], "a")


@pytest.mark.parametrize(("port", "kept"), [(8001, 1), (9001, 0)], ids=["stays", "moved"])
def test_a_reload_keeps_the_state_of_servers_that_stay(tmp_path: Path, port: int, kept: int) -> None:
    # The format is HAProxy's "show servers state", version 1: column 4 is the name, 5 the address, 19 the port.
    state = (
        "1\n# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_iweight "
        "srv_time_since_last_change srv_check_status srv_check_result srv_check_health srv_check_state srv_agent_state "
        "bk_f_forced_id srv_f_forced_id srv_fqdn srv_port srvrecord srv_use_ssl srv_check_port\n"
        "3 replicas 1 a.m-0 10.0.0.1 2 4 1 1 10 6 3 4 6 0 0 0 - 8001 - 0 0\n\n"
    )
    (tmp_path / "backends.json").write_text(
        '{"a": {"model": "m", "servers": [{"name": "a.m-0", "address": "10.0.0.1", "port": %d}]}}' % port  # noqa: UP031  braces of JSON
    )
    server = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); print(flush=True); "
        "c, _ = s.accept(); assert c.recv(99) == b'show servers state\\n'; c.sendall(sys.argv[2].encode()); c.close()"
    )
    sock = str(tmp_path / "admin.sock")
    with subprocess.Popen([sys.executable, "-c", server, sock, state], stdout=subprocess.PIPE) as admin:
        assert admin.stdout
        admin.stdout.readline()  # it listens
        subprocess.run([sys.executable, RELOAD, sock, tmp_path / "state", tmp_path / "backends.json"], check=True)
    assert (tmp_path / "state").read_text().count("a.m-0") == kept
    assert (tmp_path / "state").read_text().startswith("1\n# be_id")
