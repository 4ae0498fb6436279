"""With a header that names the conversation, it stays where its prefix is cached, at every gateway alike."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from conftest import Gateway, ask, chat, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Fleet

HEADER = "X-Session-ID"
# A request counts for its replica until HAProxy has closed it, a moment after its client has the answer. Where a test
# asks one thing after the other, that moment must not make a replica look busy.
STICKY = {"model_gateway_affinity_header": HEADER, "model_gateway_affinity_load_percent": 1000}
CONVERSATIONS = [f"conversation-{index}" for index in range(24)]


def replica_of(gateway: Gateway, conversation: str) -> str:
    """Which replica answers: each names its weights."""
    answer = ask(gateway.port, headers={HEADER: conversation})
    assert answer.status == 200
    return str(answer.json["data"][0]["root"]).removeprefix("/weights/")


def placed(gateway: Gateway) -> dict[str, str]:
    return {conversation: replica_of(gateway, conversation) for conversation in CONVERSATIONS}


def test_a_conversation_stays_and_others_spread(fleet: Fleet) -> None:
    gateway = fleet(count=3, **STICKY)
    before = placed(gateway)
    assert placed(gateway) == before
    assert set(before.values()) == {"r-0", "r-1", "r-2"}


def test_only_the_conversations_of_a_replica_that_is_down_move_and_they_come_back(fleet: Fleet) -> None:
    gateway = fleet(count=3, **STICKY)
    before = placed(gateway)
    gateway.agents[0].words["r-0"] = "down # hung"
    wait_for(lambda: "DOWN" in gateway.status(gateway.replicas[0]))
    during = placed(gateway)
    assert "r-0" not in during.values()
    assert {name for name in CONVERSATIONS if during[name] != before[name]} == {
        name for name in CONVERSATIONS if before[name] == "r-0"
    }
    gateway.agents[0].words.clear()
    wait_for(lambda: gateway.status(gateway.replicas[0]) == "UP")
    assert placed(gateway) == before


def test_every_gateway_sends_a_conversation_to_the_same_replica(fleet: Fleet, tmp_path: Path) -> None:
    gateway = fleet(count=3, **STICKY)
    (tmp_path / "other").mkdir()
    port = int(gateway.variables["model_gateway_health_port"])
    # Its list is in another order, as the inventory of another site may be.
    other = Gateway(tmp_path / "other", gateway.replicas[::-1], port, **STICKY).start()
    try:
        assert placed(other) == placed(gateway)
    finally:
        other.stop()


def test_a_conversation_goes_elsewhere_when_its_replica_has_far_more_to_do(fleet: Fleet) -> None:
    gateway = fleet(
        environment={"STAND_IN_TOKENS_PER_SECOND": "20"},
        model_gateway_affinity_header=HEADER,
        model_gateway_affinity_load_percent=150,
    )
    with ThreadPoolExecutor(8) as clients:
        hot = [clients.submit(chat, gateway.port, 40, headers={HEADER: "one"}) for _ in range(8)]
        wait_for(lambda: sum(replica.running for replica in gateway.replicas) == 8)
        assert sorted(replica.running for replica in gateway.replicas) == [2, 6]  # 150 % of four, and the rest
        assert {future.result().status for future in hot} == {200}


def test_requests_without_the_header_go_to_who_has_little_to_do(fleet: Fleet) -> None:
    gateway = fleet(count=3, environment={"STAND_IN_TOKENS_PER_SECOND": "20"}, model_gateway_affinity_header=HEADER)
    with ThreadPoolExecutor(12) as clients:
        running = [clients.submit(chat, gateway.port, 60) for _ in range(12)]
        wait_for(lambda: sum(replica.running for replica in gateway.replicas) == 12)
        assert max(replica.running for replica in gateway.replicas) <= 8
        assert {future.result().status for future in running} == {200}


def test_without_affinity_the_header_changes_nothing_and_the_least_busy_is_asked(fleet: Fleet) -> None:
    gateway = fleet(environment={"STAND_IN_TOKENS_PER_SECOND": "20"})
    with ThreadPoolExecutor(8) as clients:
        running = [clients.submit(chat, gateway.port, 40, headers={HEADER: "one"}) for _ in range(8)]
        wait_for(lambda: sum(replica.running for replica in gateway.replicas) == 8)
        assert [replica.running for replica in gateway.replicas] == [4, 4]
        assert {future.result().status for future in running} == {200}
    assert Counter(replica_of(gateway, "one") for _ in range(10)) == {"r-0": 5, "r-1": 5}
