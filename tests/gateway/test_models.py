"""Several models behind one gateway, as while a live fleet changes from one to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from conftest import Load, Replica, ask, chat, free_port, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Fleet, Gateway

OTHER = "another/model"


@pytest.fixture
def both(fleet: Fleet, tmp_path: Path) -> Iterator[Gateway]:
    """Two replicas of one model, and one of another."""
    gateway = fleet()
    more = Replica("r-9", "127.0.0.1", free_port(), tmp_path, 4, {}, OTHER)
    more.start()
    gateway.replicas.append(more)
    gateway.reload()
    wait_for(lambda: not gateway.unjudged())
    yield gateway
    more.stop()


def model_names(gateway: Gateway) -> list[str]:
    return [card["id"] for card in ask(gateway.port).json["data"]]


def test_a_request_goes_by_the_model_that_it_names(both: Gateway) -> None:
    for model in ("tiny", OTHER):
        answer = chat(both.port, 3, model=model)
        assert (answer.status, answer.json["model"]) == (200, model)
    unknown = chat(both.port, 3, model="nobody's")
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")


def test_the_model_list_has_what_is_served_at_the_moment(both: Gateway) -> None:
    assert model_names(both) == ["tiny", OTHER]
    card = ask(both.port).json["data"][1]
    assert card == {"id": OTHER, "object": "model", "created": 0, "owned_by": "vllm", "max_model_len": 2048}
    both.replicas[2].stop()
    wait_for(lambda: model_names(both) == ["tiny"])
    assert chat(both.port, 3, model=OTHER).status == 503
    assert ask(both.port, "/health", key=None).status == 200
    for replica in both.replicas[:2]:
        replica.stop()
    wait_for(lambda: model_names(both) == [])
    assert ask(both.port, "/health", key=None).status == 503


@pytest.mark.parametrize("kilobytes", [10, 100, 900])
def test_the_model_is_found_behind_a_long_prompt(both: Gateway, kilobytes: int) -> None:
    messages = [{"role": "user", "content": "x" * 1024 * kilobytes}]
    payload: dict[str, Any] = {"messages": messages, "max_tokens": 2, "model": OTHER}  # in the order of OpenAI's client
    assert ask(both.port, "/v1/chat/completions", payload).json["model"] == OTHER


def test_beyond_the_buffer_a_header_says_it_or_the_model_with_most_replicas_is_meant(both: Gateway) -> None:
    messages = [{"role": "user", "content": "x" * 2 * 1024 * 1024}]
    payload: dict[str, Any] = {"messages": messages, "max_tokens": 2}
    assert ask(both.port, "/v1/chat/completions", {**payload, "model": "tiny"}).json["model"] == "tiny"
    other = ask(both.port, "/v1/chat/completions", {**payload, "model": OTHER}, headers={"X-Model": OTHER})
    assert other.json["model"] == OTHER
    assert ask(both.port, "/v1/chat/completions", {**payload, "model": OTHER}).status == 404


def test_a_model_comes_and_another_goes_while_clients_ask(fleet: Fleet, tmp_path: Path) -> None:
    gateway = fleet(environment={"STAND_IN_TOKENS_PER_SECOND": "100"})
    more = Replica("r-9", "127.0.0.1", free_port(), tmp_path, 8, {}, OTHER)
    more.start()
    try:
        with Load(gateway.port, 8, max_tokens=20, stream=True) as load:
            gateway.replicas.append(more)
            gateway.reload()
            wait_for(lambda: chat(gateway.port, 2, model=OTHER).status == 200)
            before = len(load.answers)
            wait_for(lambda: len(load.answers) > before + 16)
        assert load.failed == []
        with Load(gateway.port, 8, max_tokens=20, stream=True, model=OTHER) as load:
            gone, gateway.replicas = gateway.replicas[:2], [more]
            gateway.reload()
            for replica in gone:
                replica.stop()
            before = len(load.answers)
            wait_for(lambda: len(load.answers) > before + 16)
        assert load.failed == []
        assert model_names(gateway) == [OTHER]
        assert not gateway.balance()  # nothing changes when nothing has
    finally:
        more.stop()
