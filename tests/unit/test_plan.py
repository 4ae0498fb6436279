"""Whole plans: the hosts a user has, what they get, and why the others were refused."""

import copy
import itertools
import json
import re
import time
from typing import Any

import pytest
from hosts import A100, FIXTURES, H100, H200, RTX_PRO_6000, host, nvlink, published, two_sockets
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_fleet import catalog, memory, topology
from vllm_fleet.layout import Layout, reject_by_blocks, reject_by_shape
from vllm_fleet.plan import BadInputError, NoFeasibleLayoutError, make_plan

M2_5 = catalog.read_card("minimax_m2_5")
TINY = catalog.read_card("lab_tiny_minimax_m2")
REFERENCE = topology.read(FIXTURES / "captures" / "rtxpro6000-8x-2nodes")


def planned(host_facts: dict[str, Any], card: dict[str, Any] = M2_5, **options: Any) -> dict[str, Any]:
    return make_plan(host_facts, card, options).to_dict()


def refused(host_facts: dict[str, Any], card: dict[str, Any] = M2_5, **options: Any) -> NoFeasibleLayoutError:
    with pytest.raises(NoFeasibleLayoutError) as caught:
        make_plan(host_facts, card, options)
    return caught.value


def shape(plan: dict[str, Any]) -> tuple[int, bool, int]:
    """Tensor parallel, expert parallel, replicas; the rest must be 1."""
    layout = plan["layout"]
    assert layout["pipeline_parallel"] == layout["data_parallel"] == layout["decode_context_parallel"] == 1
    return layout["tensor_parallel"], layout["expert_parallel"], layout["replicas"]


def why_not(plan: dict[str, Any], layout: Layout) -> tuple[str, str]:
    found = [(r["rule"], r["reason"]) for r in plan["rejected"] if r["layout"] == layout.to_dict()]
    assert len(found) == 1
    return found[0]


def flag(replica: dict[str, Any], name: str) -> str:
    return str(replica["args"][replica["args"].index(name) + 1])


# The reference host: 8 x RTX PRO 6000 on two sockets


