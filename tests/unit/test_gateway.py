"""What a gateway balances over, when some hosts were not reached, have left, or disagree; and its certificate."""

from __future__ import annotations

import datetime as dt
import ipaddress
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from vllm_fleet import gateway
from vllm_fleet.gateway import GatewayError, backends, by_address_family, certificate_problem

RELOAD = Path(__file__).parents[2] / "roles" / "model_gateway" / "files" / "gateway-reload"


def plan(model: str = "m", address: str = "10.0.0.1", ports: tuple[int, ...] = (8001,)) -> dict[str, Any]:
    return {
        "model": {"served_name": model, "contract": {"reasoning": True, "tools": True, "json_schema": True}},
        "replicas": [
            {"name": f"m-{i}", "bind_address": address, "port": port, "max_num_seqs": 64}
            for i, port in enumerate(ports)
        ],
    }


def test_every_replica_of_every_planned_host_is_a_server() -> None:
    entries = backends({"a": plan(ports=(8001, 8002)), "b": plan(address="10.0.0.2")}, {}, ["a", "b"], "a")
    assert [server["name"] for entry in entries.values() for server in entry["servers"]] == ["a.m-0", "a.m-1", "b.m-0"]
    assert entries["b"]["contract"] == {"reasoning": True, "tools": True, "json_schema": True}
    (server,) = entries["b"]["servers"]
    assert server.pop("id") > 0
    assert server == {"name": "b.m-0", "replica": "m-0", "address": "10.0.0.2", "port": 8001, "places": 64}


def test_a_release_from_before_plans_had_a_contract_is_balanced_over() -> None:
    former = plan()
    del former["model"]["contract"]
    assert backends({"a": former}, {}, ["a"], "a")["a"]["contract"] is None


def test_a_server_keeps_its_number_whoever_comes_and_goes() -> None:
    # HAProxy's consistent hash places servers by it, and so conversations.
    plans = {name: plan(address=f"10.0.0.{index}") for index, name in enumerate("abcdef", start=1)}
    numbers = {name: entry["servers"][0]["id"] for name, entry in backends(plans, {}, list(plans), "a").items()}
    assert len(set(numbers.values())) == len(plans)
    fewer = backends({name: plans[name] for name in "fca"}, {}, list("fca"), "a")
    assert {name: entry["servers"][0]["id"] for name, entry in fewer.items()} == {n: numbers[n] for n in "fca"}


def test_names_that_share_a_checksum_get_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.zlib, "crc32", lambda _: gateway.MAX_SERVER_ID - 1)
    entries = backends({"a": plan(ports=(8001, 8002, 8003))}, {}, ["a"], "a")
    assert [server["id"] for server in entries["a"]["servers"]] == [gateway.MAX_SERVER_ID, 1, 2]


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


# --- Certificates -----------------------------------------------------------------------------------------------------

NOW = dt.datetime(2026, 12, 1, tzinfo=dt.UTC)
PEM = serialization.Encoding.PEM
PLAIN = serialization.NoEncryption()


@dataclass(frozen=True)
class Made:
    """A certificate and its key."""

    name: x509.Name
    private: ec.EllipticCurvePrivateKey
    certificate: str

    def key(self, encryption: serialization.KeySerializationEncryption = PLAIN) -> str:
        return self.private.private_bytes(PEM, serialization.PrivateFormat.PKCS8, encryption).decode()


def made(name: str, issuer: Made | None = None, days: int = 30, since: int = -1) -> Made:
    """A certificate for *.example.com and 10.0.0.1, valid from one day to another, counted from NOW."""
    private, subject = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]),
    )
    names = [x509.DNSName("*.example.com"), x509.IPAddress(ipaddress.ip_address("10.0.0.1"))]
    built = (
        x509.CertificateBuilder(issuer.name if issuer else subject, subject, private.public_key(), 1)
        .not_valid_before(NOW + dt.timedelta(days=since))
        .not_valid_after(NOW + dt.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign((issuer or Made(subject, private, "")).private, hashes.SHA256())
    )
    return Made(subject, private, built.public_bytes(PEM).decode())


def problem(certificate: str, key: str, *names: str) -> str | None:
    return certificate_problem(certificate, key, names, NOW)


def test_a_certificate_that_clients_accept_has_no_problem() -> None:
    authority = made("authority")
    ours = made("gateway", authority)
    chain = ours.certificate + authority.certificate
    assert problem(chain, ours.key(), "models.example.com", "MODELS.example.com", "10.0.0.1") is None
    assert problem(ours.certificate, ours.key()) is None


@pytest.mark.parametrize("name", ["example.com", "a.b.example.com", "models.example.org", "10.0.0.2"])
def test_a_certificate_for_other_names_is_refused(name: str) -> None:
    ours = made("gateway")
    assert f"not valid for {name}." in (problem(ours.certificate, ours.key(), "x.example.com", name) or "")


def test_what_is_wrong_with_a_certificate_is_said_without_its_key() -> None:
    authority, ours, other = made("authority"), made("gateway"), made("other")
    signed = made("signed", authority)
    expired, early = made("gone", days=-1, since=-9), made("early", since=2)
    locked = ours.key(serialization.BestAvailableEncryption(b"secret"))
    said = {
        "no PEM text with a BEGIN CERTIFICATE": problem("", ours.key()),
        "no PEM text with a BEGIN PRIVATE KEY": problem(ours.certificate, ours.certificate),
        "is encrypted": problem(ours.certificate, locked),
        "does not belong to the certificate of CN=gateway": problem(ours.certificate, other.key()),
        "Put the gateway's own first": problem(authority.certificate + signed.certificate, signed.key()),
        "after CN=signed comes CN=other": problem(signed.certificate + other.certificate, signed.key()),
        "CN=gone expired on 2026-11-30": problem(expired.certificate, expired.key()),
        "CN=early is valid from 2026-12-03": problem(early.certificate, early.key()),
    }
    assert {words: text for words, text in said.items() if words not in (text or "")} == {}
    assert [text for text in said.values() if ours.key().splitlines()[1] in (text or "")] == []


def test_an_expired_link_of_the_chain_is_named() -> None:
    authority = made("authority", days=-1, since=-9)
    ours = made("gateway", authority)
    assert "CN=authority expired" in (problem(ours.certificate + authority.certificate, ours.key()) or "")


# --- Firewall ---------------------------------------------------------------------------------------------------------


def test_addresses_are_sorted_by_family_each_once() -> None:
    mixed = ["10.0.0.2", "fd00::1", "10.0.0.2", "10.0.0.1", "10.1.2.3/16", "fd00::/64"]
    assert by_address_family(mixed) == {
        "ipv4": ["10.0.0.1", "10.0.0.2", "10.1.0.0/16"],
        "ipv6": ["fd00::/64", "fd00::1"],
    }


def test_a_name_is_no_address() -> None:
    with pytest.raises(GatewayError, match=r"'gw-1' is no address.*vllm_plan_bind_address"):
        by_address_family(["10.0.0.1", "gw-1"])
