"""Cards: what a wrong one is told."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_fleet import catalog
from vllm_fleet.errors import BadInputError

CARD = catalog.read_card("minimax_m2_5")


@pytest.mark.parametrize("name", catalog.known_cards())
def test_every_card_of_the_catalog_is_sound(name: str) -> None:
    card = catalog.load(name)
    assert card.name == name
    assert card.checkpoint_gib > 0


def test_m2_5_is_the_published_checkpoint() -> None:
    """The numbers of its config.json, as published."""
    card = catalog.load("minimax_m2_5")
    shape = card.shape
    assert (card.id, card.architecture) == ("MiniMaxAI/MiniMax-M2.5", "MiniMaxM2ForCausalLM")
    assert (shape.num_hidden_layers, shape.hidden_size, shape.head_dim) == (62, 3072, 128)
    assert (shape.num_attention_heads, shape.num_key_value_heads) == (48, 8)
    assert (shape.num_experts, shape.num_experts_per_tok, shape.moe_intermediate_size) == (256, 8, 1536)
    assert (shape.vocab_size, shape.max_position_embeddings) == (200064, 196608)
    assert (card.quantization.method, card.quantization.block) == ("fp8_block", 128)
    assert card.served_name == "minimax-m2.5"
    assert card.engine.remote_code == {}


def test_unknown_card_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"no model card 'gpt9'.*lab_tiny_minimax_m2.*minimax_m2_5"):
        catalog.read_card("gpt9")
    with pytest.raises(BadInputError, match="none"):
        catalog.read_card("gpt9", tmp_path)


def test_a_card_is_found_by_path_and_named_after_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yml"
    path.write_text(yaml.safe_dump({k: v for k, v in CARD.items() if k != "name"}))
    assert catalog.read_card(str(path))["name"] == "mine"
    assert catalog.load("mine", tmp_path).id == CARD["id"]


@pytest.mark.parametrize("text", ["- a list", "a: [unclosed"])
def test_a_file_that_is_no_card_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yml"
    path.write_text(text)
    with pytest.raises(BadInputError, match=r"broken\.yml"):
        catalog.read_card(str(path))


def changed(path: str, value: Any) -> dict[str, Any]:
    card = copy.deepcopy(CARD)
    *parents, key = path.split(".")
    place = card
    for parent in parents:
        place = place[parent]
    if value is ...:
        del place[key]
    else:
        place[key] = value
    return card


@pytest.mark.parametrize(
    ("path", "value", "remedy"),
    [
        ("schema", 2, "write `schema: 1`"),
        ("id", ..., "add it"),
        ("revision", "main", "40 hex digits"),
        ("revision", ..., "revision: null"),
        ("attention", "mamba", "knows gqa, mla, dsa"),
        ("shape.num_sliding_layers", 31, "sliding_window"),
        ("shape.hidden_size", ..., "add it"),
        ("shape.hidden_size", "3072", "type int"),
        ("shape.hidden_size", 0, "positive"),
        ("shape.num_layers", 62, "known:"),
        ("shape.num_key_value_heads", 7, "config.json"),
        ("shape.num_experts_per_tok", 300, "config.json"),
        ("shape.first_k_dense_replace", 63, "config.json"),
        ("quantization.method", "gguf", "knows none, fp8_block"),
        ("quantization.block", [128, 64], "square"),
        ("checkpoint_gib", -1, "positive"),
        ("engine.minimum_version", 0.24, "type str"),
        ("engine.trust_remote_code", True, "sha256"),
        ("engine.trust_remote_code", {"modeling.py": "abc"}, "sha256sum"),
        ("engine.trust_remote_code", {"modeling.bin": "0" * 64}, "name of a .py file"),
        ("engine.args", ["--trust-remote-code"], "under engine.trust_remote_code"),
        ("engine.args", ["--tensor-parallel-size=8"], "the plan computes it for each host"),
        ("engine.args", ["--api-key", "secret"], "the plan and the unit set it"),
        ("engine.tensor_parallel", 8, "known:"),
        ("engine.max_gpu_memory_utilization", 95, "between 0 and 1"),
        ("contract.tools", "yes", "type bool"),
        ("contract.reasoning", "forced", "type bool"),  # only a tool call can be forced
        ("speculative", ..., "speculative: null"),
        ("speculative", {"method": "mtp", "num_speculative_tokens": 3}, "shape.num_nextn_predict_layers"),
        ("speculative", {"method": "ngram", "num_speculative_tokens": 3}, "knows mtp"),
        ("sources", {}, "where each number comes from"),
    ],
)
def test_a_wrong_card_is_told_file_key_and_remedy(path: str, value: Any, remedy: str) -> None:
    with pytest.raises(BadInputError) as caught:
        catalog.Card.from_dict(changed(path, value), "models/mine.yml")
    message = str(caught.value)
    assert message.startswith(f"models/mine.yml: `{path}")
    assert remedy in message


@pytest.mark.parametrize(
    ("path", "value", "missing"),
    [
        ("shape.moe_intermediate_size", ..., "moe_intermediate_size"),
        ("attention", "mla", r"shape\.kv_lora_rank"),
        ("shape.first_k_dense_replace", 3, "intermediate_size"),
    ],
)
def test_a_shape_that_needs_another_number_is_told_which(path: str, value: Any, missing: str) -> None:
    with pytest.raises(BadInputError, match=rf"models/mine\.yml: .*{missing}"):
        catalog.Card.from_dict(changed(path, value), "models/mine.yml")


def test_a_group_that_the_format_does_not_have_is_told() -> None:
    card = changed("quantization", {"method": "nvfp4", "group": 32, "unconverted": []})
    with pytest.raises(BadInputError, match="one scale per 16"):
        catalog.Card.from_dict(card)
