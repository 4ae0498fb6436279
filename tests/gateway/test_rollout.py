"""What a rollout does at a gateway: drain, tell what still runs, put back; and the gate's measurement."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import ENGINE_KEY, MODEL, REPOSITORY, Load, Replica, chat, wait_for

from vllm_fleet import rollout
from vllm_fleet.target import speed_probe
from vllm_fleet.target.openai_client import Endpoint

if TYPE_CHECKING:
    from conftest import Fleet, Gateway


def module(name: str, **arguments: Any) -> dict[str, Any]:
    """Run one of our modules as a play does."""
    command = [
        *(Path(sys.executable).with_name("ansible"), "localhost", "--inventory", "localhost,", "--connection", "local"),
        *("--extra-vars", f"ansible_python_interpreter={sys.executable}", "--one-line"),
        *("--module-name", name, "--args", json.dumps(arguments)),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout[done.stdout.index("=>") + 2 :]))


def servers(gateway: Gateway, *replicas: Replica, **arguments: Any) -> dict[str, Any]:
    place = {"socket": str(gateway.folder / "admin.sock"), "backends": str(gateway.folder / "backends.json")}
    return module("gateway_servers", servers=[f"gw.{replica.name}" for replica in replicas], **place, **arguments)


def idle(replica: Replica, seconds: float) -> dict[str, Any]:
    return module("engine_idle", address=replica.address, port=replica.port, deadline_seconds=seconds)


def test_a_replica_is_switched_while_clients_ask(fleet: Fleet) -> None:
    gateway = fleet(environment={"STAND_IN_TOKENS_PER_SECOND": "100"})
    replica = gateway.replicas[0]
    with Load(gateway.port, 8, max_tokens=50, stream=True) as load:
        wait_for(lambda: len(load.answers) > 8)
        assert servers(gateway, replica, state="drained", keep=1)["changed"]
        assert idle(replica, 60)["idle"]
        assert replica.running == 0
        assert not servers(gateway, replica, state="drained", keep=1)["changed"]
        refused = servers(gateway, gateway.replicas[1], state="drained", keep=1)
        assert f"nobody would be left to serve {MODEL}; these take none: gw.r-0 (DRAIN" in refused["refused"]
        assert not refused["changed"]
        replica.stop()
        gateway.reload()  # a drain outlives it
        time.sleep(1)
        replica.start()
        assert servers(gateway)["servers"]["gw.r-0"]["drained"]
        back = servers(gateway, replica, state="ready", wait_seconds=30)
        assert (back["changed"], back["late"]) == (True, [])
        finished = replica.finished
        wait_for(lambda: replica.finished > finished)
    assert load.failed == []


def test_what_outlasts_the_deadline_is_named_and_finishes(fleet: Fleet) -> None:
    gateway = fleet(count=1)
    (replica,) = gateway.replicas
    with ThreadPoolExecutor(1) as clients:
        running = clients.submit(chat, gateway.port, 200, stream=True)
        wait_for(lambda: replica.running == 1)
        replica.misbehave("hang")  # it lasts until that is over
        drained = servers(gateway, replica, state="drained")
        assert [request["client"].rpartition(":")[0] for request in drained["requests"]] == ["127.0.0.1"]
        still = idle(replica, 1)
        assert (still["idle"], still["running"]) == (False, 1)
        assert servers(gateway, replica, state="ready", wait_seconds=30)["late"] == []
        replica.misbehave("")
        assert len(running.result().events) == 200


def test_an_engine_that_is_gone_is_idle_and_a_gateway_that_is_gone_has_nobody(fleet: Fleet) -> None:
    gateway = fleet(count=1)
    gateway.replicas[0].stop()
    assert idle(gateway.replicas[0], 1)["idle"]
    gateway.stop()
    assert servers(gateway)["servers"] == {}


def measured(replica: Replica) -> dict[str, Any]:
    endpoint = Endpoint(f"http://{replica.address}:{replica.port}", MODEL, ENGINE_KEY)
    return speed_probe.measure(endpoint, streams=4, tokens=16, deadline_seconds=30).as_dict()


@pytest.mark.parametrize("pace", ["20", "50"])
def test_the_gate_catches_the_slow_and_passes_the_good(fleet: Fleet, pace: str) -> None:
    gateway = fleet(count=1, environment={"STAND_IN_TOKENS_PER_SECOND": pace})
    (replica,) = gateway.replicas
    before = measured(replica)
    assert before["token_seconds"] == pytest.approx(1 / float(pace), rel=0.2)
    assert rollout.gate(before, measured(replica), 25) == []
    replica.misbehave("slow")
    complaints = rollout.gate(before, measured(replica), 25)
    assert any("tokens/s" in complaint for complaint in complaints)


def test_one_that_fails_is_not_measured(fleet: Fleet) -> None:
    gateway = fleet(count=1)
    gateway.replicas[0].misbehave("fail")
    with pytest.raises(speed_probe.SpeedError, match="answered 500"):
        measured(gateway.replicas[0])
