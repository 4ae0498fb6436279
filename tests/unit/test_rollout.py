"""What a rollout decides: who changes and who makes room, who goes back, whether a gate passes, who holds the lock."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_fleet import rollout
from vllm_fleet.target import gateway_admin

ME = {"user": "alice", "controller": "ops-1"}
HOLDER = {**ME, "pid": 7, "since": "2026-12-01T10:00:00Z", "playbook": "rollout.yml", "started": "1"}


def replica(name: str, gpus: str = "", port: int = 8001) -> dict[str, Any]:
    return {
        "name": name,
        "unit": f"vllm-{name}.service",
        "gpus": list(gpus),
        "bind_address": "10.0.0.1",
        "port": port,
        "max_num_seqs": 8,
        "max_model_len": 100,
    }


def plan(*replicas: dict[str, Any], model: str = "m") -> dict[str, Any]:
    return {
        "model": {"served_name": model, "id": f"o/{model}", "revision": "c" * 40},
        "vllm_version": "1",
        "replicas": list(replicas),
    }


def present(entry: dict[str, Any], release: str = "r1", **changed: Any) -> dict[str, Any]:
    checksum = f"{entry['unit']}@{release}"
    known = {"unit": entry["unit"], "installed": checksum, "applied": checksum, "release": release, "served": release}
    known |= {"active": "active", "up_seconds": 5.0, "restarts": 0, "measured": None, "key_id": "k", "replica": entry}
    return known | {"model": plan()["model"], "vllm_version": "1", "runtime": "/r", "weights": "/w"} | changed


def host(*replicas: dict[str, Any], **changed: Any) -> dict[str, Any]:
    known = {"current": "r1", "previous": "r0", "releases": ["r2", "r1", "r0"], "units": {}}
    return known | {"replicas": {entry["replica"]["name"]: entry for entry in replicas}} | changed


def units(release: str, *names: str) -> dict[str, str | None]:
    return {f"vllm-{name}.service": f"vllm-{name}.service@{release}" for name in names}


TWO = (replica("m-0", "0123", 8001), replica("m-1", "4567", 8002))
EIGHT = replica("k-0", "01234567", 8001)


def test_a_host_that_is_as_it_should_be_has_nothing_to_do() -> None:
    state = host(*map(present, TWO))
    todo = rollout.steps(state, plan(*TWO), units("r1", "m-0", "m-1"))
    assert todo == {"steps": [], "removed": []}
    assert rollout.phase(state, todo, []) == "steady"
    assert rollout.phase(state, todo, ["m-0"]) == "serving"  # a run was broken off before it was put back


def test_an_upgrade_takes_one_replica_after_another_and_nobody_makes_room() -> None:
    state = host(*map(present, TWO))
    todo = rollout.steps(state, plan(*TWO), units("r2", "m-0", "m-1"))
    assert [(step["replica"]["name"], step["displaces"]) for step in todo["steps"]] == [("m-0", []), ("m-1", [])]
    assert rollout.phase(state, todo, []) == "serving"
    assert rollout.sentence(todo["steps"][0]) == "m-0 is switched (its unit changes)"


def test_one_wide_replica_becomes_two_and_back() -> None:
    narrow = rollout.steps(host(present(EIGHT)), plan(*TWO), units("r2", "m-0", "m-1"))
    assert [(step["replica"]["name"], step["displaces"]) for step in narrow["steps"]] == [("m-0", ["k-0"]), ("m-1", [])]
    assert narrow["removed"] == []
    wide = rollout.steps(host(*map(present, TWO)), plan(EIGHT), units("r2", "k-0"))
    assert [(step["replica"]["name"], step["displaces"]) for step in wide["steps"]] == [("k-0", ["m-0", "m-1"])]


def test_two_of_one_model_become_two_of_another_while_one_always_serves() -> None:
    others = (replica("n-0", "0123", 8001), replica("n-1", "4567", 8002))
    todo = rollout.steps(host(*map(present, TWO)), plan(*others), units("r2", "n-0", "n-1"))
    assert [(step["replica"]["name"], step["displaces"]) for step in todo["steps"]] == [
        ("n-0", ["m-0"]),
        ("n-1", ["m-1"]),
    ]


def test_a_dropped_replica_leaves_and_the_other_is_left_alone() -> None:
    todo = rollout.steps(host(*map(present, TWO)), plan(TWO[0]), units("r1", "m-0"))
    assert todo == {"steps": [], "removed": ["m-1"]}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"applied": None}, "its unit was installed and has not come to serve"),
        ({"active": "failed"}, "it is failed"),
        ({"installed": "other"}, "its unit changes"),
    ],
)
def test_what_a_broken_run_left_is_taken_up(changed: dict[str, Any], why: str) -> None:
    (step,) = rollout.steps(host(present(TWO[0], **changed)), plan(TWO[0]), units("r1", "m-0"))["steps"]
    assert step["why"] == why


def test_a_unit_of_which_nothing_is_known_makes_room() -> None:
    stranger = present(EIGHT) | {"replica": None}
    state = host() | {"replicas": {"old": stranger}}
    (step,) = rollout.steps(state, plan(TWO[0]), units("r1", "m-0"))["steps"]
    assert step["displaces"] == ["old"]


def test_a_bare_host_is_idle() -> None:
    todo = rollout.steps(host(), plan(*TWO), {})
    assert [step["why"] for step in todo["steps"]] == ["it is not there yet"] * 2
    assert rollout.phase(host(), todo, []) == "idle"


layouts = st.integers(1, 8).flatmap(
    lambda count: st.just(tuple(replica(f"{count}x{i}", "01234567"[i::count], 8001 + i) for i in range(count)))
)


@given(layouts, layouts)
def test_any_layout_becomes_any_other_with_nobody_in_the_way(
    before: tuple[dict[str, Any], ...], after: tuple[dict[str, Any], ...]
) -> None:
    todo = rollout.steps(host(*map(present, before)), plan(*after), units("r2", *(entry["name"] for entry in after)))
    running = {entry["name"]: entry for entry in before}
    for step in todo["steps"]:
        running.pop(step["replica"]["name"], None)
        for name in step["displaces"]:
            del running[name]  # each at most once, and only what is there
        gpus = {gpu for entry in running.values() for gpu in entry["gpus"]}
        ports = {entry["port"] for entry in running.values()}
        assert not gpus & set(step["replica"]["gpus"])
        assert step["replica"]["port"] not in ports
        running[step["replica"]["name"]] = step["replica"]
    for name in todo["removed"]:
        del running[name]
    assert list(running) == [entry["name"] for entry in after]


# --- Going back -------------------------------------------------------------------------------------------------------


def test_a_replica_that_failed_goes_back_and_the_rest_stays() -> None:
    before = host(*map(present, TWO))
    now = host(present(TWO[0], "r2"), present(TWO[1], "r2", applied="vllm-m-1.service@r1", active="failed"))
    assert rollout.restoration(before, now, ["m-1"]) == {
        "remove": [],
        "restore": [{"replica": TWO[1], "release": "r1"}],
    }


def test_a_layout_that_failed_goes_back_as_a_whole() -> None:
    now = host(present(TWO[0], "r2"), present(TWO[1], "r2", applied=None, active="failed"))
    assert rollout.restoration(host(present(EIGHT)), now) == {
        "remove": ["vllm-m-0.service", "vllm-m-1.service"],
        "restore": [{"replica": EIGHT, "release": "r1"}],
    }


def test_nothing_goes_back_where_nothing_was_touched() -> None:
    state = host(*map(present, TWO))
    assert rollout.restoration(state, copy.deepcopy(state)) == {"remove": [], "restore": []}


@pytest.mark.parametrize(
    ("state", "target"),
    [
        (host(*map(present, TWO)), "r0"),
        (host(present(TWO[0], "r2"), present(TWO[1])), "r1"),  # begun and not ended
        (host(present(TWO[0], "r1", applied=None)), "r1"),
        (host(present(TWO[0]), previous=None), None),
        (host(present(TWO[0]), previous="pruned"), None),
    ],
)
def test_the_release_to_go_back_to(state: dict[str, Any], target: str | None) -> None:
    assert rollout.rollback_target(state) == target


def test_a_named_release_must_be_there() -> None:
    assert rollout.rollback_target(host(), "r2") == "r2"
    assert rollout.rollback_target(host(), "r9") is None


# --- Gateways ---------------------------------------------------------------------------------------------------------


def server(model: str = "m", **changed: Any) -> dict[str, Any]:
    return {"model": model, "drained": False, "up": True, "status": "UP"} | changed


def test_the_last_one_of_a_model_is_not_drained() -> None:
    servers = {"a.m-0": server(), "b.m-0": server(), "c.k-0": server("k")}
    assert gateway_admin.refusal(servers, ["a.m-0"], 1) == ""
    assert gateway_admin.refusal(servers, ["c.k-0"], 1) == "nobody would be left to serve k"
    assert gateway_admin.refusal(servers, ["c.k-0"], 0) == ""
    servers["b.m-0"]["drained"] = True
    servers["b.m-0"]["status"] = "DRAIN"
    assert gateway_admin.refusal(servers, ["a.m-0"], 1) == (
        "nobody would be left to serve m; these take none: b.m-0 (DRAIN)"
    )
    servers["a.m-0"]["up"] = False  # it takes nothing away
    assert gateway_admin.refusal(servers, ["a.m-0"], 1) == ""


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from("mk")), min_size=1, max_size=8), st.data())
def test_whoever_is_drained_one_is_left(kinds: list[tuple[bool, bool, str]], data: st.DataObject) -> None:
    servers = {f"h{i}.r": server(model, up=up, drained=out) for i, (up, out, model) in enumerate(kinds)}
    names = data.draw(st.lists(st.sampled_from(sorted(servers)), unique=True, min_size=1))

    def takers(of: dict[str, dict[str, Any]]) -> set[str]:
        return {entry["model"] for entry in of.values() if entry["up"] and not entry["drained"]}

    if not gateway_admin.refusal(servers, names, 1):
        assert takers({name: entry for name, entry in servers.items() if name not in names}) == takers(servers)


def test_drained_replicas_are_those_of_the_host_itself() -> None:
    gateways = [{"servers": {"gpu.a.m-0": server(drained=True), "gpu.m-1": server(drained=True)}}, {"skipped": True}]
    assert rollout.drained(gateways, "gpu") == ["m-1"]
    assert rollout.drained(gateways, "gpu.a") == ["m-0"]


STATE = """1
# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_iweight srv_time_since_last_change
3 model-m 77 gw.r-0 127.0.0.1 2 8 1 1 1
3 model-m 78 gw.r-1 127.0.0.1 0 0 1 1 3
"""
STAT = """# pxname,svname,qcur,qmax,scur,smax,slim,stot,bin,bout,dreq,dresp,ereq,econ,eresp,wretr,wredis,status,weight,
clients,FRONTEND,,,1,1,524187,1,100,0,0,0,0,,,,,OPEN,,
model-m,gw.r-0,0,0,1,1,,1,100,0,,0,,0,0,0,0,DRAIN,1,
model-m,gw.r-1,2,0,0,0,,0,0,0,,0,,0,0,0,0,DOWN,1,
model-m,BACKEND,0,0,1,1,52419,1,100,0,0,0,,0,0,0,0,DOWN,0,
"""
SESS = (
    "0x555b898020c0: proto=tcpv4 src=10.0.0.5:42984 fe=clients be=model-m srv=gw.r-0 ts=00 epoch=0 age=1h2m calls=2\n"
    "0x555b898020c1: proto=tcpv4 src=10.0.0.6:1 fe=clients be=model-m srv=gw.r-1 ts=00 epoch=0 age=3s calls=2\n"
    "0x555b89920340: proto=unix_stream src=unix:1 fe=GLOBAL be=<NONE> srv=<none> ts=00 epoch=0 age=0s calls=1\n"
)


def test_what_haproxy_says_of_its_servers() -> None:
    servers = gateway_admin.read_servers(STATE, STAT, {"gw.r-0": "m"})
    assert servers["gw.r-0"] == {
        "backend": "model-m",
        "model": "m",
        "drained": True,
        "up": True,
        "running": 1,
        "queued": 0,
        "status": "DRAIN",
    }
    assert (servers["gw.r-1"]["up"], servers["gw.r-1"]["queued"], servers["gw.r-1"]["model"]) == (False, 2, None)


def test_running_requests_are_named() -> None:
    requests = gateway_admin.read_requests(SESS, ["gw.r-0"])
    assert requests == [{"server": "gw.r-0", "client": "10.0.0.5:42984", "age_seconds": 3720}]
    assert rollout.running_requests([{"item": "gw", "requests": requests}], 2) == (
        "2 running requests (from 10.0.0.5:42984 through gw, for 3720 s; 1 more that came before the gateway's last "
        "reload or past it)"
    )
    assert rollout.running_requests([], None).startswith("an unknown number of running requests")


# --- The gate ---------------------------------------------------------------------------------------------------------


def speed(tokens_per_second: float, first_token_seconds: float = 0.05, model: str = "m") -> dict[str, Any]:
    return {"model": model, "tokens_per_second": tokens_per_second, "first_token_seconds": first_token_seconds}


def test_one_that_is_slower_than_tolerated_fails_with_its_numbers() -> None:
    (sentence,) = rollout.gate(speed(200), speed(149), 25)
    assert sentence == "it brings 149.0 tokens/s where the former release brought 200.0 (tolerated: 150.0)"
    (sentence,) = rollout.gate(speed(200, 1.0), speed(200, 1.3), 25)
    assert sentence.startswith("its first token takes 1.300 s where it took 1.000 s")


@given(st.floats(0.1, 1e5), st.floats(0, 10), st.floats(0, 90))
def test_one_that_is_as_fast_passes(tokens: float, first: float, tolerance: float) -> None:
    assert rollout.gate(speed(tokens, first), speed(tokens, first), tolerance) == []
    assert rollout.gate(speed(tokens, first), speed(tokens * (1.01 - tolerance / 100), first), tolerance) == []


def test_without_a_former_measurement_of_the_same_model_nothing_is_compared() -> None:
    assert rollout.gate(None, speed(1), 25) == rollout.gate({}, speed(1), 25) == []
    assert rollout.gate(speed(200, model="k"), speed(1), 25) == []


def test_a_journal_is_cut_to_what_says_why() -> None:
    lines = ["Loading", '  File "x.py", line 1', "ValueError: no such parser", "Loading", "ValueError: no such parser"]
    assert rollout.journal(lines) == ["ValueError: no such parser"]
    assert rollout.journal(["a", "b"]) == ["a", "b"]
    assert len(rollout.journal([f"error {i} " + "x" * 999 for i in range(99)])) == rollout.JOURNAL_LINES


# --- The lock ---------------------------------------------------------------------------------------------------------


def test_our_own_dead_run_is_taken_over_and_nobody_elses() -> None:
    place = {"path": "/l", "host": "gw"}
    assert rollout.lock_refusal(HOLDER, ME, alive=False, **place) == ""
    refused = rollout.lock_refusal(HOLDER, ME, alive=True, **place)
    assert "alice on ops-1 (process 7) has been at it since 2026-12-01T10:00:00Z with rollout.yml" in refused
    for other in ({**ME, "user": "bob"}, {**ME, "controller": "ops-2"}):
        refused = rollout.lock_refusal(HOLDER, other, alive=False, **place)
        assert "remove /l on gw" in refused


# --- Status -----------------------------------------------------------------------------------------------------------


def seen(state: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {"state": state, "health": [], "wanted": plan(*TWO), "weights": "/w", "drained": []} | changed


def drift(found: dict[str, Any]) -> list[str]:
    return [sentence for row in rollout.status({"a": found})["rows"] for sentence in row["drift"]]


def test_a_host_as_the_inventory_has_it_has_no_drift() -> None:
    told = rollout.status({"a": seen(host(*map(present, TWO)))})
    assert told["drift"] == 0
    assert told["lines"][1].split() == ["a", "m-0", "r1", "m", "(o/m@cccccccc)", "1", "active", "5s", "-"]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"unreachable": True}, "the host does not answer"),
        (seen(host()), "it is planned and not there"),
        (seen(host(present(TWO[0], "r2"), present(TWO[1]))), "the host's current release is r1"),
        (seen(host(present(TWO[0], applied=None), present(TWO[1]))), "a switch was begun and not ended"),
        (seen(host(present(TWO[0], active="failed"), present(TWO[1]))), "its unit is failed"),
        (seen(host(*map(present, TWO)), drained=["m-1"]), "it is drained"),
        (seen(host(*map(present, TWO)), wanted=plan(TWO[0])), "the inventory does not plan it"),
        (seen(host(*map(present, TWO)), weights="/v"), "its weights is /w, planned: /v"),
        (seen(host(*map(present, TWO)), wanted=plan(TWO[0], {**TWO[1], "args": ["-x"]})), "changed in the plan: args"),
        (seen(host(*map(present, TWO)), wanted={"error": "no GPU\nx"}), "it cannot be planned for: no GPU"),
        (
            seen(host(*map(present, TWO)), health=[{"name": "m-0", "state": "hung", "reason": "no token"}]),
            "it is hung: no token",
        ),
    ],
)
def test_what_differs_is_said(found: dict[str, Any], said: str) -> None:
    assert any(sentence.startswith(said) for sentence in drift(found)), drift(found)


@pytest.mark.parametrize(
    ("seconds", "said"), [(None, "-"), (12, "12s"), (420, "7m"), (18720, "5h12m"), (273600, "3d4h")]
)
def test_uptime(seconds: float | None, said: str) -> None:
    assert rollout.uptime(seconds) == said