def test_reference_host_gets_two_tp4_replicas_each_on_its_own_node() -> None:
    plan = planned(REFERENCE)
    nodes = {node["id"]: node["cpus"] for node in REFERENCE["numa_nodes"]}
    assert shape(plan) == (4, False, 2)
    assert [r["gpu_indices"] for r in plan["replicas"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [r["numa_nodes"] for r in plan["replicas"]] == [[0], [1]]
    assert [r["cpus"] for r in plan["replicas"]] == [nodes[0], nodes[1]]
    assert {r["memory_policy"] for r in plan["replicas"]} == {"bind"}
    assert [r["gpus"] for r in plan["replicas"]] == [
        [gpu["uuid"] for gpu in REFERENCE["gpus"][:4]],
        [gpu["uuid"] for gpu in REFERENCE["gpus"][4:]],
    ]


def test_published_dual_socket_host_without_affinities_is_split_by_its_links_and_not_pinned() -> None:
    plan = planned(published("rtxpro6000-8x-dual-cpu-phb"))
    assert shape(plan) == (4, False, 2)
    assert [r["gpu_indices"] for r in plan["replicas"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert {(tuple(r["numa_nodes"]), r["cpus"], r["memory_policy"]) for r in plan["replicas"]} == {((), None, "none")}
    assert any("NUMA node of its GPUs is unknown" in sentence for sentence in plan["explanation"])


def test_why_eight_ranks_were_not_taken() -> None:
    rule, reason = why_not(planned(REFERENCE), Layout(tensor_parallel=8))
    assert rule == "fp8_block_divisibility"
    assert "1536 / 8 = 192 is not a multiple of the 128-wide FP8 block; needs expert parallel." in reason
    rule, reason = why_not(planned(REFERENCE), Layout(tensor_parallel=8, expert_parallel=True))
    assert rule == "numa"
    assert "socket" in reason
    assert "nobody has published" in reason


def test_why_two_ranks_were_not_taken() -> None:
    """214.3 / 2 = 107.2 GiB of weights do not go into 0.95 x 95.0 = 90.2."""
    rule, reason = why_not(planned(REFERENCE), Layout(tensor_parallel=2))
    assert rule == "memory"
    assert "107.2 GiB of weights" in reason
    assert "0.95 x 95.0 = 90.2" in reason


def test_memory_of_the_reference_plan_adds_up() -> None:
    """53.7 GiB of weights as logged; weights, overhead and KV cache make the fraction of what CUDA sees."""
    for replica in planned(REFERENCE)["replicas"]:
        expected = replica["expected"]
        total = (97_887 - REFERENCE["gpus"][0]["memory_reserved_mib"]) / 1024
        parts = expected["weights_gib"] + expected["overhead_gib"] + expected["kv_cache_gib"]
        assert expected["weights_gib"] == pytest.approx(53.75, rel=0.002)
        assert parts == pytest.approx(total * replica["gpu_memory_utilization"], abs=0.02)
        assert expected["kv_cache_tokens"] == pytest.approx(expected["kv_cache_gib"] * 2**30 / 63_488, rel=0.001)
        assert expected["full_length_requests"] == pytest.approx(
            expected["kv_cache_tokens"] / replica["max_model_len"], abs=0.01
        )
        assert replica["max_model_len"] == 196_608


def test_all_reduce_is_told_as_it_is() -> None:
    sentences = " ".join(planned(REFERENCE)["explanation"])
    assert "62 layers all-reduces twice" in sentences
    assert "does not remove" in sentences


def test_names_ports_and_addresses_are_apart() -> None:
    first, second = planned(REFERENCE, bind_address="10.0.0.5", first_port=9001)["replicas"]
    assert (first["name"], first["unit"]) == ("minimax-m2-5-0", "vllm-minimax-m2-5-0.service")
    assert (first["port"], second["port"]) == (9001, 9002)
    assert (first["internal_port"], second["internal_port"]) == (21_000, 22_000)
    assert flag(second, "--port") == "9002"
    assert flag(second, "--host") == second["bind_address"] == "10.0.0.5"
    assert second["env"]["VLLM_PORT"] == "22000"


def test_command_line_and_environment_of_the_reference_plan() -> None:
    replica = planned(REFERENCE)["replicas"][1]
    assert flag(replica, "--served-model-name") == "minimax-m2.5"
    assert flag(replica, "--tensor-parallel-size") == "4"
    assert flag(replica, "--gpu-memory-utilization") == str(replica["gpu_memory_utilization"])
    assert flag(replica, "--max-model-len") == "196608"
    assert flag(replica, "--tool-call-parser") == "minimax_m2"
    assert flag(replica, "--reasoning-parser") == "minimax_m2"
    assert flag(replica, "--moe-backend") == "triton"
    assert {"--enable-auto-tool-choice", "--disable-custom-all-reduce"} <= set(replica["args"])
    assert not {"--trust-remote-code", "--kv-cache-dtype", "--enable-expert-parallel"} & set(replica["args"])
    env = replica["env"]
    assert env["CUDA_VISIBLE_DEVICES"] == ",".join(replica["gpus"])
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert env["VLLM_USE_DEEP_GEMM"] == "0"
    assert env["HF_HUB_OFFLINE"] == env["TRANSFORMERS_OFFLINE"] == env["VLLM_NO_USAGE_STATS"] == "1"
    assert all(isinstance(text, str) for text in [*replica["args"], *env.values()])


def test_reviewed_code_is_handed_to_the_roles_that_compare_it() -> None:
    reviewed = {"modeling_minimax_m2.py": "ab" * 32}
    card = M2_5 | {"engine": M2_5["engine"] | {"trust_remote_code": reviewed}}
    plan = planned(REFERENCE, card)
    assert plan["model"]["remote_code"] == reviewed
    assert all("--trust-remote-code" in replica["args"] for replica in plan["replicas"])
    assert planned(REFERENCE)["model"]["remote_code"] == {}


def test_what_the_card_promises_is_in_the_plan_for_the_checks() -> None:
    assert planned(REFERENCE)["model"]["contract"] == {"reasoning": True, "tools": True, "json_schema": True}
    card = M2_5 | {"contract": TINY["contract"]}
    assert planned(REFERENCE, card)["model"]["contract"] == {"reasoning": True, "tools": "forced", "json_schema": True}


def test_no_card_sends_an_engine_online() -> None:
    card = M2_5 | {"engine": M2_5["engine"] | {"env": {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}}}
    env = planned(REFERENCE, card)["replicas"][0]["env"]
    assert env["HF_HUB_OFFLINE"] == env["TRANSFORMERS_OFFLINE"] == "1"


def test_each_limit_strikes_before_the_one_around_it() -> None:
    replica = planned(REFERENCE)["replicas"][0]
    start, engine = replica["expected"]["start_seconds"], int(replica["env"]["VLLM_ENGINE_READY_TIMEOUT_S"])
    assert start < engine < replica["start_deadline_seconds"]
    assert int(flag(replica, "--shutdown-timeout")) < replica["stop_deadline_seconds"]


def test_start_follows_the_measured_disk() -> None:
    """214.3 GiB at 2,000 MiB/s take 110 s, at 500 MiB/s 439 s; 120 s of compiling come on top."""
    fast = copy.deepcopy(REFERENCE)
    fast["checks"]["disk_read_mib_s"] = 2000
    assert planned(fast)["replicas"][0]["expected"]["start_seconds"] == 110 + 120
    assert planned(REFERENCE)["replicas"][0]["expected"]["start_seconds"] == 439 + 120


# Peer to peer over PCIe


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [("ok", {"NCCL_P2P_LEVEL": "PHB"}), ("broken", {"NCCL_P2P_DISABLE": "1"}), ("untested", {})],
)
def test_nccl_follows_the_measured_verdict(verdict: str, expected: dict[str, str]) -> None:
    facts = two_sockets()
    facts["checks"]["p2p"]["verdict"] = verdict
    plan = planned(facts)
    env = plan["replicas"][0]["env"]
    assert {k: v for k, v in env.items() if k.startswith("NCCL_P2P")} == expected
    assert any("broken" in w for w in plan["warnings"]) == (verdict == "broken")


def test_a_broken_verdict_turns_off_every_way_that_goes_peer_to_peer_and_states_the_price() -> None:
    """T33: with NCCL_P2P_DISABLE alone two ranks still hang in custom all-reduce, while FlashInfer tunes kernels."""
    half = copy.deepcopy(M2_5)
    half["shape"]["num_hidden_layers"] = 31
    facts = two_sockets(2)
    facts["checks"]["p2p"] = {"verdict": "broken", "detail": "a copy between GPU 0000:08:00.0 and GPU 1 hung"}
    plan = planned(facts, half)
    assert "--disable-custom-all-reduce" in plan["replicas"][0]["args"]
    assert plan["replicas"][0]["env"]["NCCL_P2P_DISABLE"] == "1"
    assert any("a copy between GPU 0000:08:00.0 and GPU 1 hung" in warning for warning in plan["warnings"])
    assert any("The price:" in sentence for sentence in plan["explanation"])


def test_the_owner_may_overrule_the_verdict() -> None:
    facts = two_sockets()
    facts["checks"]["p2p"]["verdict"] = "ok"
    forbidden = planned(facts, peer_to_peer="forbid")
    assert forbidden["replicas"][0]["env"]["NCCL_P2P_DISABLE"] == "1"
    assert not any("broken" in warning for warning in forbidden["warnings"])
    facts["checks"]["p2p"]["verdict"] = "broken"
    allowed = planned(facts, peer_to_peer="allow")
    assert "NCCL_P2P_DISABLE" not in allowed["replicas"][0]["env"]
    assert any("Expect a hang" in warning for warning in allowed["warnings"])
    with pytest.raises(BadInputError, match="measured, allow, forbid"):
        planned(facts, peer_to_peer="maybe")


def test_tuned_expert_tables_are_the_cards_business() -> None:
    """T47: none by default, since their gain must be measured; a card may name a folder of them."""
    assert "VLLM_TUNED_CONFIG_FOLDER" not in planned(two_sockets())["replicas"][0]["env"]
    tuned = copy.deepcopy(M2_5)
    tuned["engine"]["env"] = {"VLLM_TUNED_CONFIG_FOLDER": "/etc/vllm-fleet/moe"}
    assert planned(two_sockets(), tuned)["replicas"][0]["env"]["VLLM_TUNED_CONFIG_FOLDER"] == "/etc/vllm-fleet/moe"


def test_two_pcie_ranks_keep_custom_all_reduce_unless_transfers_are_redirected() -> None:
    """A card of 2 x 60 GiB per replica, which two GPUs hold."""
    half = copy.deepcopy(M2_5)
    half["shape"]["num_hidden_layers"] = 31
    plain, redirected = two_sockets(2), two_sockets(2)
    redirected["pcie"]["iommu"] = "translated"
    assert "--disable-custom-all-reduce" not in planned(plain, half)["replicas"][0]["args"]
    assert "--disable-custom-all-reduce" in planned(redirected, half)["replicas"][0]["args"]


def test_nvlink_needs_no_pcie_settings() -> None:
    replica = planned(nvlink(8, nodes=2))["replicas"][0]
    assert "--disable-custom-all-reduce" not in replica["args"]
    assert not any(name.startswith("NCCL_P2P") for name in replica["env"])


def test_hopper_keeps_experts_off_deepgemm_and_leaves_it_the_other_matrices() -> None:
    """Measured on an H200: 4.9 ms a step against 5.1 for one request, 9.1 against 10.0 for 128."""
    (replica,) = planned(nvlink(4, H200))["replicas"]
    assert flag(replica, "--moe-backend") == "triton"
    assert "VLLM_USE_DEEP_GEMM" not in replica["env"]


# Other hosts


def test_eight_h100_get_two_replicas_each_on_one_node() -> None:
    plan = planned(topology.read(FIXTURES / "captures" / "h100-8x-80gb"))
    assert shape(plan) == (4, False, 2)
    assert [r["numa_nodes"] for r in plan["replicas"]] == [[0], [1]]
    assert why_not(plan, Layout(tensor_parallel=8, expert_parallel=True))[0] == "throughput"


def test_four_h100_get_one_replica_whose_context_fits_the_cache() -> None:
    """A public TP4 start at 0.95 held 307,184 tokens without CUDA graphs: the full 196,608 fit, and not twice."""
    plan = planned(topology.read(FIXTURES / "captures" / "h100-4x-80gb"))
    (replica,) = plan["replicas"]
    assert shape(plan) == (4, False, 1)
    assert replica["max_model_len"] == 196_608
    assert 196_608 < replica["expected"]["kv_cache_tokens"] < 307_184


def test_a_context_that_does_not_fit_is_cut_and_said() -> None:
    """72 GiB cards: (73728 - 470) / 1024 = 71.54 GiB x 0.93 = 66.53; less 53.72 and 4.13 leaves 147,000 tokens."""
    plan = planned(nvlink(4, ("NVIDIA H72", "10de:ffff", "9.0", 73_728, 470)))
    (replica,) = plan["replicas"]
    assert 140_000 < replica["max_model_len"] < 150_000
    assert replica["max_model_len"] <= replica["expected"]["kv_cache_tokens"]
    assert any(f"cut from 196,608 to {replica['max_model_len']:,}" in s for s in plan["explanation"])


def test_two_rtx_pro_6000_are_refused_with_the_arithmetic_and_what_would_fit() -> None:
    error = refused(topology.read(FIXTURES / "captures" / "rtxpro6000-2x"))
    assert "2 x NVIDIA RTX PRO 6000" in str(error)
    assert "107.2 GiB of weights" in str(error)
    assert "0.95 x 95.0 = 90.2" in str(error)
    assert "What would fit: 4 x NVIDIA RTX PRO 6000 Blackwell Server Edition as TP4" in str(error)
    assert any(reason.startswith("TP1 (memory)") for reason in error.reasons)


def test_unlike_gpus_never_share_a_replica() -> None:
    links = {f"{a}-{b}": "NODE" for a, b in itertools.combinations(range(4), 2)}
    error = refused(host([RTX_PRO_6000, RTX_PRO_6000, H100, H100], [[0]] * 4, links))
    assert "Unlike GPUs" in str(error)
    assert "2 x NVIDIA RTX PRO 6000" in str(error)
    assert "2 x NVIDIA H100" in str(error)


def test_each_kind_of_gpu_gets_its_own_replicas() -> None:
    """Four of each: two TP4 replicas, each with the fraction of its own kind."""
    links = {f"{a}-{b}": "NODE" for a, b in itertools.combinations(range(8), 2)}
    plan = planned(host([RTX_PRO_6000] * 4 + [H100] * 4, [[0]] * 8, links))
    assert [(r["gpu_indices"], r["gpu_memory_utilization"]) for r in plan["replicas"]] == [
        ([0, 1, 2, 3], 0.95),
        ([4, 5, 6, 7], 0.94),
    ]
    # One model length for all, because a client may reach either.
    assert len({r["max_model_len"] for r in plan["replicas"]}) == 1


def test_one_replica_goes_to_the_kind_of_gpu_that_holds_the_model() -> None:
    """Four 48 GiB cards come first on the bus, and four of them do not hold M2.5."""
    small = ("NVIDIA L40S", "10de:26b9", "8.9", 46_068, 600)
    links = {f"{a}-{b}": "NODE" for a, b in itertools.combinations(range(8), 2)}
    plan = planned(host([small] * 4 + [RTX_PRO_6000] * 4, [[0]] * 8, links), max_replicas=1)
    assert [r["gpu_indices"] for r in plan["replicas"]] == [[4, 5, 6, 7]]


def test_host_without_gpu_says_what_was_looked_for() -> None:
    error = refused(topology.read(FIXTURES / "captures" / "no-gpu"))
    assert "10de" in str(error)
    assert "nvidia-smi" in str(error)


def test_host_without_driver_is_judged_from_a_table() -> None:
    plan = planned(topology.read(FIXTURES / "captures" / "no-driver"))
    assert shape(plan) == (4, False, 2)
    assert any("not to serve with" in warning for warning in plan["warnings"])


def test_mig_is_refused_with_advice() -> None:
    facts = two_sockets(4)
    for gpu in facts["gpus"]:
        gpu["mig"] = {"enabled": True, "instances": [{}, {}]}
    error = refused(facts)
    assert "MIG mode with 2 instance(s)" in str(error)
    assert "nvidia-smi -i 0 -mig 0" in str(error)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"unified_memory": True}, "shares its memory"),
        ({"memory_total_mib": None, "pci_device": "10de:ffff"}, "memory size is unknown"),
        ({"compute_capability": "7.0"}, "older than 7.5"),
        ({"problems": [{"severity": "error", "code": "xid", "message": "It fell off the bus."}]}, "fell off the bus"),
    ],
)
def test_a_gpu_that_cannot_serve_is_left_out_and_named(change: dict[str, Any], told: str) -> None:
    facts = two_sockets()
    facts["gpus"][1].update(change)
    plan = planned(facts)
    assert [r["gpu_indices"] for r in plan["replicas"]] == [[4, 5, 6, 7]]
    assert any(warning.startswith("GPU 1 ") and told in warning for warning in plan["warnings"])


