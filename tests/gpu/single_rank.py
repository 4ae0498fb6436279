#!/usr/bin/env python3
"""One rank of a replica as a model of its own, so that one GPU stands in for several.

A rank of tensor parallelism holds a share of the heads, of each expert's width and of the vocabulary; of expert
parallelism a share of the experts. A model with exactly that shape loads, computes and caches on one GPU what the rank
would on one of its group, less the exchanges with the others. Its weights are dummies (`--load-format dummy`), so only
config, tokenizer and chat template are written.

Usage: single_rank.py CARD FOLDER [--tensor-parallel N] [--expert-parallel] [--layers N] [--dense-attention]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "tests/fixtures/configs"
DUMMY = ["--load-format", "dummy"]

# A card's names of what is cut, and a config.json's, which differ between model types.
CONFIG_NAMES = {
    "num_hidden_layers": ("num_hidden_layers",),
    "num_attention_heads": ("num_attention_heads",),
    "num_key_value_heads": ("num_key_value_heads",),
    "vocab_size": ("vocab_size",),
    "num_experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    # Where every layer has experts, intermediate_size is an expert's.
    "moe_intermediate_size": ("moe_intermediate_size", "intermediate_size"),
    "intermediate_size": ("intermediate_size",),
}
INDEXER = ("index_n_heads", "index_head_dim", "index_topk", "num_indexer_layers")


def rank_shape(shape: dict[str, Any], tensor_parallel: int, *, expert_parallel: bool, layers: int) -> dict[str, Any]:
    """What one rank holds, by the names that a card gives.

    Raises:
        ValueError: The model cannot be cut into so many ranks.
    """
    cut = {key: shape[key] for key in CONFIG_NAMES if key in shape}
    cut["num_hidden_layers"] = layers or shape["num_hidden_layers"]
    experts = [] if not shape.get("num_experts") else ["num_experts" if expert_parallel else "moe_intermediate_size"]
    for key in ("num_attention_heads", "vocab_size", "intermediate_size", *experts):
        if cut.get(key):
            if cut[key] % tensor_parallel:
                raise ValueError(f"{key} is {cut[key]}, which {tensor_parallel} ranks cannot share evenly")
            cut[key] //= tensor_parallel
    if "num_key_value_heads" in cut:
        cut["num_key_value_heads"] = max(1, cut["num_key_value_heads"] // tensor_parallel)
    return cut


def rank_card(card: dict[str, Any], cut: dict[str, Any], *, dense_attention: bool) -> dict[str, Any]:
    """The card of a model with a rank's shape, which the engine fills with dummy weights."""
    whole = card["shape"]
    made = {**card, "shape": {**whole, **cut}, "engine": {**card["engine"]}, "speculative": None}
    made["shape"]["num_nextn_predict_layers"] = 0
    if dense_attention:
        made |= {"attention": "mla", "architecture": "DeepseekV3ForCausalLM"}
        made["shape"] = {key: value for key, value in made["shape"].items() if key not in INDEXER}
    engine = made["engine"]
    # The tokenizer is the lab's, which knows the markup of one family.
    if not str(engine["tool_parser"]).startswith("minimax"):
        engine |= {"tool_parser": None, "reasoning_parser": None, "args": []}
    engine["args"] = [*engine["args"], *DUMMY]
    return made


def rank_config(config: dict[str, Any], card: dict[str, Any], vocabulary: dict[str, int]) -> dict[str, Any]:
    """The config.json of a model with a rank's shape, from the whole model's."""
    made = {key: value for key, value in config.items() if key not in ("auto_map", "transformers_version")}
    shape = card["shape"]
    written: set[str] = set()
    for key, names in CONFIG_NAMES.items():
        name = next((name for name in names if name in made), None)
        if name and name not in written and shape.get(key):
            made[name] = shape[key]
            written.add(name)
    if card["attention"] == "mla" and "index_topk" in made:
        made = {key: value for key, value in made.items() if not key.startswith("index")}
        made |= {"architectures": [card["architecture"]], "model_type": "deepseek_v3"}
    made["num_nextn_predict_layers"] = 0
    # A dummy bias outweighs what dummy weights tell tokens apart by: all would be sent to the same few experts, and a
    # step would read a twentieth of what it reads of a real model.
    made |= {key: off for key, off in (("use_routing_bias", False), ("topk_method", "greedy")) if key in made}
    if "num_key_value_heads" in made and card["attention"] != "gqa":
        made["num_key_value_heads"] = shape["num_attention_heads"]
    made |= {"bos_token_id": vocabulary["]~!b["], "eos_token_id": vocabulary["[e~["]}
    made.pop("pad_token_id", None)
    return made


def lab_tokenizer() -> ModuleType:
    """The lab's script that makes a byte-level tokenizer of any size."""
    spec = importlib.util.spec_from_file_location("make_tiny_model", ROOT / "lab/make_tiny_model.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("lab/make_tiny_model.py is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(
    name: str,
    folder: Path,
    tensor_parallel: int,
    *,
    expert_parallel: bool = False,
    layers: int = 0,
    dense_attention: bool = False,
    kv_cache_dtype: str = "auto",
) -> dict[str, Any]:
    """Write card.yml, config.json, tokenizer and chat template of one rank; returns the card."""
    card = yaml.safe_load((ROOT / f"models/{name}.yml").read_text(encoding="utf-8"))
    cut = rank_shape(card["shape"], tensor_parallel, expert_parallel=expert_parallel, layers=layers)
    card["checkpoint_gib"] = max(1, math.ceil(card["checkpoint_gib"] / tensor_parallel))
    card = rank_card(card, cut, dense_attention=dense_attention)
    if kv_cache_dtype != "auto":
        card["engine"]["kv_cache_dtype"] = kv_cache_dtype
    config = json.loads((CONFIGS / card["id"].replace("/", "--") / "config.json").read_text(encoding="utf-8"))
    lab = lab_tokenizer()
    vocabulary = lab.vocabulary(cut["vocab_size"])
    template = (ROOT / "lab/tiny_chat_template.jinja").read_text(encoding="utf-8")
    documents = {
        "config.json": rank_config(config, card, vocabulary),
        # As MiniMax-M2.5 ships it: every request samples with top-k and top-p unless it says otherwise.
        "generation_config.json": {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 40},
        "tokenizer.json": lab.tokenizer(vocabulary),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": lab.BOS,
            "eos_token": lab.EOS,
            "model_max_length": card["shape"]["max_position_embeddings"],
            "chat_template": template,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    for file, document in documents.items():
        (folder / file).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (folder / "card.yml").write_text(yaml.safe_dump(card, sort_keys=False), encoding="utf-8")
    return card


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("card", help="name of a card in models/")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--expert-parallel", action="store_true", help="whole experts on each rank")
    parser.add_argument("--layers", type=int, default=0, help="only so many layers (default: all)")
    parser.add_argument("--dense-attention", action="store_true", help="latent attention without its sparse indexer")
    parser.add_argument("--kv-cache-dtype", default="auto")
    options = vars(parser.parse_args())
    write(options.pop("card"), options.pop("folder"), options.pop("tensor_parallel"), **options)


if __name__ == "__main__":
    main()
