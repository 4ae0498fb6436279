"""What the person who owns the hosts sees, from two bare hosts to a served endpoint, wrong turns included.

The tests run in order on two lab hosts: each leaves the deployment as it found it. The engine is the real one; its
weights are made so that it always thinks one sentence and answers one, so answers can be compared word for word.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import conversation
import openai
import pytest
from conftest import HOSTS, REPOSITORY
from engine_contract import differences
from forward_proxy import forward_proxy

from vllm_fleet import gallery

if TYPE_CHECKING:
    from conftest import Lab

UNITS = {"vllm-gateway.service", "vllm-health.service", "vllm-minimax-m2-5-0.service", "vllm-minimax-m2-5-1.service"}
DEPLOY = "playbooks/deploy_minimax.yml"
CAPTURES = REPOSITORY / "tests" / "fixtures" / "captures"


def endpoint(lab: Lab, host: str) -> str:
    return f"http://{lab.variables(host)['ansible_host']}:8000"


def client(lab: Lab, host: str, key: str | None = None) -> openai.OpenAI:
    keys = lab.variables(host)["vllm_fleet_api_keys"]
    return openai.OpenAI(base_url=f"{endpoint(lab, host)}/v1", api_key=key or keys["demo"], max_retries=0, timeout=60)


def status(url: str, key: str | None = None, method: str = "GET") -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers, method=method), timeout=30) as answer:  # noqa: S310  an http address of the lab
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def inventory_keys(lab: Lab) -> list[str]:
    variables = lab.variables(HOSTS[0])
    return [variables["vllm_fleet_engine_key"], *variables["vllm_fleet_api_keys"].values()]


def plan(lab: Lab, host: str) -> dict[str, Any]:
    return dict(json.loads(lab.shell(host, "cat /opt/vllm-fleet/current/plan.json | tr -d '\\n'")))


@pytest.mark.parametrize("host", HOSTS)
def test_the_openai_library_has_a_conversation_through_every_gateway(deployed: Lab, host: str) -> None:
    conversation.hold(client(deployed, host), "minimax-m2.5")
    conversation.be_refused(client(deployed, host), "minimax-m2.5")


def test_the_engine_answers_as_its_recording_says(deployed: Lab) -> None:
    # What the stand-in engine, with which much else is tested, is held to.
    recorded = json.loads((REPOSITORY / "tests/fixtures/engine_contract/vllm-0.32.0-cpu.json").read_text())
    replica = plan(deployed, HOSTS[0])["replicas"][0]
    deployed.copy(HOSTS[0], REPOSITORY / "tests" / "engine_contract.py", "/tmp/engine_contract.py")  # noqa: S108  a lab host's
    printed = deployed.shell(
        HOSTS[0],
        f"python3 /tmp/engine_contract.py http://{replica['bind_address']}:{replica['port']} --model minimax-m2.5 "
        "--key-file /etc/vllm-fleet/engine.key >/tmp/seen.json && base64 --wrap=0 /tmp/seen.json",
    )
    found = differences(recorded, json.loads(base64.b64decode(printed)))
    assert not found, "\n".join(found)


def test_both_gateways_reach_all_four_replicas(deployed: Lab) -> None:
    for host in HOSTS:
        backends = json.loads(deployed.shell(host, "cat /etc/vllm-fleet/gateway/backends.json | tr -d '\\n'"))
        assert {name: len(entry["servers"]) for name, entry in backends.items()} == {"gpu-a": 2, "gpu-b": 2}
        assert deployed.shell(host, "journalctl -u vllm-gateway --output=cat | grep -c 'replica=gpu-b' || true") != "0"


def test_the_gateway_refuses_strangers_and_unknown_paths(deployed: Lab) -> None:
    base, key = endpoint(deployed, HOSTS[0]), deployed.variables(HOSTS[0])["vllm_fleet_api_keys"]["demo"]
    assert status(f"{base}/v1/models") == 401
    assert status(f"{base}/v1/models", "a-key-that-nobody-was-given") == 401
    assert status(f"{base}/v1/models", key) == 200
    # The engine serves these to anybody; the gateway must not.
    assert status(f"{base}/invocations", key, "POST") == 404
    assert status(f"{base}/metrics", key) == 404
    assert status(f"{base}/health") == 200


def test_no_key_shows_in_processes_units_journal_or_config(deployed: Lab) -> None:
    for secret in inventory_keys(deployed):
        found = deployed.shell(
            HOSTS[0],
            # The pattern's brackets keep the search from finding itself.
            f"(ps axww -o args; journalctl --no-pager; cat /etc/systemd/system/vllm-*; "
            "cat /etc/vllm-fleet/gateway/haproxy.cfg /opt/vllm-fleet/current/*) "
            f"| grep -c -- '[{secret[0]}]{secret[1:]}' || true",
        )
        assert found == "0"


def test_the_second_replica_loads_after_the_first_serves(deployed: Lab) -> None:
    def moment(unit: str, event: str) -> int:
        return int(deployed.shell(HOSTS[0], f"systemctl show --property={event} --value {unit}"))

    served = moment("vllm-minimax-m2-5-0.service", "ActiveEnterTimestampMonotonic")
    started = moment("vllm-minimax-m2-5-1.service", "InactiveExitTimestampMonotonic")
    assert 0 < served <= started


def test_each_replica_runs_on_the_cpus_of_its_node(deployed: Lab) -> None:
    for replica in plan(deployed, HOSTS[0])["replicas"]:
        pid = deployed.main_pids(HOSTS[0])[replica["unit"]]
        assert deployed.shell(HOSTS[0], f"grep Cpus_allowed_list /proc/{pid}/status").split()[-1] == replica["cpus"]


def test_memory_of_a_node_that_cannot_be_bound_is_not_bound(deployed: Lab) -> None:
    # Node 1 is in the lab's sysfs tree only; the kernel's Mems_allowed does not have it.
    first, second = plan(deployed, HOSTS[0])["replicas"]
    assert (first["numa_nodes"], first["memory_policy"]) == ([0], "bind")
    assert (second["numa_nodes"], second["memory_policy"]) == ([1], "none")
    assert any("node 1 cannot be bound" in sentence for sentence in plan(deployed, HOSTS[0])["explanation"])


def test_the_engine_accepts_every_command_line_that_the_planner_writes(deployed: Lab, tmp_path: Path) -> None:
    # The CPU build's parser is the CUDA build's; docs/layouts.md has every model on the usual hosts.
    lists = tmp_path / "command_lines.json"
    lists.write_text(json.dumps(gallery.command_lines(gallery.plans())))
    deployed.copy(HOSTS[0], lists, "/tmp/command_lines.json")  # noqa: S108  on a throw-away host
    deployed.copy(HOSTS[0], Path(__file__).with_name("accepts_arguments.py"), "/tmp/accepts_arguments.py")  # noqa: S108
    release = json.loads(deployed.shell(HOSTS[0], "cat /opt/vllm-fleet/current/release.json | tr -d '\\n'"))
    refused = deployed.shell(
        HOSTS[0],
        f"cd /tmp; {release['runtime']}/venv/bin/python accepts_arguments.py <command_lines.json | tail -n 1",
    )
    assert refused == "[]"


def test_a_second_deploy_changes_nothing_while_engines_hold_memory(deployed: Lab) -> None:
    before = plan(deployed, HOSTS[0])
    used = deployed.shell(HOSTS[0], "nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits")
    assert all(int(mib) > 1000 for mib in used.split())  # what a probe now meets
    run = deployed.play(DEPLOY)
    assert run.rc == 0
    assert run.hosts("changed") == set()
    assert plan(deployed, HOSTS[0]) == before


def test_check_mode_on_a_deployed_fleet_reports_no_change(deployed: Lab) -> None:
    run = deployed.play(DEPLOY, "--check", "--diff")
    assert run.rc == 0
    assert run.hosts("changed") == set()


def test_a_new_client_key_touches_the_gateways_only(deployed: Lab) -> None:
    before = {host: deployed.main_pids(host) for host in HOSTS}
    keys = deployed.variables(HOSTS[0])["vllm_fleet_api_keys"] | {"alice": "a-second-key-of-no-value"}
    assert deployed.play(DEPLOY, vllm_fleet_api_keys=keys).rc == 0
    assert {host: deployed.main_pids(host) for host in HOSTS} == before  # a reload keeps the main process
    assert client(deployed, HOSTS[1], keys["alice"]).models.list().data[0].id == "minimax-m2.5"
    assert deployed.play(DEPLOY).rc == 0
    assert status(f"{endpoint(deployed, HOSTS[1])}/v1/models", keys["alice"]) == 401  # revoked


def test_a_dropped_replica_leaves_the_other_running(deployed: Lab) -> None:
    before = deployed.main_pids(HOSTS[0])
    options = deployed.variables(HOSTS[0])["vllm_plan_options"]
    assert deployed.play(DEPLOY, vllm_plan_options=options | {"max_replicas": 1}).rc == 0
    kept, dropped = "vllm-minimax-m2-5-0.service", "vllm-minimax-m2-5-1.service"
    after = deployed.main_pids(HOSTS[0])
    assert after[kept] == before[kept]
    assert dropped not in after
    assert deployed.shell(HOSTS[0], f"ls /etc/systemd/system/{dropped} 2>/dev/null || true") == ""
    assert "minimax-m2-5-1" not in deployed.shell(HOSTS[0], "cat /etc/vllm-fleet/gateway/haproxy.cfg")
    assert deployed.play(DEPLOY).rc == 0
    assert deployed.main_pids(HOSTS[0]).keys() == UNITS
    assert deployed.main_pids(HOSTS[0])[kept] == before[kept]


WRONG = {
    "unknown_card": ({"minimax_card": "minimax_m9"}, ["minimax_m9", "minimax_m2_5", "lab_tiny_minimax_m2"]),
    "no_gpu": (
        {"vllm_plan_sysfs_root": "/opt/lab", "vllm_plan_nvidia_smi": "/bin/false"},
        ["No GPU was found", "10de", "lspci"],
    ),
    "does_not_fit": (
        {
            "minimax_card": "minimax_m2_5",
            "vllm_plan_accelerator": "cuda",
            "vllm_plan_topology_file": str(CAPTURES / "rtxpro6000-2x"),
        },
        ["107.2", "GiB", "What would fit"],
    ),
    "no_client_key": ({"vllm_fleet_api_keys": {}}, ["vllm_fleet_api_keys names no client key", "openssl rand -hex 32"]),
    "empty_client_key": ({"vllm_fleet_api_keys": {"alice": ""}}, ["Not usable in vllm_fleet_api_keys: alice"]),
    "no_engine_key": ({"vllm_fleet_engine_key": ""}, ["vllm_fleet_engine_key is not set", "openssl rand -hex 32"]),
    "port_that_is_none": ({"model_gateway_port": "abc"}, ["abc"]),
    "old_engine": ({"vllm_plan_vllm_version": "0.20.2"}, ["0.20.2", "0.24"]),
    "engine_without_lock": ({"vllm_plan_vllm_version": "0.30.0"}, ["There is no lock for vLLM 0.30.0", "0.32.0-cpu"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_named_before_anything_changes(deployed: Lab, name: str) -> None:
    extravars, expected = WRONG[name]
    before = deployed.main_pids(HOSTS[0])
    run = deployed.play(DEPLOY, "--limit", HOSTS[0], **extravars)
    assert run.rc != 0
    assert [words for words in expected if words not in run.paragraph] == []
    assert run.hosts("changed") == set()
    assert deployed.main_pids(HOSTS[0]) == before
    assert [key for key in inventory_keys(deployed) if key in run.output] == []


def test_a_taken_port_names_the_program_that_holds_it(deployed: Lab) -> None:
    deployed.shell(HOSTS[0], "systemd-run --unit=squatter python3 -m http.server 9001")
    try:
        run = deployed.play(DEPLOY, "--limit", HOSTS[0], vllm_plan_first_port=9001)
    finally:
        deployed.shell(HOSTS[0], "systemctl stop squatter")
    assert run.rc != 0
    assert "port 9001 by python3" in run.paragraph
    assert "squatter.service" in run.paragraph
    assert run.hosts("changed") == set()


def test_an_unreachable_host_does_not_stop_the_others(deployed: Lab, tmp_path: Path) -> None:
    more = tmp_path / "more.yml"
    more.write_text("gpu_hosts: {hosts: {gpu-gone: {ansible_host: 10.89.207.99, ansible_ssh_timeout: 5}}}\n")
    run = deployed.play(DEPLOY, extra_inventory=more)
    assert run.hosts("dark") == {"gpu-gone"}
    assert run.hosts("failures") == set()
    assert run.hosts("changed") == set()
    assert run.stats["ok"]["gpu-a"] > 20  # they were deployed to the end
    assert status(f"{endpoint(deployed, HOSTS[0])}/health") == 200


def test_teardown_leaves_nothing(deployed: Lab) -> None:
    assert deployed.play("playbooks/teardown.yml").rc == 0
    for host in HOSTS:
        assert deployed.main_pids(host) == {}
        left = deployed.shell(
            host,
            "ls -d /etc/systemd/system/vllm-* /etc/systemd/system/*.wants/vllm-* /etc/vllm-fleet /opt/vllm-fleet/* "
            "/var/lib/vllm-gateway /var/lib/vllm-fleet 2>/dev/null; getent passwd vllm || true",
        )
        # Environments, and the record of what was verified of the weights, are kept unless asked.
        assert left.replace("\\n", " ").split() == ["/opt/vllm-fleet/runtimes", "/var/lib/vllm-fleet"]
    assert deployed.play("playbooks/teardown.yml").hosts("changed") == set()


def test_a_deploy_after_teardown_works_through_a_proxy(deployed: Lab) -> None:
    assert deployed.play("playbooks/teardown.yml", teardown_runtimes=True).rc == 0
    assert deployed.shell(HOSTS[0], "ls /opt/vllm-fleet") == ""
    for host in HOSTS:
        deployed.shell(host, "rm -f /var/lib/apt/periodic/update-success-stamp; touch --date=@0 /var/lib/apt/lists")
    with forward_proxy(deployed.variables(HOSTS[0])["lab_subnet"].replace("0/24", "1")) as (proxy, asked):
        through = json.dumps({"http_proxy": proxy, "https_proxy": proxy})
        environment = f"lab_environment | combine({through}) | dict2items | selectattr('value') | items2dict"
        run = deployed.play(DEPLOY, vllm_fleet_environment="{{ " + environment + " }}")
    assert run.rc == 0
    assert any(request.startswith("GET http://") and "/debian" in request for request in asked)  # apt
    assert any(request.startswith("CONNECT ") and request.endswith(":443") for request in asked)  # pip and uv
    assert client(deployed, HOSTS[0]).models.list().data[0].id == "minimax-m2.5"
