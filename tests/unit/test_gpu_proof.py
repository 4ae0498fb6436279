"""What the proof on a GPU host reads and changes: units, engine logs, and the shape of a single rank."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from vllm_fleet import catalog, memory
from vllm_fleet.catalog import Card
from vllm_fleet.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "tests/fixtures/gpu"
UNIT = """[Service]
Environment=HOME=/state/cache
Environment="NOTE=half of it: 50%% for \\"us\\""
Environment=VLLM_USE_DEEP_GEMM=0
ExecStartPre=+/root/bin/fleet-target start_gate --verdict /run/m --user vllm
ExecStart=/root/bin/start-engine /run/m /rt/venv/bin/vllm serve /weights --served-model-name m \
--tensor-parallel-size 4 --speculative-config "{\\"method\\": \\"mtp\\"}" --moe-backend triton \
--enable-auto-tool-choice --price 5$$
ExecStartPost=/usr/bin/python3 client.py wait --key-file ${CREDENTIALS_DIRECTORY}/engine.key --unit %n
"""


@pytest.fixture(scope="module", autouse=True)
def _scripts() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "tests/gpu"))
    yield
    sys.path.remove(str(ROOT / "tests/gpu"))


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


def command() -> Any:
    return script("prove").Command.of(UNIT, "vllm-m-0.service", Path("/run/credentials"))


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**({"defaults": False, "flag": [], "env": []} | given))


def test_a_unit_is_read_as_systemd_reads_it() -> None:
    read = command()
    assert read.environment == {
        "HOME": "/state/cache",
        "NOTE": 'half of it: 50% for "us"',
        "VLLM_USE_DEEP_GEMM": "0",
    }
    assert read.gate == ["/root/bin/fleet-target", "start_gate", "--verdict", "/run/m", "--user", "vllm"]
    assert read.start[:5] == ["/root/bin/start-engine", "/run/m", "/rt/venv/bin/vllm", "serve", "/weights"]
    assert json.loads(read.start[read.start.index("--speculative-config") + 1]) == {"method": "mtp"}
    assert read.start[-1] == "5$"
    assert read.wait[3:5] == ["--key-file", "/run/credentials/engine.key"]
    assert read.wait[-1] == "vllm-m-0.service"


def test_defaults_keep_only_what_is_served_and_where() -> None:
    changed = command()
    changed.change(options(defaults=True))
    assert changed.start[5:] == ["--served-model-name", "m", "--tensor-parallel-size", "4"]
    assert changed.environment == {"HOME": "/state/cache"}


def test_one_thing_at_a_time() -> None:
    changed = command()
    changed.change(options(flag=["moe-backend=deep_gemm", "-enable-auto-tool-choice", "eager"], env=["A=1", "NOTE="]))
    assert changed.start[-3:] == ["--moe-backend", "deep_gemm", "--eager"]
    assert changed.start.count("--moe-backend") == 1
    assert "--enable-auto-tool-choice" not in changed.start
    assert changed.environment == {"HOME": "/state/cache", "VLLM_USE_DEEP_GEMM": "0", "A": "1"}


def test_differences_are_of_what_both_know() -> None:
    plan = {"weights_gib": 50.0, "kv_cache_tokens": 1000, "start_seconds": 0, "decode_tokens_per_second": None}
    engine = {"weights_gib": 51.0, "kv_cache_tokens": 990, "start_seconds": 60.0, "version": "0.32.0"}
    assert script("prove").compare(plan, engine) == {"weights_gib": 2.0, "kv_cache_tokens": -1.0}


# What engines printed


@pytest.mark.parametrize("case", ["tp4-planned-cold", "tp4-defaults", "mla-tp8-planned"])
def test_an_engine_is_read_from_its_log(case: str) -> None:
    text = (MEASURED / f"{case}.log").read_text(encoding="utf-8")
    reported = json.loads((MEASURED / f"{case}.json").read_text(encoding="utf-8"))["engine"]
    read = script("engine_log").read(text)
    assert read.items() <= reported.items()
    assert read.keys() == reported.keys() - {"start_seconds", "ready"}
    assert script("engine_log").complaints(text) == []


def test_the_fullest_rank_and_the_reason_of_a_failure_are_told() -> None:
    text = """(Worker_TP0 pid=1) INFO 12-01 08:39:23 [gpu_worker.py:759] Available KV cache memory: 77.2 GiB
