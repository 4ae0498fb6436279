"""What a client sees: answers as the engine gave them, at the time it gave them, and errors that say what to do."""

from __future__ import annotations

import socket
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import openai
import pytest
from conftest import ENGINE_KEY, KEYS, MODEL, ask, chat, wait_for

if TYPE_CHECKING:
    from conftest import Fleet


def test_a_chat_is_answered_and_the_log_shows_who_asked_but_not_what(fleet: Fleet) -> None:
    gateway = fleet()
    answer = chat(gateway.port)
    assert answer.json["choices"][0]["message"]["reasoning"].startswith("The question")
    line = wait_for(lambda: [line for line in gateway.log.splitlines() if "status=200" in line])[0]
    assert "client=alice POST /v1/chat/completions" in line
    assert "replica=gw.r-" in line
    assert [secret for secret in ("prompt", ENGINE_KEY, *KEYS.values()) if secret in gateway.log] == []


def test_tokens_arrive_one_by_one_as_the_engine_sends_them(fleet: Fleet) -> None:
    gateway = fleet(count=1, environment={"STAND_IN_TOKENS_PER_SECOND": "20"})
    answer = chat(gateway.port, 40, stream=True)
    assert len(answer.events) == 40  # the role, then a token each; the tag between reasoning and answer is none
    gaps = [later - earlier for earlier, later in zip(answer.seconds[1:], answer.seconds[2:], strict=False)]
    assert len(gaps) >= 35  # each token in a read of its own: nothing was gathered on the way
    assert statistics.median(gaps) > 0.04


def test_streams_do_not_hold_each_other_up(fleet: Fleet) -> None:
    gateway = fleet(places=32, environment={"STAND_IN_TOKENS_PER_SECOND": "10"})
    with ThreadPoolExecutor(32) as clients:
        answers = list(clients.map(lambda _: chat(gateway.port, 20, stream=True), range(32)))
    assert {answer.status for answer in answers} == {200}
    assert all(len(answer.seconds) > 15 for answer in answers)
    assert max(answer.seconds[0] for answer in answers) < min(answer.seconds[-1] for answer in answers)  # all at once


def test_a_long_prefill_survives_and_an_endless_silence_ends(fleet: Fleet) -> None:
    gateway = fleet(count=1, environment={"STAND_IN_PREFILL_SECONDS": "3"}, model_gateway_timeout_seconds=5)
    assert chat(gateway.port, 4, stream=True).status == 200  # silent for longer than HAProxy's usual second or ten
    gateway.replicas[0].misbehave("hang")
    answer = chat(gateway.port, 4)
    assert answer.status == 504
    assert answer.error["code"] == "timeout"


def test_a_client_that_leaves_frees_its_place(fleet: Fleet) -> None:
    gateway = fleet(count=1, places=1)
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        body = b'{"model":"%s","prompt":"a","max_tokens":100000,"ignore_eos":true,"stream":true}' % MODEL.encode()
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s"
            % (KEYS["alice"].encode(), len(body), body)
        )
        assert client.recv(12) == b"HTTP/1.1 200"
        assert gateway.replicas[0].running == 1
    wait_for(lambda: gateway.replicas[0].running == 0)
    assert chat(gateway.port).status == 200


@pytest.mark.parametrize(
    "path", ["/metrics", "/invocations", "/v1/embeddings", "/v1/models/", "/v1/../metrics", "//v1/models", "/V1/models"]
)
def test_paths_that_are_not_on_the_list_are_refused_and_never_reach_an_engine(fleet: Fleet, path: str) -> None:
    gateway = fleet(count=1)
    answer = ask(gateway.port, path)
    assert (answer.status, answer.error["code"]) == (404, "unknown_url")
    assert gateway.servers()["r-0"]["stot"] == "0"


@pytest.mark.parametrize("key", [None, "", "nobody-was-given-this-key", ENGINE_KEY, f"x {KEYS['alice']}"])
def test_strangers_are_refused_and_the_engines_key_opens_nothing(fleet: Fleet, key: str | None) -> None:
    answer = ask(fleet(count=1).port, key=key)
    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")


def test_a_request_that_is_too_large_is_refused_before_it_has_been_sent(fleet: Fleet) -> None:
    gateway = fleet(count=1, model_gateway_max_request_mib=1)
    limit = 1024 * 1024
    assert ask(gateway.port, "/v1/completions", b"x" * limit).status == 400  # it reached the engine: no JSON
    answer = ask(gateway.port, "/v1/completions", b"x" * (limit + 1))
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    assert "1 MiB" in answer.error["message"]
    announced = ask(gateway.port, "/v1/completions", b"", headers={"Content-Length": str(50 * limit)})
    assert announced.status == 413
    assert gateway.servers()["r-0"]["stot"] == "1"


def test_clients_that_send_on_still_learn_why(fleet: Fleet) -> None:
    gateway = fleet(count=1, model_gateway_max_request_mib=1)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key=KEYS["alice"], max_retries=0)
    with pytest.raises(openai.APIStatusError, match="larger than 1 MiB") as refused:
        client.completions.create(model=MODEL, prompt="x" * 20 * 1024 * 1024)
    assert refused.value.status_code == 413


def test_a_request_of_unknown_length_is_refused(fleet: Fleet) -> None:
    answer = ask(fleet(count=1).port, "/v1/completions", iter([b'{"model":"tiny",', b'"prompt":"a"}']))
    assert (answer.status, answer.error["code"]) == (411, "length_required")


def test_metrics_are_at_a_port_of_their_own(fleet: Fleet) -> None:
    gateway = fleet()
    chat(gateway.port)
    page = ask(gateway.metrics_port, "/metrics", key=None)
    assert page.status == 200
    for name in (
        'haproxy_server_status{proxy="model-tiny",server="gw.r-1",state="UP"} 1',
        'haproxy_backend_current_queue{proxy="model-tiny"} 0',
        'haproxy_frontend_http_responses_total{proxy="clients",code="2xx"} 1',
    ):
        assert name in page.body.decode()
    assert ask(gateway.metrics_port, "/v1/models", key=KEYS["alice"]).status == 404
