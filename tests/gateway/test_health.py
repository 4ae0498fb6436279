"""Who gets requests: the health agents' word, and whether an engine accepts connections. Nothing else."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from conftest import BACKEND, INTERVAL_SECONDS, Agent, Load, chat, wait_for

if TYPE_CHECKING:
    from conftest import Fleet, Gateway


def said(gateway: Gateway, index: int, word: str) -> None:
    """Let an agent say something of its replica and wait until the gateway has heard it."""
    agent, name = gateway.agents[index], gateway.replicas[index].name
    agent.words[name] = word
    asked = agent.asked
    wait_for(lambda: agent.asked >= asked + 2)


def test_the_agents_word_takes_a_replica_out_and_brings_it_back(fleet: Fleet) -> None:
    gateway = fleet()
    said(gateway, 0, "down # hung: no token for 40 s")
    assert gateway.status(gateway.replicas[0]) == "DOWN (agent)"
    assert "hung: no token for 40 s" in gateway.log  # the reason is in the gateway's journal too
    assert {chat(gateway.port, 2).status for _ in range(6)} == {200}
    assert gateway.replicas[0].finished == 0
    said(gateway, 0, "up")
    assert gateway.status(gateway.replicas[0]) == "UP"


def test_a_word_that_is_neither_changes_nothing(fleet: Fleet) -> None:
    gateway = fleet()
    said(gateway, 0, "undecided")
    assert gateway.status(gateway.replicas[0]) == "UP"
    said(gateway, 0, "down # hung")
    said(gateway, 0, "undecided")
    assert gateway.status(gateway.replicas[0]) == "DOWN (agent)"


def test_an_agent_that_is_away_takes_no_replica_out_and_puts_none_back(fleet: Fleet) -> None:
    gateway = fleet()
    said(gateway, 1, "down # hung")
    port = int(gateway.variables["model_gateway_health_port"])
    for agent in gateway.agents:
        agent.close()
    wait_for(lambda: all(row["agent_status"] == "L4CON" for row in gateway.servers().values()))
    assert [gateway.status(replica) for replica in gateway.replicas] == ["UP", "DOWN (agent)"]
    assert chat(gateway.port, 2).status == 200
    gateway.agents[1] = Agent(gateway.replicas[1].address, port)
    wait_for(lambda: gateway.status(gateway.replicas[1]) == "UP")
    gateway.agents[1].close()


def test_an_engine_that_is_gone_is_out_without_its_agent(fleet: Fleet) -> None:
    gateway = fleet()
    for agent in gateway.agents:
        agent.close()
    gateway.replicas[0].stop()
    wait_for(lambda: gateway.status(gateway.replicas[0]) == "DOWN")
    gateway.replicas[0].start()
    wait_for(lambda: gateway.status(gateway.replicas[0]) == "UP")


def test_no_request_fails_on_an_engine_that_is_gone_before_the_gateway_knows(fleet: Fleet) -> None:
    gateway = fleet(count=3)
    gateway.replicas[0].stop()
    statuses = [chat(gateway.port, 2).status for _ in range(12)]
    assert gateway.servers()["r-0"]["wredis"] != "0"  # some were sent to it, and then to another
    assert set(statuses) == {200}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_that_an_engine_has_begun_is_not_sent_to_another(fleet: Fleet, stream: bool) -> None:  # noqa: FBT001
    gateway = fleet(environment={"STAND_IN_TOKENS_PER_SECOND": "10"})
    with ThreadPoolExecutor(1) as clients:
        running = clients.submit(chat, gateway.port, 50, stream=stream)
        busy = wait_for(lambda: [replica for replica in gateway.replicas if replica.running])[0]
        busy.stop(signal.SIGKILL)
        if stream:  # its answer had begun: it ends before its end, which clients take for an error
            with pytest.raises(Exception, match="IncompleteRead"):
                running.result(10)
        else:
            assert running.result(10).status == 502
            assert running.result().error["code"] == "replica_failed"
    other = next(replica for replica in gateway.replicas if replica is not busy)
    assert other.finished == 0


def test_a_full_replica_stays_in(fleet: Fleet) -> None:
    gateway = fleet(count=1, places=4, environment={"STAND_IN_TOKENS_PER_SECOND": "200"})
    with Load(gateway.port, 6, max_tokens=100) as load:
        agent = gateway.agents[0]
        for _ in range(5):
            asked = agent.asked
            wait_for(lambda: agent.asked > asked)  # noqa: B023  called at once
            assert gateway.status(gateway.replicas[0]) == "UP"
    assert load.failed == []
    assert len(load.answers) > 6


def test_a_check_costs_an_agent_one_short_request_for_each_replica(fleet: Fleet) -> None:
    gateway = fleet(count=1)
    agent = gateway.agents[0]
    before = agent.asked
    wait_for(lambda: agent.asked >= before + 3, seconds=10 * INTERVAL_SECONDS)
    assert gateway.replicas[0].finished == 0  # no completion was asked for


def test_what_is_drained_or_down_is_so_after_a_reload(fleet: Fleet) -> None:
    gateway = fleet(count=3)
    said(gateway, 0, "down # hung")
    gateway.command(f"set server {BACKEND}/gw.r-1 state drain")
    gateway.reload()
    deadline = time.monotonic() + 4 * INTERVAL_SECONDS
    while time.monotonic() < deadline:
        assert gateway.status(gateway.replicas[0]).startswith("DOWN")
        assert gateway.status(gateway.replicas[1]).startswith("DRAIN")
        assert chat(gateway.port, 2).status == 200
    assert [bool(replica.finished) for replica in gateway.replicas] == [False, False, True]