(Worker_TP1 pid=2) INFO 12-01 08:39:23 [gpu_worker.py:759] Available KV cache memory: 76.9 GiB
(APIServer pid=3) WARNING 12-01 08:39:24 [system_utils.py:255] This can cause errors like `OSError: [Errno 24]`
(EngineCore pid=4) ERROR 12-01 08:39:25 [core.py:906]   File "/x/core.py", line 849, in run
(EngineCore pid=4) ERROR 12-01 08:39:25 [core.py:906] ValueError: Free memory on device cuda:0 is less than desired
"""
    assert script("engine_log").read(text)["kv_cache_gib"] == 76.9
    assert [line.rpartition("] ")[2] for line in script("engine_log").complaints(text)] == [
        "ValueError: Free memory on device cuda:0 is less than desired"
    ]


# A single rank, against what whole replicas logged


@pytest.fixture(scope="module")
def shapes() -> dict[str, dict[str, int]]:
    measured: dict[str, dict[str, int]] = json.loads(
        (ROOT / "tests/fixtures/memory/h200_single_ranks.json").read_text(encoding="utf-8")
    )["rank_shapes"]
    return measured


@pytest.mark.parametrize(("ranks", "whole_experts", "name"), [(4, False, "TP4"), (8, True, "TP8+EP8")])
def test_a_rank_has_the_shape_that_was_measured(
    shapes: dict[str, dict[str, int]],
    ranks: int,
    whole_experts: bool,  # noqa: FBT001
    name: str,
) -> None:
    shape = catalog.read_card("minimax_m2_5")["shape"]
    cut = script("single_rank").rank_shape(shape, ranks, expert_parallel=whole_experts, layers=0)
    # Those ranks' vocabulary was rounded up to 128.
    assert {**cut, "vocab_size": -(-cut["vocab_size"] // 128) * 128}.items() >= shapes[name].items()


@pytest.mark.parametrize(
    ("card", "ranks", "given"),
    [
        ("minimax_m2_5", 4, {}),
        ("minimax_m2_5", 8, {"expert_parallel": True}),
        ("deepseek_v3_2", 8, {"dense_attention": True}),
        ("glm_5_fp8", 8, {}),
    ],
)
def test_a_rank_alone_needs_what_it_needs_in_its_group(
    tmp_path: Path, card: str, ranks: int, given: dict[str, bool]
) -> None:
    made = script("single_rank").write(card, tmp_path, ranks, **given)
    whole = catalog.read_card(card)
    if given.get("dense_attention"):
        whole = {**whole, "attention": "mla"}
    layout = Layout(tensor_parallel=ranks, expert_parallel=given.get("expert_parallel", False))
    group, alone = Card.from_dict(whole), Card.from_dict(made)
    # With whole experts the router alone is narrower than in the group: 0.6 % of what such a rank holds.
    within = 7e-3 if layout.expert_parallel else 1e-3
    assert memory.weights_gib(alone, Layout()) == pytest.approx(memory.weights_gib(group, layout), rel=within)
    assert memory.kv_bytes_per_token(alone, Layout(), "auto") == memory.kv_bytes_per_token(group, layout, "auto")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_attention_heads"] == made["shape"]["num_attention_heads"]
    assert config["vocab_size"] == len(json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"])
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert ("index_topk" in config) == (made["attention"] == "dsa")
    assert not config.get("use_routing_bias")
    assert config.get("topk_method") in (None, "greedy")
    assert yaml.safe_load((tmp_path / "card.yml").read_text()) == made
    assert made["engine"]["args"][-2:] == ["--load-format", "dummy"]


def test_what_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="num_attention_heads is 48, which 5 ranks"):
        script("single_rank").rank_shape(catalog.read_card("minimax_m2_5")["shape"], 5, expert_parallel=False, layers=0)