def test_a_wrong_driver_does_not_take_its_gpus_out_of_the_plan() -> None:
    facts = two_sockets()
    wrong = {"severity": "error", "code": "proprietary_module", "message": "Blackwell needs the open module."}
    for gpu in facts["gpus"]:
        gpu["problems"] = [wrong]
    assert planned(facts) == planned(two_sockets())


def test_unreported_reserve_is_said() -> None:
    facts = two_sockets()
    for gpu in facts["gpus"]:
        gpu["memory_reserved_mib"] = None
    assert any("979 MiB per GPU are assumed" in warning for warning in planned(facts)["warnings"])


def test_where_every_group_spans_sockets_narrow_ones_still_win() -> None:
    """Eight GPUs that reach each other over SYS only, on nodes that nobody knows."""
    links = {f"{a}-{b}": "SYS" for a, b in itertools.combinations(range(8), 2)}
    plan = planned(host([RTX_PRO_6000] * 8, [[]] * 8, links))
    assert shape(plan) == (4, False, 2)
    assert any("2 replica(s) span NUMA nodes" in warning for warning in plan["warnings"])


def test_three_gpus_are_cut_into_stages_when_nothing_else_fits() -> None:
    """48 heads go over three ranks, 8 KV heads do not; 21 of 62 layers on each GPU do."""
    plan = planned(host([RTX_PRO_6000] * 3, [[0]] * 3, {"0-1": "NODE", "0-2": "NODE", "1-2": "NODE"}))
    assert (plan["layout"]["tensor_parallel"], plan["layout"]["pipeline_parallel"]) == (1, 3)
    assert flag(plan["replicas"][0], "--pipeline-parallel-size") == "3"


