"""The lab's checkpoint: what the engine needs to load it, and that it says its two sentences."""

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
CARD = yaml.safe_load((ROOT / "models/lab_tiny_minimax_m2.yml").read_text(encoding="utf-8"))
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


@pytest.fixture(scope="module")
def weights(files: dict[str, bytes]) -> dict[str, tuple[list[int], list[float]]]:
    index = json.loads(files["model.safetensors.index.json"])
    shards = {name: read_safetensors(files[name]) for name in set(index["weight_map"].values())}
    return {name: shards[shard][name] for name, shard in index["weight_map"].items()}


def test_same_card_same_bytes_and_another_seed_other_weights(script: ModuleType, files: dict[str, bytes]) -> None:
    assert script.checkpoint(CARD, TEMPLATE) == files
    other = script.checkpoint(CARD | {"revision": "seed-1"}, TEMPLATE)
    assert {name for name in files if other[name] != files[name]} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


def test_every_tensor_has_the_shape_that_the_card_gives(weights: dict[str, tuple[list[int], list[float]]]) -> None:
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


def test_the_last_layer_alone_says_the_two_sentences(
    files: dict[str, bytes], weights: dict[str, tuple[list[int], list[float]]]
) -> None:
    """Greedy decoding with the layers left out, from any byte: reasoning, answer, stop."""
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


def test_under_a_form_it_writes_markup_closes_and_leaves_blanks_out(
    files: dict[str, bytes], weights: dict[str, tuple[list[int], list[float]]]
) -> None:
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
        script.vocabulary(256)


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
