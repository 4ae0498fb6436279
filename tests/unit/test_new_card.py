"""Cards drafted from the config.json files that models publish, against the catalog's."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hosts import FIXTURES

from vllm_fleet import catalog, new_card
from vllm_fleet.cli import main
from vllm_fleet.errors import BadInputError

CONFIGS = FIXTURES / "configs"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("MiniMaxAI--MiniMax-M2.5", "minimax_m2_5"),
        ("nvidia--MiniMax-M2.5-NVFP4", "minimax_m2_5_nvfp4"),
        ("moonshotai--Kimi-K2.5", "kimi_k2_5"),
        ("nvidia--Kimi-K2.5-NVFP4", "kimi_k2_5_nvfp4"),
        ("zai-org--GLM-5-FP8", "glm_5_fp8"),
        ("nvidia--GLM-5-NVFP4", "glm_5_nvfp4"),
        ("deepseek-ai--DeepSeek-V3.2", "deepseek_v3_2"),
        ("Qwen--Qwen3-235B-A22B-FP8", "qwen3_235b_a22b_fp8"),
        ("openai--gpt-oss-120b", "gpt_oss_120b"),
        ("meta-llama--Meta-Llama-3.1-70B", "llama_3_3_70b"),
    ],
)
def test_a_draft_has_the_numbers_of_the_reviewed_card(folder: str, name: str) -> None:
    data, unknown = new_card.draft(CONFIGS / folder / "config.json", "owner/name")
    draft, card = catalog.Card.from_dict(data), catalog.load(name)
    assert draft.shape == card.shape
    assert (draft.architecture, draft.attention) == (card.architecture, card.attention)
    assert (draft.quantization.method, draft.quantization.block) == (card.quantization.method, card.quantization.block)
    for module in ("self_attn", "indexer", "shared_experts", "mlp", "experts", "mtp"):
        assert draft.quantization.converts(module) == card.quantization.converts(module), module
    assert draft.engine.tool_parser == card.engine.tool_parser
    assert draft.engine.kv_cache_dtype == card.engine.kv_cache_dtype
    assert any("revision" in sentence for sentence in unknown)


def test_the_command_prints_a_card_that_can_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIGS / "zai-org--GLM-5.2-FP8" / "config.json"
    assert main(["card", str(config), "--id", "zai-org/GLM-5.2-FP8"]) == 0
    path = tmp_path / "glm_5_2.yml"
    path.write_text(capsys.readouterr().out)
    card = catalog.load(str(path))
    # Its config names 21 layers with an indexer of their own.
    assert (card.id, card.shape.num_indexer_layers, card.revision) == ("zai-org/GLM-5.2-FP8", 21, None)
    assert "# What" not in path.read_text().splitlines()[0]
    assert "computed" in path.read_text()


def test_what_a_config_does_not_hold_is_said() -> None:
    _, unknown = new_card.draft(CONFIGS / "MiniMaxAI--MiniMax-M2.5" / "config.json")
    told = " ".join(unknown)
    assert "--id OWNER/NAME" in told
    assert "no weights for them" in " ".join(told.split())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"architectures": None}, "'architectures' is missing"),
        ({"layer_types": ["linear_attention"] * 62}, "linear_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq' is not known"),
        ({"hidden_size": None}, "shape.hidden_size"),
    ],
)
def test_a_config_that_cannot_become_a_card_is_told(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    config = json.loads((CONFIGS / "MiniMaxAI--MiniMax-M2.5" / "config.json").read_text()) | change
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(BadInputError, match=told):
        new_card.draft(path)


@pytest.mark.parametrize("text", ["[]", "{", None])
def test_a_file_that_is_no_config_is_told(tmp_path: Path, text: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    assert main(["card", str(path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_a_sparse_cache_that_nobody_described_is_refused() -> None:
    with pytest.raises(BadInputError, match="sparse_attention_config"):
        new_card.draft(CONFIGS / "MiniMaxAI--MiniMax-M3" / "config.json")


def test_drafts_are_plain_yaml() -> None:
    data, unknown = new_card.draft(CONFIGS / "openai--gpt-oss-120b" / "config.json", "openai/gpt-oss-120b")
    assert yaml.safe_load(new_card.render(data, unknown)) == data