# Versions


@pytest.mark.parametrize(
    ("version", "told"), [("0.23.1", "0.24.0"), ("0.11", "0.24.0"), ("latest", "not a vLLM version")]
)
def test_unsupported_versions_are_refused(version: str, told: str) -> None:
    with pytest.raises(BadInputError, match=told):
        make_plan(REFERENCE, M2_5, {"vllm_version": version})


def test_version_below_the_cards_minimum_is_refused() -> None:
    card = copy.deepcopy(M2_5)
    card["engine"]["minimum_version"] = "0.31.0"
    with pytest.raises(BadInputError, match=r"0\.30\.0 is older than 0\.31\.0, which the card minimax_m2_5 needs"):
        make_plan(REFERENCE, card, {"vllm_version": "0.30.0"})


def test_before_0_29_eight_ranks_do_not_start_at_all() -> None:
    rule, reason = why_not(planned(REFERENCE, vllm_version="0.28.0"), Layout(tensor_parallel=8))
    assert rule == "fp8_block_divisibility"
    assert "refine" not in reason


# Options


def test_latency_takes_the_widest_group_on_nvlink_and_one_node_on_pcie() -> None:
    assert shape(planned(nvlink(8, nodes=2), objective="latency")) == (8, True, 1)
    assert shape(planned(two_sockets(), objective="latency")) == (4, False, 2)


def test_context_takes_the_layout_that_holds_most() -> None:
    """Weights once instead of twice: one TP8+EP holds more tokens than two TP4."""
    wide, narrow = planned(two_sockets(), objective="context"), planned(two_sockets())
    assert shape(wide) == (8, True, 1)
    held = [sum(r["expected"]["kv_cache_tokens"] for r in plan["replicas"]) for plan in (wide, narrow)]
    assert held[0] > held[1]


def test_expected_concurrency_can_ask_for_a_wider_group_on_nvlink() -> None:
    """Two TP4 on H100 hold 560,000 tokens: 64 requests of 2,048, not 300. TP8+EP holds more than twice as much."""
    assert shape(planned(nvlink(8, nodes=2), expected_concurrency=64)) == (4, False, 2)
    plan = planned(nvlink(8, nodes=2), expected_concurrency=300)
    assert shape(plan) == (8, True, 1)
    assert why_not(plan, Layout(tensor_parallel=4))[0] == "concurrency"


def test_concurrency_never_sends_a_replica_across_sockets() -> None:
    assert shape(planned(two_sockets(), expected_concurrency=2000)) == (4, False, 2)


def test_sequences_follow_concurrency_up_to_the_engines_default() -> None:
    assert [planned(REFERENCE, expected_concurrency=n)["replicas"][0]["max_num_seqs"] for n in (1, 400)] == [128, 200]
    assert planned(REFERENCE, max_num_seqs=32)["replicas"][0]["max_num_seqs"] == 32


