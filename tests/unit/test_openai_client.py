"""The client's checks against a server that misbehaves on demand, and the script as systemd runs it."""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st
from openai_server import (
    CALL,
    KEY,
    MODEL,
    PATHS,
    STREAM_TEXT,
    WRONG_CALLS,
    WRONG_FORMS,
    OpenAIServer,
    stream_events,
)

from vllm_fleet.target import openai_client
from vllm_fleet.target.openai_client import (
    CHECKS,
    ENGINE_PATHS,
    NEXT_STEPS,
    WEATHER_SCHEMA,
    ChatAnswer,
    CheckError,
    CheckResult,
    Contract,
    Endpoint,
    InputError,
    error_message,
    failure_summary,
    message_text,
    process_alive,
    read_key,
    run_check,
    run_checks,
    schema_problem,
    sse_data,
    stream_chunks,
    wait_until_serving,
)

if TYPE_CHECKING:
    from pathlib import Path

UNIT = "vllm-tiny-0.service"
LOOSE_SECONDS = 8.0  # a busy machine may be slow, but a client without a total deadline would never end


PROMISED = Contract(reasoning=True, tools=True, json_schema=True)


def endpoint(server: OpenAIServer, **changes: Any) -> Endpoint:
    given = {"url": server.url, "model": MODEL, "api_key": KEY, "unit": UNIT, "contract": PROMISED}
    return Endpoint(**{**given, **changes})


def probe(fault: str | None, check: str, deadline_seconds: float = 5.0, **changes: Any) -> CheckResult:
    with OpenAIServer(fault) as server:
        return run_check(check, endpoint(server, **changes), deadline_seconds)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# --- Verdicts -------------------------------------------------------------------------------------------------------


def test_a_healthy_server_passes_every_check_in_order() -> None:
    with OpenAIServer() as server:
        results = run_checks(endpoint(server), list(CHECKS), 5)
    assert [result.check for result in results] == list(CHECKS)
    assert [result.detail for result in results if not result.ok] == []
    assert "/health" not in server.requests
    streamed = results[3]
    assert streamed.first_token_seconds is not None
    assert 0 < streamed.first_token_seconds <= streamed.seconds
    assert "4 tokens" in streamed.detail  # the usage event of the stand-in says 4
    assert {result.check for result in results if result.first_token_seconds is not None} == {
        *("chat_stream", "tool_call_stream", "tool_required")
    }
    assert "its reasoning apart from its answer" in results[2].detail
    assert f"called get_weather with {CALL['arguments']}" in results[4].detail


@pytest.mark.parametrize(
    ("fault", "check", "kind", "seen"),
    [
        ("wrong_model", "models", "not_found", "lists ['other'] and not 'tiny'"),
        ("wrong_model", "completion", "not_found", "answered 404: The model `tiny` does not exist."),
        ("engine_dead", "completion", "bad_answer", "answered 500: EngineCore encountered an issue."),
        ("engine_dead", "chat_stream", "bad_answer", "answered 500"),
        ("starting", "completion", "not_ready", "answered 503: no server is available"),
        ("starting", "key_required", "not_ready", "answered 503"),
        ("reset", "completion", "unreachable", "closed the connection without an answer"),
        ("cut", "completion", "bad_answer", "closed the connection in the middle"),
        ("garbage", "models", "bad_answer", "not a JSON object"),
        ("flood", "models", "bad_answer", "more than"),
        ("redirect", "completion", "bad_answer", "answered 302"),
        ("not_http", "completion", "bad_answer", "did not speak HTTP"),
        ("no_token", "completion", "bad_answer", "no token came back"),
        ("no_token", "chat", "bad_answer", "no token came back"),
        ("no_token", "chat_stream", "bad_answer", "no token came back"),
        ("stream_error", "chat_stream", "bad_answer", "error inside the stream: engine died"),
        ("stream_no_done", "chat_stream", "bad_answer", "before [DONE]"),
        ("stream_cut", "chat_stream", "bad_answer", "closed the connection in the middle"),
        ("stream_no_finish", "chat_stream", "bad_answer", "without a finish reason"),
        ("stream_wrong_type", "chat_stream", "bad_answer", "text/html"),
        ("unauthenticated", "key_required", "open_door", "served /v1/models to a request with no key"),
    ],
)
def test_a_failure_has_its_kind_what_was_seen_and_what_to_do_next(fault: str, check: str, kind: str, seen: str) -> None:
    result = probe(fault, check)
    assert (result.ok, result.kind) == (False, kind)
    assert seen in result.detail
    assert result.retryable == (kind in {"unreachable", "not_ready"})
    if kind in {"unreachable", "not_ready", "bad_answer"}:
        assert f"journalctl -u {UNIT}" in result.detail


