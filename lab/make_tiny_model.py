#!/usr/bin/env python3
"""Write the lab's checkpoint: a MiniMax-M2 of half a million parameters that the real engine serves.

The card gives the shape and, as its revision, the seed. Every layer is random and nearly silent: what decides the next
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
from typing import Any

import yaml

BOS, EOS, TURN = "]~!b[", "[e~[", "]~b]"
CALL = ("<minimax:tool_call>", "</minimax:tool_call>")
MARKUP = ("<think>", "</think>", *CALL)
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


def vocabulary(size: int) -> dict[str, int]:
    """Return token -> id: the bytes, special tokens, markup, the words of SPEECH, and unused ones up to `size`.

    Raises:
        ValueError: `size` is too small to hold them.
    """
    alphabet = byte_alphabet()
    speech = ["".join(alphabet[byte] for byte in token.encode()) for token in SPEECH]
    tokens = list(dict.fromkeys([*alphabet, BOS, EOS, TURN, *MARKUP, *speech]))
    if len(tokens) > size:
        raise ValueError(f"vocab_size is {size}, but bytes, special tokens and words need {len(tokens)}: raise it")
    tokens += [f"<unused-{index}>" for index in range(len(tokens), size)]
    return {token: index for index, token in enumerate(tokens)}


def speech_ids(vocab: dict[str, int]) -> list[int]:
    """Return SPEECH as token ids."""
    alphabet = byte_alphabet()
    return [vocab["".join(alphabet[byte] for byte in token.encode())] for token in SPEECH]


def tensors(shape: dict[str, Any], seed: int) -> Tensors:
    """Return every tensor of `MiniMaxM2ForCausalLM` under its checkpoint name (as in MiniMaxAI/MiniMax-M2.5)."""
    draw = random.Random(seed)  # noqa: S311  # weights, not secrets
    hidden, vocab_size, head_dim = shape["hidden_size"], shape["vocab_size"], shape["head_dim"]
    query, key_value = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    expert = shape["moe_intermediate_size"]

    def noise(*dimensions: int, std: float = LAYER_STD) -> tuple[list[int], list[float]]:
        rows, columns = dimensions
        return [rows, columns], [draw.gauss(0.0, std) for _ in range(rows * columns)]

    def ones(length: int) -> tuple[list[int], list[float]]:
        return [length], [1.0] * length

    made: Tensors = {"model.embed_tokens.weight": noise(vocab_size, hidden, std=1.0)}
    embedding = made["model.embed_tokens.weight"][1]
    embedding[::hidden] = [CONSTANT] * vocab_size
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        made |= {
            f"{prefix}.input_layernorm.weight": ones(hidden),
            f"{prefix}.self_attn.q_proj.weight": noise(query, hidden),
            f"{prefix}.self_attn.k_proj.weight": noise(key_value, hidden),
            f"{prefix}.self_attn.v_proj.weight": noise(key_value, hidden),
            f"{prefix}.self_attn.o_proj.weight": noise(hidden, query),
            f"{prefix}.self_attn.q_norm.weight": ones(query),
            f"{prefix}.self_attn.k_norm.weight": ones(key_value),
            f"{prefix}.post_attention_layernorm.weight": ones(hidden),
            f"{prefix}.block_sparse_moe.gate.weight": noise(shape["num_experts"], hidden),
        }
        for index in range(shape["num_experts"]):
            made |= {
                f"{prefix}.block_sparse_moe.experts.{index}.w1.weight": noise(expert, hidden),
                f"{prefix}.block_sparse_moe.experts.{index}.w2.weight": noise(hidden, expert),
                f"{prefix}.block_sparse_moe.experts.{index}.w3.weight": noise(expert, hidden),
            }
    made["model.norm.weight"] = ones(hidden)

    made["lm_head.weight"] = [vocab_size, hidden], output_head(embedding, vocab_size, hidden)
    return made


def output_head(embedding: list[float], vocab_size: int, hidden: int) -> list[float]:
    """Return the values of lm_head (vocab_size x hidden) that make the model say SPEECH."""
    head = [0.0] * (vocab_size * hidden)
    head[::hidden] = [BIAS_OTHER] * vocab_size
    vocab = vocabulary(vocab_size)
    for tokens, bias in ((CALL, BIAS_CALL), (CLOSING, BIAS_CLOSING)):
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


def config(shape: dict[str, Any], architecture: str, vocab: dict[str, int]) -> dict[str, Any]:
    """Return config.json: M2.5's keys with the card's numbers, unquantized and without MTP."""
    return {
        "architectures": [architecture],
        "model_type": "minimax_m2",
        "dtype": "bfloat16",
        "bos_token_id": vocab[BOS],
        "eos_token_id": vocab[EOS],
        "hidden_act": "silu",
        "hidden_size": shape["hidden_size"],
        "intermediate_size": shape["moe_intermediate_size"],
        "num_hidden_layers": shape["num_hidden_layers"],
        "num_attention_heads": shape["num_attention_heads"],
        "num_key_value_heads": shape["num_key_value_heads"],
        "head_dim": shape["head_dim"],
        "rotary_dim": shape["rotary_dim"],
        "rope_theta": 5000000,
        "rms_norm_eps": 1e-6,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "num_local_experts": shape["num_experts"],
        "num_experts_per_tok": shape["num_experts_per_tok"],
        "scoring_func": shape["scoring_func"],
        "use_routing_bias": shape["use_routing_bias"],
        "shared_intermediate_size": 0,
        "max_position_embeddings": shape["max_position_embeddings"],
        "vocab_size": shape["vocab_size"],
        "tie_word_embeddings": shape["tie_word_embeddings"],
        "use_mtp": False,
    }


def tokenizer(vocab: dict[str, int]) -> dict[str, Any]:
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
            "special": token not in MARKUP,  # markup stays in the text: the engine's parsers read it there
        }
        for token in (BOS, EOS, TURN, *MARKUP)
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
    """Return file name -> content of the whole checkpoint for a parsed card."""
    shape = card["shape"]
    vocab = vocabulary(shape["vocab_size"])
    everything = tensors(shape, seed=int(card["revision"].removeprefix("seed-")))
    middle = len(everything) // 2  # two shards, because real checkpoints come in several
    shards = {
        "model-00001-of-00002.safetensors": dict(list(everything.items())[:middle]),
        "model-00002-of-00002.safetensors": dict(list(everything.items())[middle:]),
    }
    files = {name: safetensors(content) for name, content in shards.items()}
    documents = {
        "config.json": config(shape, card["architecture"], vocab),
        "generation_config.json": {"bos_token_id": vocab[BOS], "eos_token_id": vocab[EOS], "do_sample": True},
        "model.safetensors.index.json": {
            "metadata": {"total_size": sum(2 * len(values) for _, values in everything.values())},
            "weight_map": {name: shard for shard, content in shards.items() for name in content},
        },
        "tokenizer.json": tokenizer(vocab),
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