def test_min_context_is_a_requirement() -> None:
    small = nvlink(4, ("NVIDIA H72", "10de:ffff", "9.0", 73_728, 470))
    assert planned(small, min_context=100_000)["replicas"][0]["max_model_len"] >= 100_000
    assert "190,000 tokens" in str(refused(small, min_context=190_000))
    with pytest.raises(BadInputError, match="196,608"):
        make_plan(small, M2_5, {"min_context": 200_000})


def test_max_replicas_and_keep_free_gpus_leave_gpus_alone() -> None:
    choices: list[dict[str, Any]] = [{"max_replicas": 1}, {"keep_free_gpus": 1}, {"keep_free_gpus": 4}]
    for options in choices:
        plan = planned(REFERENCE, **options)
        assert [r["gpu_indices"] for r in plan["replicas"]] == [[0, 1, 2, 3]], options
    assert "keep_free_gpus" in str(refused(REFERENCE, keep_free_gpus=5))


@pytest.mark.parametrize("name", ["5", REFERENCE["gpus"][5]["uuid"], REFERENCE["gpus"][5]["pci_bus_id"]])
def test_an_excluded_gpu_leaves_the_other_replica_exactly_as_it_was(name: str) -> None:
    plan = planned(REFERENCE, exclude_gpus=[name])
    assert plan["replicas"] == planned(REFERENCE)["replicas"][:1]
    assert any("GPU 5" in warning for warning in plan["warnings"])


def test_losing_a_gpu_of_the_first_replica_keeps_the_second_under_its_name() -> None:
    assert planned(REFERENCE, exclude_gpus=[0])["replicas"] == planned(REFERENCE)["replicas"][1:]


def test_served_model_name_names_units_too() -> None:
    replica = planned(REFERENCE, served_model_name="Coder_v2")["replicas"][0]
    assert (replica["name"], flag(replica, "--served-model-name")) == ("coder-v2-0", "Coder_v2")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"objectiv": "latency"}, "Unknown plan option 'objectiv'"),
        ({"objective": "speed"}, "throughput, latency, context"),
        ({"accelerator": "tpu"}, "cuda, cpu"),
        ({"expected_concurrency": 0}, "whole number from 1"),
        ({"max_num_seqs": "many"}, "whole number"),
        ({"max_replicas": True}, "whole number"),
        ({"exclude_gpus": "3"}, "list"),
        ({"exclude_gpus": ["GPU-nope"]}, "no such GPU"),
        ({"bind_address": "gpu-a"}, "IPv4 address"),
        ({"served_model_name": 'my "model"'}, "letters, digits"),
        ({"bind_address": "0.0.0.0"}, "never listen on all addresses"),  # noqa: S104  refused, that is the test
        ({"bind_address": "fd00::1"}, "IPv4 address"),
        ({"first_port": 80}, "whole number from 1024"),
        ({"served_model_name": " "}, "non-empty"),
    ],
)
def test_nonsense_options_are_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInputError, match=told):
        make_plan(REFERENCE, M2_5, options)


def test_null_options_and_numbers_as_text_are_taken_as_ansible_gives_them() -> None:
    assert planned(REFERENCE, min_context=None, first_port="8001") == planned(REFERENCE)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop("gpus"), "'gpus' is missing"),
        (lambda t: t.update(schema=9), "schema is 9"),
        (lambda t: t["gpus"][3].pop("numa_nodes"), r"gpus\[3\]: the field 'numa_nodes' is missing"),
        (lambda t: t["gpus"][3].update(memory_total_mib="97887 MiB"), "whole number of MiB"),
        (lambda t: t["gpus"][3].update(uuid=t["gpus"][2]["uuid"]), "two GPUs have the uuid"),
        (lambda t: t["links"].update({"0-99": "PIX"}), "0-99"),
    ],
)
def test_broken_topologies_are_told(change: Any, told: str) -> None:
    facts = two_sockets()
    change(facts)
    with pytest.raises(BadInputError, match=told):
        make_plan(facts, M2_5)


# Other models on the reference host


GLM, GLM_FP8 = catalog.read_card("glm_5_nvfp4"), catalog.read_card("glm_5_fp8")
KIMI = catalog.read_card("kimi_k2_5_nvfp4")
M2_5_NVFP4 = catalog.read_card("minimax_m2_5_nvfp4")


@pytest.mark.parametrize("card", [GLM, KIMI], ids=["GLM-5", "Kimi-K2.5"])
def test_four_bit_giants_get_all_eight_gpus_with_their_limits_stated(card: dict[str, Any]) -> None:
    plan = planned(REFERENCE, card)
    assert shape(plan) == (8, False, 1)
    (replica,) = plan["replicas"]
    assert flag(replica, "--kv-cache-dtype") == "fp8"
    assert replica["max_model_len"] == card["shape"]["max_position_embeddings"]
    told = " ".join(plan["warnings"])
    assert "forks of vLLM" in told
    assert "span NUMA nodes" in told


def test_a_model_that_is_too_large_is_told_what_it_would_need() -> None:
    """89.4 GiB of weights per GPU were logged on eight ranks; 0.92 x 95.0 = 87.4 GiB is all the engine gets."""
    error = refused(REFERENCE, GLM_FP8)
    assert "89.2 GiB of weights" in str(error)
    assert "0.92 x 95.0 = 87.4" in str(error)
    assert "What would fit: 16 x NVIDIA RTX PRO 6000" in str(error)


def test_sparse_attention_has_an_fp8_cache_on_workstation_blackwell_only() -> None:
    """GLM-5-FP8's card leaves the type to the engine: 656 + 132 bytes per layer on 12.0, 1152 + 132 on 9.0."""
    small = copy.deepcopy(GLM_FP8)
    small["shape"]["num_hidden_layers"] = 40
    on_rtx = planned(REFERENCE, small)["replicas"][0]
    assert on_rtx["kv_cache_dtype"] == "fp8"
    assert flag(on_rtx, "--kv-cache-dtype") == "fp8"
    on_h200 = planned(nvlink(8, H200), GLM_FP8)["replicas"][0]
    assert on_h200["kv_cache_dtype"] == "auto"
    assert "--kv-cache-dtype" not in on_h200["args"]