@pytest.mark.parametrize("fault", ["hang", "drip", "drip_headers"])
@pytest.mark.parametrize("check", list(CHECKS))
def test_a_server_that_hangs_or_drips_ends_at_the_total_deadline(fault: str, check: str) -> None:
    result = probe(fault, check, deadline_seconds=0.4)
    assert (result.kind, result.retryable) == ("late", True)
    assert 0.4 <= result.seconds < LOOSE_SECONDS
    assert "deadline of 0.4 s" in result.detail


@pytest.mark.parametrize(("fault", "progress"), [("stream_mute", "no text"), ("stream_hang", "12 characters")])
def test_a_stream_that_stops_moving_ends_at_the_deadline_and_says_how_far_it_came(fault: str, progress: str) -> None:
    result = probe(fault, "chat_stream", deadline_seconds=0.6)
    assert result.kind == "late"
    assert progress in result.detail
    assert result.seconds < LOOSE_SECONDS


def test_a_server_that_never_accepts_ends_at_the_deadline() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(5)  # the kernel completes the handshake; nobody ever reads
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        result = run_check("models", Endpoint(url, MODEL, KEY), 0.3)
    assert result.kind == "late"
    assert "read the log of the server" in result.detail  # no unit given


def test_a_name_server_that_hangs_does_not_outlast_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait() and [])
    try:
        result = run_check("models", Endpoint("http://host.invalid:1", MODEL, KEY), 0.3)
    finally:
        release.set()
    assert result.kind == "late"
    assert result.seconds < LOOSE_SECONDS


def test_nothing_listening_is_retryable_and_a_bad_name_is_said() -> None:
    refused = run_check("models", Endpoint(f"http://127.0.0.1:{free_port()}", MODEL, KEY), 5)
    assert (refused.kind, refused.retryable) == ("unreachable", True)
    assert "refused the connection" in refused.detail
    unknown = run_check("models", Endpoint("http://host.invalid:1", MODEL, KEY), 20)  # RFC 2606: never resolves
    assert "cannot be resolved" in unknown.detail


def test_a_token_without_text_is_proof_and_its_first_token_time_is_unknown() -> None:
    result = probe("textless", "chat_stream", contract=None)
    assert (result.ok, result.first_token_seconds) == (True, None)
    assert "none of which decoded to text" in result.detail
    assert probe("textless", "completion").ok


def test_text_without_usage_is_proof_too() -> None:
    result = probe("no_usage", "completion")
    assert result.ok
    assert "an unknown number of tokens" in result.detail


def test_a_wrong_key_is_refused_at_once() -> None:
    with OpenAIServer() as server:
        result = run_check("models", endpoint(server, api_key="another"), 5)
    assert (result.kind, result.retryable) == ("refused", False)
    assert "answered 401: Unauthorized" in result.detail


def test_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    assert probe(None, "models").ok


@pytest.mark.parametrize("fault", ["leak", "garbage", "not_http", "stream_error"])
@pytest.mark.parametrize("check", list(CHECKS))
def test_a_key_that_the_server_echoes_is_not_repeated(fault: str, check: str) -> None:
    result = probe(fault, check)
    assert KEY not in repr(result)
    if check == "chat_stream":
        assert not result.ok
        assert "[key]" in result.detail or fault == "garbage"  # as JSON the garbage is no event stream
    assert KEY not in repr(Endpoint("http://h:1", MODEL, KEY))


