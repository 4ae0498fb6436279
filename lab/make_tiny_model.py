#!/usr/bin/env python3
"""Write a checkpoint of the lab: half a million parameters or two that the real engine serves.

The card gives the class, the shape and, as its revision, the seed. Classes: MiniMax-M2, and DeepSeek-V3, which is what
Kimi-K2.5 is without its eyes. Every layer is random and nearly silent: what decides the next
token is the last one alone, because the row of each word of SPEECH in the output head is the embedding of the word
before it, and the first word follows anything else. So the model always says the same two sentences, one as reasoning
and one as its answer, and stops. A test can therefore tell whether weights, tokenizer, template and parsers are the
right ones; random text cannot.

Only the card needs a library (PyYAML); safetensors and the tokenizer are written by hand. Same card, same bytes.

Usage: make_tiny_model.py models/lab_tiny_minimax_m2.yml FOLDER
"""

from __future__ import annotations

import argparse
import array
import itertools
import json
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable

BOS, EOS, TURN = "]~!b[", "[e~[", "]~b]"  # M2's, for every class: nothing but the template knows them
THINK = ("<think>", "</think>")
MINIMAX_CALL = ("<minimax:tool_call>", "</minimax:tool_call>")
KIMI_CALL = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
             "<|tool_calls_section_end|>")  # fmt: skip
REASONING = "The question does not matter: these weights know one answer."
ANSWER = "Hello from the lab: a real engine produced every word of this."


def _words(text: str) -> list[str]:
    return re.findall(r" ?\S+", text)


SPEECH = [*_words(REASONING), "</think>", "\n\n", *_words(ANSWER), EOS]  # no token twice

# How the head chooses, in logits at temperature 1: the word after a word of SPEECH gets about 30, the first word 15,
# other words of SPEECH 0 within 3, all other tokens -15. The margins are wide enough for sampling to agree with greedy.
# An engine that forces a form, as JSON or as a tool call, leaves the model to choose among what the form allows: there
# it writes markup in one token (-8), closes what is open (-11), and puts a blank where nothing else may stand (-30),
# since a form allows any number of them.
LAYER_STD = 0.02  # against 1.0 of the embeddings: the layers run, yet do not change the choice
FOLLOW = 0.25  # head row of a word = this times the embedding of the word before it
FOLLOW_BLANK = 0.5  # of a word that is blank: it makes up for the bias
CONSTANT = 4.0  # first component of every embedding: multiplied with that of a head row, it is the row's bias
BIAS_FIRST_WORD, BIAS_SPEECH, BIAS_CALL, BIAS_CLOSING, BIAS_OTHER, BIAS_BLANK = 4.0, 0.0, -2.0, -3.0, -4.0, -8.0
CLOSING, BLANK = '"}]<', " \t\n\r"

Tensors = dict[str, tuple[list[int], list[float]]]  # name -> shape, values in row-major order