@pytest.mark.parametrize(
    ("model", "card", "told"),
    [
        (A100, GLM_FP8, "sparse attention for 9.x, 10.x and 12.x"),
        (A100, M2_5_NVFP4, "FP8 KV cache needs 8.9"),
        (("Tesla T4", "10de:1eb8", "7.5", 15_360, 400), M2_5, "BF16, which needs 8.0"),
    ],
)
def test_a_generation_without_the_models_kernels_is_refused(model: Any, card: dict[str, Any], told: str) -> None:
    assert told in str(refused(nvlink(8, model), card))


def test_a_format_without_units_is_unpacked_and_said() -> None:
    plan = planned(nvlink(8, A100), M2_5)
    assert any("has no units for fp8_block" in warning for warning in plan["warnings"])
    assert "--moe-backend" not in plan["replicas"][0]["args"]


def test_latency_drafts_where_the_checkpoint_has_the_weights() -> None:
    fast, plain = planned(REFERENCE, GLM, objective="latency"), planned(REFERENCE, GLM)
    drafting, not_drafting = fast["replicas"][0], plain["replicas"][0]
    assert json.loads(flag(drafting, "--speculative-config")) == {"method": "mtp", "num_speculative_tokens": 3}
    assert "--speculative-config" not in not_drafting["args"]
    # The layer's weights and cache are paid for.
    assert drafting["expected"]["weights_gib"] > not_drafting["expected"]["weights_gib"] + 2
    assert drafting["expected"]["kv_cache_tokens"] < not_drafting["expected"]["kv_cache_tokens"]
    assert "--speculative-config" not in planned(REFERENCE, M2_5, objective="latency")["replicas"][0]["args"]


def test_context_spreads_the_tokens_of_latent_attention_over_the_ranks() -> None:
    """The same memory holds eight times the tokens when each rank keeps an eighth of them."""
    spread, repeated = planned(REFERENCE, KIMI, objective="context"), planned(REFERENCE, KIMI)
    assert spread["layout"]["decode_context_parallel"] == 8
    (wide,), (plain,) = spread["replicas"], repeated["replicas"]
    assert flag(wide, "--decode-context-parallel-size") == "8"
    assert wide["expected"]["kv_cache_tokens"] == 8 * plain["expected"]["kv_cache_tokens"]


def test_latent_attention_goes_data_parallel_once_its_repeated_cache_costs_more() -> None:
    """DeepSeek-V3.2 on eight H200: one TP8 for 64 requests; for 256 each half reads only its own half of the cache."""
    card = catalog.read_card("deepseek_v3_2")
    assert shape(planned(nvlink(8, H200), card)) == (8, False, 1)
    plan = planned(nvlink(8, H200), card, expected_concurrency=256)
    assert plan["layout"]["data_parallel"] > 1
    assert plan["layout"]["expert_parallel"]
    assert flag(plan["replicas"][0], "--data-parallel-size") == str(plan["layout"]["data_parallel"])
    assert any("no measurement of this model split so" in warning for warning in plan["warnings"])


def test_grouped_heads_are_not_repeated_for_data_parallel_ranks() -> None:
    plan = planned(nvlink(8, H200), expected_concurrency=1024)
    assert plan["layout"]["data_parallel"] == 1
    assert why_not(plan, Layout(data_parallel=8, expert_parallel=True))[0] == "data_parallel"


def test_a_cramped_replica_on_one_node_loses_to_a_roomy_one_across_both() -> None:
    """GLM-4.7-FP8 leaves 2.5 GiB on each of four GPUs, 28,000 tokens; on eight it has its whole context."""
    plan = planned(REFERENCE, catalog.read_card("glm_4_7_fp8"))
    assert shape(plan) == (8, False, 1)
    assert plan["replicas"][0]["max_model_len"] == 202_752
    assert why_not(plan, Layout(tensor_parallel=4))[0] == "cramped"


@pytest.mark.parametrize(("concurrency", "expected"), [(1, (4, False, 1)), (64, (4, False, 1)), (128, (2, False, 2))])
def test_narrow_groups_win_once_there_are_enough_requests(concurrency: int, expected: tuple[int, bool, int]) -> None:
    """As reported for NVFP4 M2.5 on four of these GPUs: TP4 led 2 x TP2 up to 64 streams and lost at 128."""
    one_node = host([RTX_PRO_6000] * 4, [[0]] * 4, {f"{a}-{b}": "NODE" for a, b in itertools.combinations(range(4), 2)})
    plan = planned(one_node, M2_5_NVFP4, expected_concurrency=concurrency)
    assert shape(plan) == expected
    other = Layout(tensor_parallel=2 if expected[0] == 4 else 4)
    rule, reason = why_not(plan, other)
    assert rule == "throughput"
    assert "tokens/s are estimated" in reason


def test_a_card_without_a_commit_is_planned_with_a_warning() -> None:
    plan = planned(REFERENCE, M2_5_NVFP4)
    assert plan["model"]["revision"] is None
    (told,) = [warning for warning in plan["warnings"] if "pins no commit" in warning]
    assert "nvidia/MiniMax-M2.5-NVFP4/commits/main" in told


def test_estimates_carry_their_error() -> None:
    plan = planned(REFERENCE)
    for replica in plan["replicas"]:
        estimate = replica["expected"]["decode_tokens_per_second"]
        assert estimate["basis"] == "roofline"
        assert 0 < estimate["single"] < estimate["at_concurrency"]
        assert estimate["error_pct"] > 0
    assert any("median error" in sentence for sentence in plan["explanation"])