def test_retries_are_shared_and_end() -> None:
    with OpenAIServer("starting") as server:
        results = run_checks(endpoint(server), ["models", "chat"], 5, retries=2, wait_seconds=0.01)
    assert [result.kind for result in results] == ["not_ready", "not_ready"]
    assert server.requests == ["/v1/models"] * 3 + ["/v1/chat/completions"]


def test_a_retry_that_succeeds_counts_and_a_fatal_answer_is_not_retried() -> None:
    with OpenAIServer("starting") as server:
        threading.Timer(0.3, setattr, (server, "fault", None)).start()
        assert run_checks(endpoint(server), ["completion"], 5, retries=100, wait_seconds=0.05)[0].ok
    with OpenAIServer("engine_dead") as server:
        run_checks(endpoint(server), ["completion"], 5, retries=5)
    assert server.requests == ["/v1/completions"]


def test_the_summary_names_the_url_and_says_a_shared_reason_once() -> None:
    with OpenAIServer("starting") as server:
        results = run_checks(endpoint(server), ["models", "chat"], 5)
    summary = failure_summary(endpoint(server), results)
    assert summary.startswith(f"{server.url} does not serve 'tiny'")
    assert "models, chat: " in summary
    assert summary.count("answered 503") == 1
    assert "\n" not in summary


# --- The contract ---------------------------------------------------------------------------------------------------

BROKEN = [
    (
        "leaks_tags",
        "chat, chat_stream",
        "reasoning",
        'left </think> in `content`, where clients read the answer: "so</',
    ),
    ("no_reasoning", "chat, chat_stream", "reasoning", 'which the card promises; in `content`: "<hm> Hi"'),
    ("all_reasoning", "chat, chat_stream", "reasoning", 'the answer went into `reasoning` too: "I greet. Hi"'),
    ("no_call", "tool_call, tool_call_stream, tool_named", "tools", 'called no tool, and said instead: "It is warm."'),
    ("call_markup", "tool_call, tool_call_stream, tool_required", "tools", "left a tool call's markup in `content`"),
    (
        "call_other",
        "tool_call, tool_call_stream",
        "tools",
        "called \"get_time\", and the tool offered is 'get_weather'",
    ),
    ("call_no_json", "tool_named, tool_required", "tools", 'sent the tool\'s arguments as no JSON: "city=Oslo"'),
    ("call_unfit", "tool_named, tool_required", "tools", "the tool's arguments: 'fahrenheit' is missing"),
    ("prose", "json_schema", "json_schema", 'sent its answer as no JSON: "Warm."'),
    ("form_unfit", "json_schema", "json_schema", "'city' is \"Bonn\", which is none of Oslo, Paris, Rome"),
    ("form_extra", "json_schema", "json_schema", "its answer: 'x' was not asked for"),
]


@pytest.mark.parametrize(("fault", "checks", "kind", "seen"), BROKEN)
def test_a_broken_contract_is_named_with_what_was_seen_and_what_to_do(
    fault: str, checks: str, kind: str, seen: str
) -> None:
    for check in checks.split(", "):
        result = probe(fault, check)
        assert (result.ok, result.kind, result.retryable) == (False, kind, False)
        assert seen in result.detail
        assert result.detail.endswith(
            NEXT_STEPS[kind].format(command=f"systemctl cat {UNIT}", logs=f"journalctl -u {UNIT} -n 100")
        )


def test_every_wrong_call_and_form_has_its_row() -> None:
    assert {*WRONG_CALLS, *WRONG_FORMS} <= {row[0] for row in BROKEN}


def test_an_answer_cut_in_its_reasoning_is_said() -> None:
    assert "tokens were too few to see the answer after it" in probe("cut_thinking", "chat").detail


