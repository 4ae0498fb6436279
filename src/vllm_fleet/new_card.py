"""A draft of a card from a model's config.json: what it says, and what nobody can know from it."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm_fleet import catalog, memory
from vllm_fleet.catalog import Card
from vllm_fleet.errors import BadInputError
from vllm_fleet.layout import Layout
from vllm_fleet.options import OLDEST_VLLM_VERSION

# Our name of a number, and the names that configs give it.
_NUMBERS = (
    ("num_hidden_layers", ("num_hidden_layers",)),
    ("hidden_size", ("hidden_size",)),
    ("num_attention_heads", ("num_attention_heads",)),
    ("num_key_value_heads", ("num_key_value_heads",)),
    ("head_dim", ("head_dim",)),
    ("rotary_dim", ("rotary_dim",)),
    ("q_lora_rank", ("q_lora_rank",)),
    ("kv_lora_rank", ("kv_lora_rank",)),
    ("qk_nope_head_dim", ("qk_nope_head_dim",)),
    ("qk_rope_head_dim", ("qk_rope_head_dim",)),
    ("v_head_dim", ("v_head_dim",)),
    ("index_n_heads", ("index_n_heads",)),
    ("index_head_dim", ("index_head_dim",)),
    ("index_topk", ("index_topk",)),
    ("intermediate_size", ("dense_intermediate_size", "intermediate_size")),
    ("first_k_dense_replace", ("first_k_dense_replace",)),
    ("num_experts", ("num_local_experts", "n_routed_experts", "num_experts")),
    ("num_experts_per_tok", ("num_experts_per_tok", "experts_per_token")),
    ("n_shared_experts", ("n_shared_experts",)),
    ("moe_intermediate_size", ("moe_intermediate_size",)),
    ("scoring_func", ("scoring_func",)),
    ("use_routing_bias", ("use_routing_bias",)),
    ("vocab_size", ("vocab_size",)),
    ("max_position_embeddings", ("max_position_embeddings",)),
    ("num_nextn_predict_layers", ("num_nextn_predict_layers",)),
)
_MLA_KEYS = {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
_DSA_KEYS = {"index_n_heads", "index_head_dim", "index_topk"}
# Signs of layers that the memory model does not know.
_UNKNOWN_LAYERS = ("sparse_attention_config", "linear_attn_config", "mamba_d_state", "ssm_cfg", "linear_num_key_heads")


def draft(path: str | Path, model_id: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """Make a card.

    Args:
        path: A config.json; an hf_quant_config.json beside it is read too.
        model_id: "owner/name" on Hugging Face; a config does not hold it.

    Returns:
        The card, sound by the schema, and a sentence for each thing that it could not know.

    Raises:
        BadInputError: The file is no model's config, or the model has layers or a quantization that the planner does
            not know.
    """
    path = Path(path)
    config = _read(path)
    text = config.get("text_config") or config
    unknown: list[str] = []
    attention = "gqa" if not text.get("kv_lora_rank") else "dsa" if text.get("index_topk") else "mla"
    shape = _shape(text, attention, path, unknown)
    quantization, kv_cache_dtype = _quantization(path, config, text, shape, unknown)
    architecture = _first(config, "architectures", path)
    name = model_id or f"unknown/{path.resolve().parent.name}"
    if model_id is None:
        unknown.append(f"`id`: a config does not name its repository; {name!r} stands in. Give --id OWNER/NAME.")
    engine, contract = _engine(architecture, kv_cache_dtype, unknown)
    card: dict[str, Any] = {
        "schema": catalog.SCHEMA,
        "id": name,
        "revision": None,
        "architecture": architecture,
        "attention": attention,
        "shape": shape,
        "quantization": quantization,
        "checkpoint_gib": 1.0,
        "engine": engine,
        "speculative": None,
        "contract": contract,
        "sources": {"shape": f"https://huggingface.co/{name}/blob/main/config.json"},
    }
    unknown.append(
        "`revision`: a config does not hold its own commit; write the one you reviewed, or it is not deployed."
    )
    if shape.get("num_nextn_predict_layers") or text.get("num_mtp_modules"):
        unknown.append(
            "`speculative`: the config counts multi-token-prediction layers, and a checkpoint may still have no "
            "weights for them (MiniMax-M2.5's has none); look into its index of tensors."
        )
    parsed = Card.from_dict(card, str(path))
    drafts = shape.get("num_nextn_predict_layers", 0) > 0
    card["checkpoint_gib"] = round(memory.weights_gib(parsed, Layout(), speculative=drafts), 1)
    unknown.append(f"`checkpoint_gib`: {card['checkpoint_gib']} GiB is computed; the sum of the files may differ.")
    return card, unknown


def render(card: Mapping[str, Any], unknown: Iterable[str]) -> str:
    """The card as a YAML file, its unknowns on top."""
    import yaml  # noqa: PLC0415  it costs a fifth of the start of every command

    notes = "".join(f"# - {sentence}\n" for sentence in unknown)
    body = yaml.safe_dump(dict(card), sort_keys=False, width=120)
    return f"---\n# Drafted from a config.json. What it could not know:\n{notes}{body}"


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInputError(f"{path}: no such file. Download the model's config.json and give its path.") from None
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path}: not readable as JSON ({error}). Give a model's config.json.") from None
    if not isinstance(data, dict):
        raise BadInputError(f"{path}: a model's config.json is a mapping, and this file holds {type(data).__name__}.")
    return data


def _first(config: Mapping[str, Any], key: str, path: Path) -> str:
    values = config.get(key)
    if not isinstance(values, list) or not values:
        raise BadInputError(f"{path}: {key!r} is missing, so this is no model's config.json.")
    return str(values[0])


def _shape(text: Mapping[str, Any], attention: str, path: Path, unknown: list[str]) -> dict[str, Any]:
    found = [key for key in _UNKNOWN_LAYERS if text.get(key)]
    kinds = set(text.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if found or kinds:
        raise BadInputError(
            f"{path}: the model has {', '.join([*found, *sorted(kinds)])}, whose memory this planner does not know."
        )
    shape: dict[str, Any] = {}
    for ours, theirs in _NUMBERS:
        value = next((text[name] for name in theirs if text.get(name) is not None), None)
        if value not in (None, 0):
            shape[ours] = value
    keep_out = {"num_key_value_heads", "head_dim"} if attention != "gqa" else _MLA_KEYS | _DSA_KEYS
    shape = {key: value for key, value in shape.items() if key not in keep_out}
    if attention == "gqa" and "head_dim" not in shape and {"hidden_size", "num_attention_heads"} <= shape.keys():
        shape["head_dim"] = shape["hidden_size"] // shape["num_attention_heads"]
    if "num_experts" in shape and "moe_intermediate_size" not in shape:
        # Some configs call the experts' width `intermediate_size`: then no layer is dense.
        shape["moe_intermediate_size"] = shape.get("intermediate_size", 0)
    if "num_experts" in shape and not shape.get("first_k_dense_replace"):
        shape.pop("intermediate_size", None)
    shared = text.get("indexer_types")
    if shared:
        shape["num_indexer_layers"] = shared.count("full")
    sliding = (text.get("layer_types") or []).count("sliding_attention")
    if sliding:
        shape |= {"sliding_window": text.get("sliding_window"), "num_sliding_layers": sliding}
    if "tie_word_embeddings" not in text:
        unknown.append("`shape.tie_word_embeddings`: the config does not say; false is the larger of the two.")
    shape["tie_word_embeddings"] = bool(text.get("tie_word_embeddings"))
    return shape


def _quantization(
    path: Path, config: Mapping[str, Any], text: Mapping[str, Any], shape: Mapping[str, Any], unknown: list[str]
) -> tuple[dict[str, Any], str]:
    """The card's quantization and the KV cache's type."""
    beside = path.with_name("hf_quant_config.json")
    extra = _read(beside).get("quantization", {}) if beside.is_file() else {}
    found = config.get("quantization_config") or text.get("quantization_config") or {}
    if not found and not extra:
        return {"method": "none"}, "auto"
    skipped = extra.get("exclude_modules") or found.get("modules_to_not_convert") or found.get("ignore") or []
    groups: Mapping[str, Any] = found.get("config_groups") or {}
    weights: Mapping[str, Any] = next((group["weights"] for group in groups.values() if group.get("weights")), {})
    algorithm = str(extra.get("quant_algo") or found.get("quant_algo") or "").upper()
    bits = (weights.get("num_bits"), weights.get("type"))
    cache = str(extra.get("kv_cache_quant_algo") or (found.get("kv_cache_scheme") and "FP8") or "").upper()
    result: dict[str, Any]
    if "NVFP4" in algorithm or bits == (4, "float"):
        result = {"method": "nvfp4", "group": 16}
    elif bits == (4, "int"):
        result = {"method": "int4", "group": weights.get("group_size")}
    elif bits == (8, "float"):
        result = {"method": "fp8_channel"}
    elif found.get("quant_method") == "mxfp4":
        result = {"method": "mxfp4", "group": 32}
    elif found.get("quant_method") == "fp8":
        block = found.get("weight_block_size")
        result = {"method": "fp8_block", "block": block} if block else {"method": "fp8_channel"}
    else:
        raise BadInputError(
            f"{path}: the quantization {found.get('quant_method') or algorithm!r} is not known to this planner, which "
            f"knows {', '.join(catalog.QUANTIZATION_METHODS)}."
        )
    if not skipped:
        unknown.append("`quantization.unconverted`: the config names no module that stays in BF16, besides the head.")
    result["unconverted"] = _unconverted(skipped, int(shape.get("num_hidden_layers", 0)))
    return result, "fp8" if cache == "FP8" else "auto"


def _unconverted(names: Iterable[str], layers: int) -> list[str]:
    """Our words for the modules that a checkpoint leaves alone. Norms and routers never count."""
    rules = (
        ("lm_head", r"lm_head"),
        ("gate", r"(mlp|block_sparse_moe)\.(gate|router)$|^gate$"),
        (
            "self_attn",
            r"self_attn(\.?\*|$)|self_attn\.(q|k|v|o|qkv|q_a|q_b|kv_a|kv_b)_proj|self_attn\.\{|:\.\*self_attn",
        ),
        ("indexer", r"indexer\*"),
        ("shared_experts", r"shared_experts(\.?\*|$)|shared_experts\."),
        ("mlp", r"mlp\\?\.\(?(gate\||gate_up_proj|up_proj|down_proj)"),
        ("experts", r"(?<!shared_)experts\*"),
    )
    names = list(names)
    found = [word for word, pattern in rules if any(re.search(pattern, name) for name in names)]
    whole = {int(match[1]) for name in names if (match := re.fullmatch(r"model\.layers\.(\d+)\.?\*?", name))}
    return found + (["mtp"] if any(number >= layers for number in whole) else [])


def _engine(architecture: str, kv_cache_dtype: str, unknown: list[str]) -> tuple[dict[str, Any], dict[str, bool]]:
    """What a card of the same class in the catalog says, or nothing."""
    like = next(
        (
            card
            for name in catalog.known_cards()
            if not (card := catalog.load(name)).lab and card.architecture == architecture
        ),
        None,
    )
    engine: dict[str, Any] = {
        "minimum_version": like.engine.minimum_version if like else OLDEST_VLLM_VERSION,
        "tool_parser": like.engine.tool_parser if like else None,
        "reasoning_parser": like.engine.reasoning_parser if like else None,
        "chat_template": None,
        "trust_remote_code": False,
        "kv_cache_dtype": kv_cache_dtype,
        "args": list(like.engine.args) if like else [],
        "env": dict(like.engine.env) if like else {},
    }
    if like:
        unknown.append(f"`engine`: copied from {like.name}, whose class is the same; check parsers and version.")
    else:
        unknown.append(
            f"`engine`: no card in the catalog has the class {architecture}; its parsers, and the first vLLM that has "
            "it, are not in a config."
        )
    reasoning, tools = engine["reasoning_parser"] is not None, engine["tool_parser"] is not None
    return engine, {"reasoning": reasoning, "tools": tools, "json_schema": True}