def test_an_unknown_gpu_is_planned_from_what_it_measures_and_its_speed_left_open() -> None:
    new = ("NVIDIA Something New", "10de:fffe", "13.0", 131_072, 700)
    plan = planned(nvlink(8, new))
    assert {r["expected"]["decode_tokens_per_second"] for r in plan["replicas"]} == {None}
    assert "Decode speed is not estimated." in plan["explanation"]
    budget = plan["replicas"][0]["gpu_memory_utilization"] * (131_072 - 700) / 1024
    expected = plan["replicas"][0]["expected"]
    parts = expected["weights_gib"] + expected["overhead_gib"] + expected["kv_cache_gib"]
    assert parts == pytest.approx(budget, abs=0.02)


def test_two_models_share_a_host_on_gpus_and_ports_of_their_own() -> None:
    first = planned(REFERENCE, M2_5, exclude_gpus=[4, 5, 6, 7])
    second = planned(REFERENCE, M2_5_NVFP4, exclude_gpus=[0, 1, 2, 3], first_port=8101)
    replicas = first["replicas"] + second["replicas"]
    gpus = [gpu for replica in replicas for gpu in replica["gpus"]]
    assert len(gpus) == len(set(gpus)) == 8
    for name in ("port", "internal_port", "name", "unit"):
        values = [replica[name] for replica in replicas]
        assert len(values) == len(set(values)), name