def test_reasoning_that_nobody_promised_is_a_failure_too() -> None:
    contract = Contract(reasoning=False, tools=False, json_schema=False)
    result = probe(None, "chat", contract=contract)
    assert (result.ok, result.kind) == (False, "reasoning")
    assert "the card promises none" in result.detail
    assert probe("no_reasoning", "chat", contract=contract).ok


TOOL_CHECKS = ("tool_call", "tool_call_stream", "tool_named", "tool_required")


@pytest.mark.parametrize(
    ("contract", "not_checked"),
    [
        (PROMISED, {}),
        (
            Contract(reasoning=True, tools="forced", json_schema=True),
            dict.fromkeys(TOOL_CHECKS[:2], "only where they are forced to"),
        ),
        (
            Contract(reasoning=True, tools=False, json_schema=False),
            dict.fromkeys(TOOL_CHECKS, "promises no tool calls") | {"json_schema": "promises no JSON by a schema"},
        ),
        (None, dict.fromkeys((*TOOL_CHECKS, "json_schema"), "was not given")),
    ],
)
def test_what_cannot_be_checked_is_said_and_neither_passes_nor_fails(
    contract: Contract | None, not_checked: dict[str, str]
) -> None:
    with OpenAIServer() as server:
        results = run_checks(endpoint(server, contract=contract), list(CHECKS), 5)
    assert {result.check for result in results if result.ok is None} == set(not_checked)
    assert {result.check for result in results if result.ok} == set(CHECKS) - set(not_checked)
    for result in results:
        if result.ok is None:
            assert (result.kind, result.detail.startswith("Not checkable: ")) == ("not_checkable", True)
            assert not_checked[result.check] in result.detail


@pytest.mark.parametrize(
    ("data", "word"),
    [
        ({"reasoning": True, "tools": "sometimes", "json_schema": True}, "tools is 'sometimes'"),
        ({"reasoning": "forced", "tools": True, "json_schema": True}, "reasoning is 'forced'"),
        ({"reasoning": True}, "give json_schema, reasoning, tools"),
        ({"reasoning": True, "tools": True, "json_schema": True, "vision": True}, "has .*vision"),
    ],
)
def test_a_contract_that_no_card_has_is_refused(data: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=f"contract: .*{word}"):
        Contract.from_dict(data)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"city": "Rome", "fahrenheit": True}, None),
        ([], "is [], which is no object"),
        ({"city": "Rome", "fahrenheit": "yes"}, "'fahrenheit' is \"yes\", which is no boolean"),
        ({"city": "Rome"}, "'fahrenheit' is missing"),
    ],
)
def test_a_schema_is_held_to(value: Any, problem: str | None) -> None:
    found = schema_problem(value, WEATHER_SCHEMA, "it")
    assert found is None if problem is None else problem in str(found)


# --- Doors ----------------------------------------------------------------------------------------------------------


def test_every_exposed_path_is_tried_without_a_key() -> None:
    with OpenAIServer() as server:
        paths = (*PATHS, "/v1/responses")
        result = run_check("key_required", endpoint(server, gateway_paths=paths), 5)
    assert result.ok, result.detail
    assert server.requests == [path for path in paths for _ in range(2)]


def test_a_path_that_is_served_to_anybody_is_an_open_door() -> None:
    result = probe("serves_anything", "unknown_routes")
    assert (result.kind, "answered 200 to /v1/" in result.detail) == ("open_door", True)


def test_a_gateway_must_not_pass_on_what_only_engines_serve() -> None:
    with OpenAIServer() as server:
        exposed = (*PATHS, ENGINE_PATHS[0])
        result = run_check("unknown_routes", endpoint(server, gateway_paths=exposed), 5)
    assert result.ok, result.detail
    assert server.requests[1:] == list(ENGINE_PATHS[1:])


# --- TLS ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1 and its key, in one PEM file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "stand-in")])
    now = dt.datetime.now(dt.UTC)
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    pem, pkcs8, plain = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(built.public_bytes(pem) + key.private_bytes(pem, pkcs8, plain))
    return path


