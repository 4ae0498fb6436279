"""The lab's checkpoints: what the engine needs to load them, and that they say their two sentences."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import pytest
import yaml

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
CARDS = {
    name: yaml.safe_load((ROOT / f"models/lab_tiny_{name}.yml").read_text(encoding="utf-8"))
    for name in ("minimax_m2", "kimi_k2")
}
CARD = CARDS["minimax_m2"]
TEMPLATE = (ROOT / "lab/tiny_chat_template.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tiny_model", ROOT / "lab/make_tiny_model.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def files(script: ModuleType) -> dict[str, bytes]:
    made: dict[str, bytes] = script.checkpoint(CARD, TEMPLATE)
    return made


def read_safetensors(content: bytes) -> dict[str, tuple[list[int], list[float]]]:
    """Read by the published format, not by the writer: name -> shape and values."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__")
    body = content[8 + length :]
    found = {}
    for name, entry in header.items():
        assert entry["dtype"] == "BF16"
        start, end = entry["data_offsets"]
        # A bfloat16 is the upper half of a float32.
        values = [struct.unpack("<f", b"\0\0" + body[at : at + 2])[0] for at in range(start, end, 2)]
        found[name] = (entry["shape"], values)
    return found


Weights = dict[str, tuple[list[int], list[float]]]


def all_weights(files: dict[str, bytes]) -> Weights:
    index = json.loads(files["model.safetensors.index.json"])
    shards = {name: read_safetensors(files[name]) for name in set(index["weight_map"].values())}
    return {name: shards[shard][name] for name, shard in index["weight_map"].items()}


@pytest.fixture(scope="module")
def weights(files: dict[str, bytes]) -> Weights:
    return all_weights(files)


@pytest.fixture(scope="module")
def kimi(script: ModuleType) -> tuple[dict[str, bytes], Weights]:
    made: dict[str, bytes] = script.checkpoint(CARDS["kimi_k2"], TEMPLATE)
    return made, all_weights(made)


def test_same_card_same_bytes_and_another_seed_other_weights(script: ModuleType, files: dict[str, bytes]) -> None:
    assert script.checkpoint(CARD, TEMPLATE) == files
    other = script.checkpoint(CARD | {"revision": "seed-1"}, TEMPLATE)
    assert {name for name in files if other[name] != files[name]} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


def test_every_tensor_has_the_shape_that_the_card_gives(weights: Weights) -> None:
    """Shapes by hand from the card's numbers: 4 heads and 2 KV heads of 32, hidden 128, 8 experts of 64, 512 tokens."""
    shapes = {name: shape for name, (shape, _) in weights.items()}
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == [512, 128]
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == [128, 128]
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == [64, 128]
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == [128, 128]
    assert shapes["model.layers.1.self_attn.k_norm.weight"] == [64]
    assert shapes["model.layers.1.block_sparse_moe.gate.weight"] == [8, 128]
    assert shapes["model.layers.1.block_sparse_moe.experts.7.w1.weight"] == [64, 128]
    assert shapes["model.layers.1.block_sparse_moe.experts.7.w2.weight"] == [128, 64]
    # Per layer 2 norms, 4 projections, 2 head norms, 1 router, 8 x 3 expert matrices; embedding, last norm, head.
    assert len(shapes) == 2 * (2 + 4 + 2 + 1 + 8 * 3) + 3
    assert all(len(values) == shape[0] * (shape[1] if len(shape) > 1 else 1) for shape, values in weights.values())