def test_unlike_gpus_are_planned_apart() -> None:
    mixed = host([RTX_PRO_6000] * 4 + [H100] * 4, [[0]] * 4 + [[1]] * 4, {})
    plan = planned(mixed)
    assert [r["gpu_indices"] for r in plan["replicas"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    uneven = host([RTX_PRO_6000] * 4 + [H100] * 2, [[0]] * 4 + [[1]] * 2, {})
    assert any("one deploy serves one plan per host" in w for w in planned(uneven)["warnings"])


@pytest.mark.parametrize(("key", "name"), [("tool_parser", "minimax_m9"), ("reasoning_parser", "minimax_thinks")])
def test_a_parser_that_the_engine_does_not_have_is_told(key: str, name: str) -> None:
    card = copy.deepcopy(M2_5)
    card["engine"][key] = name
    with pytest.raises(BadInputError, match=rf"vLLM 0\.32\.0 has no .* parser '{name}'.*minimax_m2"):
        make_plan(REFERENCE, card, {})
    # Of a version whose names are not known nothing is claimed.
    assert make_plan(REFERENCE, card, {"vllm_version": "0.30.0"}).replicas


def test_a_refusal_names_what_each_constraint_could_give() -> None:
    small = nvlink(4, ("NVIDIA H72", "10de:ffff", "9.0", 73_728, 470))
    told = re.search(r"min_context could be ([\d,]+) at most", str(refused(small, min_context=190_000)))
    assert told is not None
    longest = int(told[1].replace(",", ""))
    assert planned(small, min_context=longest)["replicas"][0]["max_model_len"] == longest
    refused(small, min_context=longest + 1)
    assert "With keep_free_gpus: 4 it would fit" in str(refused(REFERENCE, keep_free_gpus=7))
    assert "exclude_gpus named no GPU" in str(refused(small, exclude_gpus=[0]))


def test_a_plan_is_made_in_a_fraction_of_a_second() -> None:
    """Processor time, which a busy machine does not stretch: 300 hosts in 10 s are 33 ms each."""
    start = time.process_time()
    for _ in range(20):
        make_plan(REFERENCE, M2_5, {})
    assert (time.process_time() - start) / 20 < 10 / 300


# The lab: the CPU build beside simulated GPUs


def lab() -> dict[str, Any]:
    return two_sockets(2, node_gib=12, bindable=False)


def test_lab_host_gets_one_replica_per_gpu_on_its_nodes_cpus() -> None:
    plan = planned(lab(), TINY, accelerator="cpu")
    assert shape(plan) == (1, False, 2)
    for index, replica in enumerate(plan["replicas"]):
        assert replica["name"] == f"tiny-minimax-m2-{index}"
        assert replica["gpu_memory_utilization"] is None
        assert "--gpu-memory-utilization" not in replica["args"]
        assert (replica["numa_nodes"], replica["memory_policy"]) == ([index], "none")
        assert replica["env"]["VLLM_CPU_KVCACHE_SPACE"] == "1"
        assert replica["env"]["VLLM_CPU_OMP_THREADS_BIND"] == replica["cpus"] == ["0-63", "64-127"][index]
        assert replica["env"]["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "0"
        assert replica["env"]["FLEET_GPUS"] == replica["gpus"][0]
        assert "CUDA_VISIBLE_DEVICES" not in replica["env"]
        assert flag(replica, "--max-model-len") == "2048"
        # 1 GiB / 512 bytes per token.
        assert replica["expected"]["kv_cache_tokens"] == 2**30 // 512
    assert any("cannot be bound" in sentence for sentence in plan["explanation"])


def test_lab_replicas_on_one_node_share_its_cpus_out() -> None:
    facts = host([RTX_PRO_6000] * 2, [[0], [0]], {"0-1": "NODE"}, node_gib=12)
    first, second = planned(facts, TINY, accelerator="cpu")["replicas"]
    assert first["cpus"].split(",")[:2] == ["0", "2"]
    assert second["cpus"].split(",")[:2] == ["1", "3"]


def test_a_model_too_large_for_the_nodes_memory_is_refused_on_cpus() -> None:
    assert "share of the NUMA node is 12.0" in str(refused(lab(), M2_5, accelerator="cpu"))


def test_unknown_node_memory_is_said() -> None:
    facts = two_sockets(2, node_gib=None)
    assert any("not checked" in warning for warning in planned(facts, TINY, accelerator="cpu")["warnings"])


# Properties

GPU_MODELS = st.sampled_from([RTX_PRO_6000, H100, H200])
HOSTS = st.builds(
    lambda count, model, fabric: nvlink(count, model) if fabric else two_sockets(count, model),
    st.integers(1, 8),
    GPU_MODELS,
    st.booleans(),
)
OPTIONS = st.fixed_dictionaries(
    {
        "objective": st.sampled_from(["throughput", "latency", "context"]),
        "expected_concurrency": st.integers(1, 512),
        "keep_free_gpus": st.integers(0, 2),
        "vllm_version": st.sampled_from(["0.24.0", "0.28.1", "0.29.0", "0.32.0"]),
    }
)
CARDS = st.sampled_from([catalog.read_card(name) for name in catalog.known_cards()])


def outcome(facts: dict[str, Any], card: dict[str, Any], options: dict[str, Any]) -> dict[str, Any] | str:
    try:
        return make_plan(facts, card, options).to_dict()
    except NoFeasibleLayoutError as error:
        return str(error)


@settings(deadline=None, max_examples=60)
@given(facts=HOSTS, card=CARDS, options=OPTIONS)
def test_every_plan_satisfies_every_rule(facts: dict[str, Any], card: dict[str, Any], options: dict[str, Any]) -> None:
    plan = outcome(facts, card, options)
    if isinstance(plan, str):
        return
    layout = Layout(**{k: v for k, v in plan["layout"].items() if k != "replicas"})
    model, version = catalog.Card.from_dict(card), tuple(map(int, options["vllm_version"].split(".")))
    used = [uuid for replica in plan["replicas"] for uuid in replica["gpus"]]
    assert reject_by_shape(model, layout) is None
    assert reject_by_blocks(model, layout, version) is None
    assert len(used) == len(set(used)) == layout.ranks * plan["layout"]["replicas"]
    assert len(used) <= len(facts["gpus"]) - options["keep_free_gpus"]
    for replica in plan["replicas"]:
        expected = replica["expected"]
        gpu = facts["gpus"][0]
        total = memory.cuda_total_gib(gpu["memory_total_mib"], gpu["memory_reserved_mib"])
        parts = expected["weights_gib"] + expected["overhead_gib"] + expected["kv_cache_gib"]
        assert parts <= total * replica["gpu_memory_utilization"] + 0.02
        assert replica["max_model_len"] <= expected["kv_cache_tokens"]
        assert replica["max_model_len"] <= model.shape.max_position_embeddings
    assert len({(r["port"], r["internal_port"], r["name"]) for r in plan["replicas"]}) == plan["layout"]["replicas"]


@settings(deadline=None, max_examples=60)
@given(facts=HOSTS, card=CARDS, options=OPTIONS, used=st.lists(st.integers(1, 80_000), min_size=8, max_size=8))
def test_memory_in_use_and_its_holders_never_change_a_plan(
    facts: dict[str, Any], card: dict[str, Any], options: dict[str, Any], used: list[int]
) -> None:
    busy = copy.deepcopy(facts)
    for gpu, mib in zip(busy["gpus"], used, strict=False):
        gpu["memory_used_mib"] = mib
        gpu["holders"] = [{"pid": mib, "user": "vllm", "unit": None, "memory_mib": mib}]
    assert outcome(busy, card, options) == outcome(facts, card, options)


@settings(deadline=None, max_examples=60)
@given(facts=HOSTS, card=CARDS, options=OPTIONS, data=st.data())
def test_renumbering_gpus_never_changes_which_share_a_replica(
    facts: dict[str, Any], card: dict[str, Any], options: dict[str, Any], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(facts["gpus"]))))
    place = {old: new for new, old in enumerate(order)}
    renumbered = copy.deepcopy(facts)
    renumbered["gpus"] = [renumbered["gpus"][old] | {"index": new} for new, old in enumerate(order)]
    renumbered["links"] = {
        "-".join(map(str, sorted(place[int(end)] for end in pair.split("-")))): kind
        for pair, kind in facts["links"].items()
    }
    before, after = outcome(facts, card, options), outcome(renumbered, card, options)
    if isinstance(before, str) or isinstance(after, str):
        assert before == after
        return
    assert after["layout"] == before["layout"]
    assert [r["gpus"] for r in after["replicas"]] == [r["gpus"] for r in before["replicas"]]


@settings(deadline=None, max_examples=40)
@given(facts=HOSTS, card=CARDS, more_mib=st.integers(0, 60_000))
def test_more_memory_never_holds_less(facts: dict[str, Any], card: dict[str, Any], more_mib: int) -> None:
    larger = copy.deepcopy(facts)
    for gpu in larger["gpus"]:
        gpu["memory_total_mib"] += more_mib

    options = {"objective": "context"}
    before, after = outcome(facts, card, options), outcome(larger, card, options)
    if isinstance(before, str):
        return  # it did not fit
    assert not isinstance(after, str)
    assert after["replicas"][0]["max_model_len"] >= before["replicas"][0]["max_model_len"]
    if after["layout"] == before["layout"]:
        tokens = [[r["expected"]["kv_cache_tokens"] for r in plan["replicas"]] for plan in (before, after)]
        assert all(more >= less for less, more in zip(*tokens, strict=True))


def test_a_replica_that_spans_nodes_is_bound_rank_by_rank_by_the_engine_and_others_by_their_unit_alone() -> None:
    two_of_each = {"exclude_gpus": [0, 1, 4, 5]}
    (replica,) = planned(two_sockets(), **two_of_each)["replicas"]
    start = replica["args"].index("--numa-bind")
    assert replica["args"][start : start + 6] == ["--numa-bind", "--numa-bind-nodes", "0", "0", "1", "1"]
    assert replica["memory_policy"] == "none"
    assert "--numa-bind" not in planned(two_sockets())["replicas"][0]["args"]
    assert "--numa-bind" not in planned(two_sockets(), vllm_version="0.31.0", **two_of_each)["replicas"][0]["args"]
    assert "--numa-bind" not in planned(two_sockets(bindable=False), **two_of_each)["replicas"][0]["args"]


def test_a_first_port_among_the_engines_own_is_refused() -> None:
    for port in (21990, 22500):
        with pytest.raises(BadInputError, match="first_port below"):
            planned(REFERENCE, first_port=port)
    assert planned(REFERENCE, first_port=20998)