def test_tls_is_verified_with_the_given_authority(certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with OpenAIServer(tls=context) as server:
        trusted = run_checks(endpoint(server, ca_file=str(certificate)), ["models", "chat_stream"], 5)
        untrusted = run_check("models", endpoint(server), 5)
    assert [result.detail for result in trusted if not result.ok] == []
    assert (untrusted.kind, untrusted.retryable) == ("tls", False)
    assert "certificate" in untrusted.detail


def test_tls_is_verified_for_the_name_that_clients_use(certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with OpenAIServer(tls=context) as server:
        by_name = server.url.replace("127.0.0.1", "localhost")
        asked = {"ca_file": str(certificate), "url": by_name}
        assert run_check("models", endpoint(server, server_name="127.0.0.1", **asked), 5).ok
        other = run_check("models", endpoint(server, server_name="models.example.com", **asked), 5)
    assert other.kind == "tls"
    assert "models.example.com" in other.detail


def test_tls_reads_end_at_the_deadline(certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with OpenAIServer("drip", tls=context) as server:
        result = run_check("models", endpoint(server, ca_file=str(certificate)), 0.5)
    assert result.kind == "late"


def test_tls_towards_a_plain_port_is_a_tls_failure() -> None:
    with OpenAIServer() as server:
        result = run_check("models", endpoint(server, url=server.url.replace("http", "https")), 5)
    assert result.kind == "tls"


# --- Reading answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "events"),
    [
        (b"data: a\n\ndata: b\n\n", ["a", "b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        (b"data: a\r\rdata: b\r\r", ["a", "b"]),
        (b"data: a\ndata: b\ndata:\ndata:  c\n\n", ["a\nb\n\n c"]),
        (b": comment\n\n:\n\ndata:a\n\n", ["a"]),
        (b"event: x\nid: 7\nretry: 5\ndata: a\nunknown\n\n", ["a"]),
        (b"\xef\xbb\xbfdata: a\n\n", ["a"]),
        (b"data\n\n", [""]),
        ("data: h\u00e9\u2028llo\n\n".encode(), ["h\u00e9\u2028llo"]),  # U+2028 ends no line here
        (b"data: a\n\ndata: never finished\n", ["a"]),
        (b"data: never finished", []),
        (b"", []),
    ],
)
def test_events_follow_the_standard(raw: bytes, events: list[str]) -> None:
    assert list(sse_data([raw])) == events
    assert list(sse_data([bytes([byte]) for byte in raw])) == events


LINE_ENDS = st.sampled_from(["\n", "\r\n", "\r"])
TEXTS = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)


@given(
    events=st.lists(st.lists(TEXTS, min_size=1, max_size=3), max_size=5), end=LINE_ENDS, comment=TEXTS, data=st.data()
)
def test_events_do_not_depend_on_how_the_bytes_were_cut(
    events: list[list[str]], end: str, comment: str, data: st.DataObject
) -> None:
    lines = [[f":{comment}", *(f"data: {line}" for line in event), ""] for event in events]
    raw = "".join(line + end for event in lines for line in event).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=20)))
    chunks = [raw[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert list(sse_data(chunks)) == ["\n".join(event) for event in events]


def test_a_stream_is_read_up_to_its_end_mark() -> None:
    chunks = list(stream_chunks([*stream_events(), "not JSON, and never looked at"]))
    answer = ChatAnswer()
    for chunk in chunks:
        for choice in chunk["choices"]:
            answer.add(choice)
    assert (answer.reasoning, answer.content, answer.finish_reason) == ("I greet you.", "Hello", "stop")
    assert answer.text == "".join(STREAM_TEXT)
    assert chunks[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("data", [["{"], ["[1]"], ['{"object": "error", "message": "m"}'], ['{"choices": []}'], []])
def test_a_broken_stream_raises(data: list[str]) -> None:
    with pytest.raises(CheckError):
        list(stream_chunks(data))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error": {"message": "m", "code": 404}}', "m"),  # OpenAI, vLLM
        ('{"error": "Unauthorized"}', "Unauthorized"),  # vLLM's key check
        ('{"detail": "Not Found"}', "Not Found"),  # FastAPI
        ('{"object": "error", "message": "m"}', "m"),  # vLLM before 0.10
        ("<h1>503</h1>", "<h1>503</h1>"),  # HAProxy
        ('{"error": {"code": 7}}', '{"code": 7}'),
    ],
)
def test_the_message_is_found_in_an_error_body(body: str, message: str) -> None:
    assert error_message(body) == message


def test_reasoning_and_tool_calls_count_as_text() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    assert message_text({"content": None, "reasoning": "r"}) == "r"
    assert message_text({"content": "c", "reasoning_content": "r"}) == "cr"
    assert message_text({"tool_calls": [call, None, {"function": None}]}) == "f{}"
    assert message_text(None) == ""


# --- Input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"url": "127.0.0.1:8000"}, "url"),
        ({"url": "ftp://host"}, "url"),
        ({"url": "http://host:8000/v1"}, "without /v1"),
        ({"url": "http://host:port"}, "url"),
        ({"url": "http://" + "h" * 70}, "url"),
        ({"url": "http://user:secret@host:1"}, "user name"),
        ({"model": ""}, "model"),
        ({"api_key": ""}, "api_key"),
        ({"api_key": "two words"}, "api_key"),
        ({"api_key": "line\nInjected: yes"}, "api_key"),
        ({"ca_file": "/nonexistent.pem", "url": "https://host"}, "ca_file"),
        ({"ca_file": "/nonexistent.pem"}, "not https"),
        ({"server_name": "name"}, "not https"),
    ],
)
def test_bad_input_names_the_argument_and_not_the_secret(changes: dict[str, str], word: str) -> None:
    with pytest.raises(InputError, match=word) as caught:
        Endpoint(**{"url": "http://host:1", "model": MODEL, "api_key": KEY, **changes})
    for secret in (KEY, "secret", "two words", "Injected"):
        assert secret not in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n", f"VLLM_API_KEY={KEY}\n", "two words\n", f"\n{KEY}\n"])
