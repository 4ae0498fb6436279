"""The firewall's rules, in the kernel: in a network namespace of their own, with a host on the other end of a cable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

ROLE = Path(__file__).parents[2] / "roles" / "replica_firewall"
NFT = shutil.which("nft", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
TABLE = "inet vllm_fleet"

# What runs in the namespaces: a host with listeners, and a peer that has several addresses and tries them all.
HOST = """
import socket, sys
listeners = [socket.create_server(("10.9.0.1", port)) for port in (8001, 9180, 22)]
print("listening", flush=True)
sys.stdin.read()
"""
PEER = """
import socket, sys
for source in sys.argv[1].split(","):
    for port in (8001, 9180, 22):
        try:
            socket.create_connection(("10.9.0.1", port), timeout=2, source_address=(source, 0)).close()
            print(source, port, "open")
        except OSError as error:
            print(source, port, type(error).__name__)
"""


def rules(**variables: Any) -> str:
    """What the role would write."""
    loader = DataLoader()
    files = (ROLE / "defaults" / "main.yml", ROLE / "vars" / "main.yml")
    plan = {"replicas": [{"port": 8001}, {"port": 8002}]}
    given: dict[str, Any] = {"groups": {}, "hostvars": {}, "replica_firewall_plan": plan}
    for file in files:
        given = loader.load_from_file(str(file), trusted_as_template=True) | given
    templar = Templar(loader=loader, variables=given | variables)
    source = trust_as_template((ROLE / "templates" / "firewall.nft.j2").read_text())
    return str(templar.template(source, escape_backslashes=False, overrides={"trim_blocks": True}))


def run(*command: str, text: str | None = None) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, input=text)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Namespaces:
    """A host and its peer, until the block ends."""

    def __init__(self) -> None:
        self.host, self.peer = (f"vllm-fleet-{os.getpid()}-{end}" for end in "hp")

    def __enter__(self) -> Self:
        for name in (self.host, self.peer):
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "fw0", "netns", self.host, "type", "veth", "peer", "name", "fw0", "netns", self.peer)
        for name, addresses in ((self.host, ["10.9.0.1"]), (self.peer, ["10.9.0.2", "10.9.0.3"])):
            for address in addresses:
                self.run(name, "ip", "address", "add", f"{address}/24", "dev", "fw0")
            for device in ("lo", "fw0"):
                self.run(name, "ip", "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in (self.host, self.peer):
            run("ip", "netns", "delete", name)

    def run(self, name: str, *command: str, text: str | None = None) -> str:
        return run("ip", "netns", "exec", name, *command, text=text)

    def nft(self, *arguments: str, text: str | None = None) -> str:
        assert NFT, "nft is not installed: `make setup` brings it"
        return self.run(self.host, NFT, *arguments, text=text)

    def reached(self) -> set[str]:
        """Which addresses of the peer reach which ports of the host."""
        command = ["ip", "netns", "exec", self.host, sys.executable, "-c", HOST]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as host:
            assert host.stdin
            assert host.stdout
            host.stdout.readline()
            lines = self.run(self.peer, sys.executable, "-c", PEER, "10.9.0.2,10.9.0.3").splitlines()
            lines += self.run(self.host, sys.executable, "-c", PEER, "10.9.0.1").splitlines()
            host.stdin.close()
        return {line.removesuffix(" open") for line in lines if line.endswith("open")}


OWN = {"10.9.0.1 8001", "10.9.0.1 9180", "10.9.0.1 22"}


@pytest.fixture
def namespaces() -> Any:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root; molecule/gateway proves the same in lab hosts")
    with Namespaces() as made:
        yield made


def test_only_the_gateways_and_the_host_itself_reach_replicas_and_agent(namespaces: Namespaces) -> None:
    namespaces.nft("--file", "-", text=rules(replica_firewall_sources=["10.9.0.2"]))
    assert namespaces.reached() == OWN | {"10.9.0.2 8001", "10.9.0.2 9180", "10.9.0.2 22", "10.9.0.3 22"}


def test_the_owners_rules_stay_and_count(namespaces: Namespaces) -> None:
    chain = "type filter hook input priority filter; policy accept; tcp dport 22 drop;"
    owners = f"table inet filter {{\n chain input {{ {chain} }}\n}}\n"
    namespaces.nft("--file", "-", text=owners)
    before = namespaces.nft("list", "table", "inet", "filter")
    text = rules(replica_firewall_sources=["10.9.0.2"])
    for _ in range(2):  # again changes nothing
        namespaces.nft("--file", "-", text=text)
    assert namespaces.nft("list", "table", "inet", "filter") == before
    assert namespaces.nft("list", "table", *TABLE.split()).count("reject with tcp reset") == 1
    assert namespaces.reached() == {"10.9.0.1 8001", "10.9.0.1 9180", "10.9.0.2 8001", "10.9.0.2 9180"}
    namespaces.nft("delete", "table", *TABLE.split())
    assert namespaces.nft("list", "tables").split() == ["table", "inet", "filter"]


def test_gateways_are_known_by_their_address_on_the_fleet_network() -> None:
    hostvars = {
        "a": {"vllm_plan_bind_address": "10.9.0.2", "ansible_host": "192.0.2.1"},
        "b": {"ansible_host": "10.9.0.3"},
        "fd00::4": {},
    }
    text = rules(groups={"gateway": list(hostvars)}, hostvars=hostvars, replica_firewall_more_sources=["10.9.8.0/24"])
    assert "elements = { 10.9.0.2, 10.9.0.3, 10.9.8.0/24 }" in text
    assert "elements = { fd00::4 }" in text
    assert "tcp dport != { 8001, 8002, 9180 } accept" in text


def test_without_gateways_only_the_host_itself_reaches_them(namespaces: Namespaces) -> None:
    namespaces.nft("--file", "-", text=rules())
    assert namespaces.reached() == OWN | {"10.9.0.2 22", "10.9.0.3 22"}
