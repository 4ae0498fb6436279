"""Too much: of one client, and of all together. Who is turned away learns why, and when to come back."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from conftest import KEYS, ask, chat, wait_for

if TYPE_CHECKING:
    from conftest import Fleet


SLOW = {"STAND_IN_TOKENS_PER_SECOND": "10"}


def test_a_client_over_its_rate_is_told_to_wait_and_others_are_not(fleet: Fleet) -> None:
    own = {"bob": {"requests_per_minute": 8}}
    gateway = fleet(model_gateway_requests_per_minute=5, model_gateway_client_limits=own)
    statuses = {name: [ask(gateway.port, key=key).status for _ in range(10)] for name, key in KEYS.items()}
    assert statuses == {"alice": [200] * 5 + [429] * 5, "bob": [200] * 8 + [429] * 2}
    answer = ask(gateway.port)
    assert (answer.error["type"], answer.headers["retry-after"]) == ("rate_limit_error", "10")


def test_a_client_with_too_many_at_once_is_told_to_wait_and_others_are_not(fleet: Fleet) -> None:
    gateway = fleet(model_gateway_concurrent_requests=2, environment=SLOW)
    with ThreadPoolExecutor(6) as clients:
        running = [clients.submit(chat, gateway.port, 20) for _ in range(2)]
        wait_for(lambda: sum(replica.running for replica in gateway.replicas) == 2)
        refused = chat(gateway.port)
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "10"
        assert chat(gateway.port, 2, key=KEYS["bob"]).status == 200
        assert [future.result().status for future in running] == [200, 200]
    assert chat(gateway.port, 2).status == 200


def test_a_limit_of_one_client_limits_nobody_else(fleet: Fleet) -> None:
    gateway = fleet(count=1, model_gateway_client_limits={"bob": {"requests_per_minute": 1}})
    assert [ask(gateway.port, key=KEYS["bob"]).status for _ in range(2)] == [200, 429]
    assert {ask(gateway.port).status for _ in range(20)} == {200}


def test_when_all_places_are_taken_requests_wait_and_when_the_queue_is_full_they_are_refused(fleet: Fleet) -> None:
    gateway = fleet(places=2, model_gateway_queue_length=3, environment=SLOW)
    with ThreadPoolExecutor(8) as clients:
        running = [clients.submit(chat, gateway.port, 30) for _ in range(4)]
        wait_for(lambda: sum(replica.running for replica in gateway.replicas) == 4)
        waiting = [clients.submit(chat, gateway.port, 5) for _ in range(3)]
        queue = b'backend_current_queue{proxy="model-tiny"} 3'
        wait_for(lambda: queue in ask(gateway.metrics_port, "/metrics").body)
        refused = chat(gateway.port, 5)
        assert not any(future.done() for future in [*running, *waiting])  # at once
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "overloaded", "10")
        # The engines never had more than their places, and whoever waited was served.
        assert max(replica.counters()["num_requests_waiting"] for replica in gateway.replicas) == 0
        assert {future.result().status for future in [*running, *waiting]} == {200}


def test_who_waits_too_long_for_a_place_is_told_to_come_back(fleet: Fleet) -> None:
    gateway = fleet(count=1, places=1, model_gateway_queue_timeout_seconds=1, environment=SLOW)
    with ThreadPoolExecutor(1) as clients:
        running = clients.submit(chat, gateway.port, 40)
        wait_for(lambda: gateway.replicas[0].running == 1)
        start = time.monotonic()
        refused = chat(gateway.port, 5)
        assert time.monotonic() - start > 0.9
        assert not running.done()
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "overloaded", "10")
        assert running.result().status == 200


def test_when_no_replica_is_there_requests_are_refused_at_once(fleet: Fleet) -> None:
    gateway = fleet()
    for agent in gateway.agents:
        agent.words = {replica.name: "down # stopped" for replica in gateway.replicas}
    wait_for(lambda: all("DOWN" in gateway.status(replica) for replica in gateway.replicas))
    refused = chat(gateway.port)
    assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "overloaded", "10")
    assert ask(gateway.port, "/health", key=None).status == 503