def test_a_key_file_holds_the_bare_key_on_its_first_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\nsecond line\n")
    assert read_key(str(path)) == KEY
    path.write_text(text)
    with pytest.raises(InputError, match="bare key") as caught:
        read_key(str(path))
    assert KEY not in str(caught.value)
    path.unlink()
    with pytest.raises(InputError, match="No such file"):
        read_key(str(path))


# --- Waiting and the script -----------------------------------------------------------------------------------------


def run_script(server_url: str, tmp_path: Path, command: str, *extra: str) -> subprocess.CompletedProcess[str]:
    key_file = tmp_path / "key"
    key_file.write_text(KEY + "\n")
    arguments = [command, "--url", server_url, "--model", MODEL, "--key-file", str(key_file), *extra]
    environment = {name: value for name, value in os.environ.items() if name != "MAINPID"}
    done = subprocess.run(
        [sys.executable, "-I", openai_client.__file__, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    assert KEY not in done.stdout + done.stderr
    return done


def test_waiting_says_each_change_of_state_once() -> None:
    lines: list[str] = []
    with OpenAIServer("starting") as server:
        threading.Timer(0.3, setattr, (server, "fault", "compiling")).start()
        served = wait_until_serving(endpoint(server), 20, lines.append, interval_seconds=0.02)
    assert served
    assert server.requests.count("/v1/models") > 3  # it asked again and again, and said so once
    assert len(lines) == 3
    assert lines[0].startswith("Waiting: ")
    assert "answered 503" in lines[0]
    assert lines[1].endswith("Waiting for its first completion.")
    assert lines[2].startswith("Serving after ")
    assert server.requests.count("/v1/completions") == 1  # the slow first completion was not cut off


@pytest.mark.parametrize(
    ("fault", "model", "seen"),
    [("engine_dead", MODEL, "answered 500"), ("wrong_model", MODEL, "lists ['other']"), (None, "absent", "lists")],
)
def test_waiting_ends_at_once_on_an_answer_that_will_not_change(fault: str | None, model: str, seen: str) -> None:
    lines: list[str] = []
    with OpenAIServer(fault) as server:
        assert not wait_until_serving(endpoint(server, model=model), 60, lines.append)
    assert lines[-1].startswith("Gave up after ")
    assert seen in lines[-1]


def test_a_process_is_alive_until_it_ends_even_when_nobody_reaps_it() -> None:
    assert process_alive(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 30
    while process_alive(child.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not process_alive(child.pid)  # a zombie
    child.wait()
    assert not process_alive(child.pid)


def test_the_script_waits_until_the_server_serves(tmp_path: Path) -> None:
    with OpenAIServer() as server:
        done = run_script(server.url, tmp_path, "wait", "--deadline-seconds", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("Serving after ")


def test_the_script_is_not_fooled_by_health(tmp_path: Path) -> None:
    with OpenAIServer("hang_generation") as server:
        done = run_script(server.url, tmp_path, "wait", "--deadline-seconds", "1", "--interval-seconds", "0.1")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("Gave up at the deadline of 1 s: ")


def test_the_script_gives_up_when_the_main_process_has_ended(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    url = f"http://127.0.0.1:{free_port()}"
    options = ("--deadline-seconds", "50", "--unit", UNIT, "--main-pid", str(child.pid))
    done = run_script(url, tmp_path, "wait", *options)
    assert done.returncode == 1
    assert f"process {child.pid} ended before it served: journalctl -u {UNIT}" in done.stdout


def test_the_script_prints_checks_as_a_table_or_json(tmp_path: Path) -> None:
    with OpenAIServer("unauthenticated") as server:
        table = run_script(server.url, tmp_path, "check")
        as_json = run_script(server.url, tmp_path, "check", "--format", "json", "--checks", "models,completion")
    assert table.returncode == 1
    assert [line.split()[1] for line in table.stdout.splitlines()] == [
        *("ok", "ok", "ok", "ok", "-", "-", "-", "-", "-", "FAILED", "ok")
    ]
    assert as_json.returncode == 0
    assert [(row["check"], row["ok"]) for row in json.loads(as_json.stdout)] == [("models", True), ("completion", True)]


def test_the_script_takes_the_contract_from_a_plan(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"model": {"contract": {"reasoning": True, "tools": "forced", "json_schema": True}}}))
    with OpenAIServer() as server:
        good = run_script(server.url, tmp_path, "check", "--plan", str(plan), "--gateway-paths", "/v1/models,/v1/x")
        server.fault = "prose"
        bad = run_script(server.url, tmp_path, "check", "--plan", str(plan), "--checks", "json_schema")
        plan.write_text('{"model": {}}')
        old = run_script(server.url, tmp_path, "check", "--plan", str(plan))
    assert (good.returncode, bad.returncode, old.returncode) == (0, 1, 2), good.stdout + good.stderr
    assert [line.split()[1] for line in good.stdout.splitlines()].count("-") == 2
    assert "on /v1/models, /v1/x" in good.stdout
    assert "sent its answer as no JSON" in bad.stdout
    assert "holds no contract of its model" in old.stderr


@pytest.mark.parametrize(
    ("url", "extra", "word"),
    [
        ("localhost", [], "url"),
        ("http://localhost:1", ["--deadline-seconds", "nan"], "deadline-seconds"),
        ("http://localhost:1", ["--deadline-seconds", "0"], "deadline-seconds"),
        ("http://localhost:1", ["--checks", "health"], "unknown check 'health'"),
    ],
)
def test_the_script_refuses_bad_input_with_exit_code_2(tmp_path: Path, url: str, extra: list[str], word: str) -> None:
    done = run_script(url, tmp_path, "check", *extra)
    assert done.returncode == 2
    assert word in done.stderr
    assert "Traceback" not in done.stderr