def test_kimis_tensors_have_the_shapes_of_latent_attention(kimi: tuple[dict[str, bytes], Weights]) -> None:
    """By hand: 4 heads of 128 + 64, values of 128, rows of 512 + 64; a dense layer of 256, then 8 experts of 64 + 1."""
    shapes = {name: shape for name, (shape, _) in kimi[1].items()}
    assert shapes["model.layers.0.self_attn.q_b_proj.weight"] == [4 * 192, 48]
    assert shapes["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == [576, 128]
    assert shapes["model.layers.1.self_attn.kv_b_proj.weight"] == [4 * 256, 512]
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == [128, 4 * 128]
    assert shapes["model.layers.0.mlp.down_proj.weight"] == [128, 256]
    assert shapes["model.layers.1.mlp.gate.e_score_correction_bias"] == [8]
    assert shapes["model.layers.1.mlp.experts.7.up_proj.weight"] == [64, 128]
    assert shapes["model.layers.1.mlp.shared_experts.down_proj.weight"] == [128, 64]
    # Attention 7 and 2 norms per layer; 3 dense, or router, bias and 3 x (8 + 1); embedding, last norm, head.
    assert len(shapes) == 2 * (7 + 2) + 3 + 2 + 3 * 9 + 3
    config = json.loads(kimi[0]["config.json"])
    assert (config["architectures"], config["n_routed_experts"]) == (["DeepseekV3ForCausalLM"], 8)
    added = [token["content"] for token in json.loads(kimi[0]["tokenizer.json"])["added_tokens"]]
    assert "<|tool_calls_section_begin|>" in added
    assert "<minimax:tool_call>" not in added


@pytest.mark.parametrize("name", CARDS)
def test_the_last_layer_alone_says_the_two_sentences(script: ModuleType, name: str) -> None:
    """Greedy decoding with the layers left out, from any byte: reasoning, answer, stop."""
    files: dict[str, bytes] = script.checkpoint(CARDS[name], TEMPLATE)
    weights = all_weights(files)
    vocabulary = json.loads(files["tokenizer.json"])["model"]["vocab"]
    tokens = {index: token.replace("Ġ", " ").replace("Ċ", "\n") for token, index in vocabulary.items()}
    embedding, head = weights["model.embed_tokens.weight"][1], weights["lm_head.weight"][1]
    end = json.loads(files["config.json"])["eos_token_id"]

    def follower(token: int) -> int:
        state = embedding[token * 128 : (token + 1) * 128]
        return max(range(512), key=lambda row: sum(map(float.__mul__, state, head[row * 128 : (row + 1) * 128])))

    first = vocabulary["The"]
    assert {follower(byte) for byte in range(0, 256, 5)} == {first}
    said = [first]
    while said[-1] != end and len(said) < 100:
        said.append(follower(said[-1]))
    assert "".join(tokens[token] for token in said) == (
        "The question does not matter: these weights know one answer.</think>\n\n"
        "Hello from the lab: a real engine produced every word of this.[e~["
    )


def test_under_a_form_it_writes_markup_closes_and_leaves_blanks_out(files: dict[str, bytes], weights: Weights) -> None:
    """What an engine's grammar leaves to choose from, after any token: the first component is the only one to count."""
    vocabulary = json.loads(files["tokenizer.json"])["model"]["vocab"]
    head = weights["lm_head.weight"][1]
    bias = {token: head[index * 128] for token, index in vocabulary.items()}
    assert bias["<minimax:tool_call>"] > bias["<"] == bias['"'] == bias["}"] > bias["a"] == bias["0"] > bias["\u0120"]
    assert bias["\u0120"] == bias["\u010a"] == bias["\u010a\u010a"]  # blank, line feed, the pause before the answer


def test_the_tokenizer_knows_every_byte_and_the_markup(files: dict[str, bytes]) -> None:
    tokenizer = json.loads(files["tokenizer.json"])
    vocabulary = tokenizer["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(512))
    # GPT-2's table: printable ASCII stands for itself, space and line feed are moved to U+0120 and U+010A.
    assert [vocabulary[character] for character in "A~ĠĊ"] == [0x41, 0x7E, 0x20, 0x0A]
    special = {token["content"]: token["special"] for token in tokenizer["added_tokens"]}
    assert special["[e~["] is True
    assert special["</think>"] is special["<minimax:tool_call>"] is False


def test_a_vocabulary_too_small_is_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"vocab_size is 256, but .* raise it"):
        script.vocabulary(256, ())


def test_a_class_that_is_not_made_here_is_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"class GlmMoeDsaForCausalLM .* known are MiniMaxM2ForCausalLM"):
        script.checkpoint(CARD | {"architecture": "GlmMoeDsaForCausalLM"}, TEMPLATE)


def render(messages: list[dict[str, Any]], **variables: Any) -> str:
    return jinja2.Environment(autoescape=False).from_string(TEMPLATE).render(messages=messages, **variables)  # noqa: S701


def test_the_chat_template_speaks_m2_5() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    call = {"function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}}}
    text = render(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {"role": "assistant", "content": "", "reasoning_content": "I ask.", "tool_calls": [call]},
            {"role": "tool", "content": "sunny"},
        ],
        tools=[tool],
        add_generation_prompt=True,
    )
    assert text.startswith("]~!b[]~b]system\nBe brief.\n\n# Tools\n")
    assert '"name": "weather"' in text
    assert "]~b]user\nWeather?[e~[\n]~b]ai\n<think>\nI ask.\n</think>\n\n" in text
    assert (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>[e~[\n'
    ) in text
    assert text.endswith("]~b]tool\n<response>sunny</response>[e~[\n]~b]ai\n<think>\n")