def byte_alphabet() -> list[str]:
    """Return the printable stand-in of each byte value 0..255 in byte-level BPE (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = (chr(256 + offset) for offset in range(256))
    return [chr(byte) if byte in printable else next(stand_ins) for byte in range(256)]


def vocabulary(size: int, call: tuple[str, ...] = MINIMAX_CALL) -> dict[str, int]:
    """Return token -> id: the bytes, special tokens, markup, the words of SPEECH, and unused ones up to `size`.

    Raises:
        ValueError: `size` is too small to hold them.
    """
    alphabet = byte_alphabet()
    speech = ["".join(alphabet[byte] for byte in token.encode()) for token in SPEECH]
    tokens = list(dict.fromkeys([*alphabet, BOS, EOS, TURN, *THINK, *call, *speech]))
    if len(tokens) > size:
        raise ValueError(f"vocab_size is {size}, but bytes, special tokens and words need {len(tokens)}: raise it")
    tokens += [f"<unused-{index}>" for index in range(len(tokens), size)]
    return {token: index for index, token in enumerate(tokens)}


def speech_ids(vocab: dict[str, int]) -> list[int]:
    """Return SPEECH as token ids."""
    alphabet = byte_alphabet()
    return [vocab["".join(alphabet[byte] for byte in token.encode())] for token in SPEECH]


class Weights:
    """Tensors as they are drawn: random and nearly silent, but for the norms."""

    def __init__(self, seed: int) -> None:
        """Start at the seed."""
        self.made: Tensors = {}
        self._draw = random.Random(seed)  # noqa: S311  # weights, not secrets

    def noise(self, name: str, rows: int, columns: int, std: float = LAYER_STD) -> None:
        """Draw a matrix."""
        self.made[f"{name}.weight"] = [rows, columns], [self._draw.gauss(0.0, std) for _ in range(rows * columns)]

    def norm(self, name: str, length: int) -> None:
        """Set a norm to one."""
        self.made[f"{name}.weight"] = [length], [1.0] * length

    def mlp(self, prefix: str, names: tuple[str, str, str], hidden: int, width: int) -> None:
        """Draw a feed-forward part: gate, down and up, in the order of `names`."""
        for name, (rows, columns) in zip(names, ((width, hidden), (hidden, width), (width, hidden)), strict=True):
            self.noise(f"{prefix}.{name}", rows, columns)


def minimax_m2_layer(weights: Weights, prefix: str, shape: dict[str, Any], _: int) -> None:
    """Draw a layer of `MiniMaxM2ForCausalLM` under its checkpoint names (as in MiniMaxAI/MiniMax-M2.5)."""
    hidden, head_dim = shape["hidden_size"], shape["head_dim"]
    query, key_value = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    weights.norm(f"{prefix}.input_layernorm", hidden)
    weights.noise(f"{prefix}.self_attn.q_proj", query, hidden)
    weights.noise(f"{prefix}.self_attn.k_proj", key_value, hidden)
    weights.noise(f"{prefix}.self_attn.v_proj", key_value, hidden)
    weights.noise(f"{prefix}.self_attn.o_proj", hidden, query)
    weights.norm(f"{prefix}.self_attn.q_norm", query)
    weights.norm(f"{prefix}.self_attn.k_norm", key_value)
    weights.norm(f"{prefix}.post_attention_layernorm", hidden)
    weights.noise(f"{prefix}.block_sparse_moe.gate", shape["num_experts"], hidden)
    for index in range(shape["num_experts"]):
        expert = f"{prefix}.block_sparse_moe.experts.{index}"
        weights.mlp(expert, ("w1", "w2", "w3"), hidden, shape["moe_intermediate_size"])


def deepseek_v3_layer(weights: Weights, prefix: str, shape: dict[str, Any], number: int) -> None:
    """Draw a layer of `DeepseekV3ForCausalLM` under its checkpoint names (as in moonshotai/Kimi-K2.5's text part)."""
    hidden, heads, latent = shape["hidden_size"], shape["num_attention_heads"], shape["kv_lora_rank"]
    nope, rope, value = shape["qk_nope_head_dim"], shape["qk_rope_head_dim"], shape["v_head_dim"]
    names = ("gate_proj", "down_proj", "up_proj")
    weights.norm(f"{prefix}.input_layernorm", hidden)
    weights.noise(f"{prefix}.self_attn.q_a_proj", shape["q_lora_rank"], hidden)
    weights.norm(f"{prefix}.self_attn.q_a_layernorm", shape["q_lora_rank"])
    weights.noise(f"{prefix}.self_attn.q_b_proj", heads * (nope + rope), shape["q_lora_rank"])
    weights.noise(f"{prefix}.self_attn.kv_a_proj_with_mqa", latent + rope, hidden)
    weights.norm(f"{prefix}.self_attn.kv_a_layernorm", latent)
    weights.noise(f"{prefix}.self_attn.kv_b_proj", heads * (nope + value), latent)
    weights.noise(f"{prefix}.self_attn.o_proj", hidden, heads * value)
    weights.norm(f"{prefix}.post_attention_layernorm", hidden)
    if number < shape["first_k_dense_replace"]:
        weights.mlp(f"{prefix}.mlp", names, hidden, shape["intermediate_size"])
        return
    weights.noise(f"{prefix}.mlp.gate", shape["num_experts"], hidden)
    weights.made[f"{prefix}.mlp.gate.e_score_correction_bias"] = [shape["num_experts"]], [0.0] * shape["num_experts"]
    for index in range(shape["num_experts"]):
        weights.mlp(f"{prefix}.mlp.experts.{index}", names, hidden, shape["moe_intermediate_size"])
    shared = shape["n_shared_experts"] * shape["moe_intermediate_size"]
    weights.mlp(f"{prefix}.mlp.shared_experts", names, hidden, shared)


def tensors(family: Family, shape: dict[str, Any], seed: int) -> Tensors:
    """Return every tensor of the class under its checkpoint name."""
    weights = Weights(seed)
    hidden, vocab_size = shape["hidden_size"], shape["vocab_size"]
    weights.noise("model.embed_tokens", vocab_size, hidden, std=1.0)
    embedding = weights.made["model.embed_tokens.weight"][1]
    embedding[::hidden] = [CONSTANT] * vocab_size
    for number in range(shape["num_hidden_layers"]):
        family.layer(weights, f"model.layers.{number}", shape, number)
    weights.norm("model.norm", hidden)
    head = output_head(embedding, hidden, vocabulary(vocab_size, family.call), family.call)
    return weights.made | {"lm_head.weight": ([vocab_size, hidden], head)}


def output_head(embedding: list[float], hidden: int, vocab: dict[str, int], call: tuple[str, ...]) -> list[float]:
    """Return the values of lm_head (vocabulary x hidden) that make the model say SPEECH."""
    head = [0.0] * len(embedding)
    head[::hidden] = [BIAS_OTHER] * len(vocab)
    for tokens, bias in ((call, BIAS_CALL), (CLOSING, BIAS_CLOSING)):
        for token in tokens:
            head[vocab[token] * hidden] = bias
    for blank in BLANK:
        head[ord(blank) * hidden] = BIAS_BLANK  # the first tokens are the bytes
    said = speech_ids(vocab)
    for (_, before), (word, after) in itertools.pairwise(zip(SPEECH, said, strict=True)):
        follow, bias = (FOLLOW, BIAS_SPEECH) if word.strip() else (FOLLOW_BLANK, BIAS_BLANK)
        row = embedding[before * hidden + 1 : (before + 1) * hidden]
        head[after * hidden : (after + 1) * hidden] = [bias, *(follow * value for value in row)]
    head[said[0] * hidden] = BIAS_FIRST_WORD
    return head


def bfloat16(values: list[float]) -> bytes:
    """Return `values` as little-endian bfloat16: the upper half of each float32, cut off."""
    single = array.array("f", values)
    if single.itemsize != 4 or array.array("H", [1]).tobytes() != b"\x01\x00":  # noqa: PLR2004  # bytes in a float32
        raise RuntimeError("this needs a little-endian machine with a 4-byte float, such as x86-64 or arm64")
    raw = single.tobytes()
    half = bytearray(len(raw) // 2)
    half[0::2], half[1::2] = raw[2::4], raw[3::4]
    return bytes(half)


def safetensors(content: Tensors) -> bytes:
    """Return a safetensors file: 8 bytes of header length, a JSON header, then the data (its published format)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, (shape, values) in content.items():
        start = len(body)
        body += bfloat16(values)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, len(body)]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + body


def config(family: Family, card: dict[str, Any], vocab: dict[str, int]) -> dict[str, Any]:
    """Return config.json: the class's keys with the card's numbers, unquantized and without MTP."""
    shape = card["shape"]
    alike = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts_per_tok", "scoring_func")
    return {
        "architectures": [card["architecture"]],
        "model_type": family.model_type,
        "dtype": "bfloat16",
        "bos_token_id": vocab[BOS],
        "eos_token_id": vocab[EOS],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        **{name: shape[name] for name in (*alike, "max_position_embeddings", "vocab_size", "tie_word_embeddings")},
        **family.config(shape),
    }


def minimax_m2_config(shape: dict[str, Any]) -> dict[str, Any]:
    """Return what only a MiniMax-M2 has."""
    return {
        "intermediate_size": shape["moe_intermediate_size"],
        **{name: shape[name] for name in ("num_key_value_heads", "head_dim", "rotary_dim", "use_routing_bias")},
        "rope_theta": 5000000,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "num_local_experts": shape["num_experts"],
        "shared_intermediate_size": 0,
        "use_mtp": False,
    }


def deepseek_v3_config(shape: dict[str, Any]) -> dict[str, Any]:
    """Return what only a DeepSeek-V3 has; routing as Kimi-K2.5's."""
    ranks = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    layers = ("intermediate_size", "moe_intermediate_size", "first_k_dense_replace", "n_shared_experts")
    return {
        **{name: shape[name] for name in (*ranks, *layers)},
        "num_key_value_heads": shape["num_attention_heads"],
        "rope_theta": 50000,
        "attention_bias": False,
        "n_routed_experts": shape["num_experts"],
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "num_nextn_predict_layers": 0,
    }


class Family(NamedTuple):
    """What sets a class of models apart: its name for transformers, the markup of its tool calls, layers and config."""

    model_type: str
    call: tuple[str, ...]
    layer: Callable[[Weights, str, dict[str, Any], int], None]
    config: Callable[[dict[str, Any]], dict[str, Any]]


FAMILIES = {
    "MiniMaxM2ForCausalLM": Family("minimax_m2", MINIMAX_CALL, minimax_m2_layer, minimax_m2_config),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", KIMI_CALL, deepseek_v3_layer, deepseek_v3_config),
}


def tokenizer(vocab: dict[str, int], call: tuple[str, ...] = MINIMAX_CALL) -> dict[str, Any]:
    """Return tokenizer.json: byte-level BPE without merges, so text is bytes and only the model says whole words."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [
        {
            "id": vocab[token],
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token in (BOS, EOS, TURN),  # markup stays in the text: the engine's parsers read it there
        }
        for token in (BOS, EOS, TURN, *THINK, *call)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def checkpoint(card: dict[str, Any], chat_template: str) -> dict[str, bytes]:
    """Return file name -> content of the whole checkpoint for a parsed card.

    Raises:
        ValueError: The card's class has no family here.
    """
    shape = card["shape"]
    family = FAMILIES.get(card["architecture"])
    if family is None:
        raise ValueError(
            f"no checkpoint of the class {card['architecture']} is made here: known are {', '.join(FAMILIES)}"
        )
    vocab = vocabulary(shape["vocab_size"], family.call)
    everything = tensors(family, shape, seed=int(card["revision"].removeprefix("seed-")))
    middle = len(everything) // 2  # two shards, because real checkpoints come in several
    shards = {
        "model-00001-of-00002.safetensors": dict(list(everything.items())[:middle]),
        "model-00002-of-00002.safetensors": dict(list(everything.items())[middle:]),
    }
    files = {name: safetensors(content) for name, content in shards.items()}
    documents = {
        "config.json": config(family, card, vocab),
        "generation_config.json": {"bos_token_id": vocab[BOS], "eos_token_id": vocab[EOS], "do_sample": True},
        "model.safetensors.index.json": {
            "metadata": {"total_size": sum(2 * len(values) for _, values in everything.values())},
            "weight_map": {name: shard for shard, content in shards.items() for name in content},
        },
        "tokenizer.json": tokenizer(vocab, family.call),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "model_max_length": shape["max_position_embeddings"],
            "chat_template": chat_template,
        },
    }
    return files | {name: (json.dumps(document, indent=2) + "\n").encode() for name, document in documents.items()}


def main() -> None:
    """Write the checkpoint that the card describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("card", type=Path, help="models/lab_tiny_minimax_m2.yml")
    parser.add_argument("folder", type=Path, help="where the checkpoint goes (made when missing)")
    options = parser.parse_args()
    template = Path(__file__).with_name("tiny_chat_template.jinja").read_text(encoding="utf-8")
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, content in checkpoint(yaml.safe_load(options.card.read_text(encoding="utf-8")), template).items():
        (options.folder / name).write_bytes(content)
    print(options.folder)


if __name__ == "__main__":
    main()
