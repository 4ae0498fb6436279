"""Model cards: what a model is, in numbers, with the source of each. One YAML file per model in `models/`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from vllm_fleet.errors import BadInputError

SCHEMA = 1
# The package is installed from the repository, whose models/ is the catalog.
MODELS_DIR = Path(__file__).resolve().parents[2] / "models"

ATTENTION_KINDS = ("gqa", "mla", "dsa")
QUANTIZATION_METHODS = ("none", "fp8_block", "fp8_channel", "nvfp4", "mxfp4", "int4")
# Weights per scale, where the format fixes it.
_FIXED_GROUPS = {"nvfp4": 16, "mxfp4": 32}
SPECULATIVE_METHODS = ("mtp",)

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Flags that a card cannot fix, because they depend on the host, and what to do instead.
_PLANNED_ARGS = {
    **dict.fromkeys(
        (
            *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp"),
            *("--decode-context-parallel-size", "-dcp", "--enable-expert-parallel", "-ep"),
            *("--gpu-memory-utilization", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens"),
        ),
        "leave it out: the plan computes it for each host from its GPUs",
    ),
    **dict.fromkeys(("--host", "--port", "--api-key"), "leave it out: the plan and the unit set it"),
    "--trust-remote-code": (
        "list each code file with its sha256 under engine.trust_remote_code instead, so only reviewed code runs"
    ),
}
_TOP_KEYS = {
    "schema", "lab", "name", "id", "revision", "architecture", "attention", "shape", "quantization", "checkpoint_gib",
    "engine", "speculative", "contract", "sources",
}  # fmt: skip
_SHAPE_KEYS = {
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rotary_dim",
    "intermediate_size", "first_k_dense_replace", "num_experts", "num_experts_per_tok", "n_shared_experts",
    "moe_intermediate_size", "scoring_func", "use_routing_bias", "vocab_size", "max_position_embeddings",
    "tie_word_embeddings", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "index_n_heads", "index_head_dim", "index_topk", "num_indexer_layers", "sliding_window", "num_sliding_layers",
    "num_nextn_predict_layers",
}  # fmt: skip
_MLA_KEYS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DSA_KEYS = ["index_n_heads", "index_head_dim", "index_topk"]
_ENGINE_KEYS = {
    "minimum_version", "tool_parser", "reasoning_parser", "chat_template", "trust_remote_code", "kv_cache_dtype",
    "max_gpu_memory_utilization", "args", "env",
}  # fmt: skip
_CONTRACT_KEYS = {"reasoning", "tools", "json_schema"}


@dataclass(frozen=True)
class Shape:
    """The numbers of a model's config.json that memory and layout depend on."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    intermediate_size: int  # of a dense layer; 0 where every layer has experts
    first_k_dense_replace: int  # how many leading layers are dense
    num_experts: int  # 0 for a dense model
    num_experts_per_tok: int
    n_shared_experts: int
    moe_intermediate_size: int
    # Multi-head latent attention: keys and values of all heads are one compressed row per token.
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    # DeepSeek sparse attention: an indexer picks the tokens that attention reads.
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    num_indexer_layers: int = 0  # layers with an indexer of their own
    # Hybrids: these layers keep only the last `sliding_window` tokens.
    sliding_window: int = 0
    num_sliding_layers: int = 0
    num_nextn_predict_layers: int = 0  # multi-token-prediction layers in the checkpoint, loaded only when asked for

    @property
    def num_moe_layers(self) -> int:
        """Layers whose feed-forward part is a mixture of experts."""
        return self.num_hidden_layers - self.first_k_dense_replace if self.num_experts else 0


@dataclass(frozen=True)
class Quantization:
    """How the weights are stored. `unconverted` names the modules that stay in BF16.

    Modules are `self_attn`, `indexer`, `mlp` (dense layers), `shared_experts` and `experts`; router, norms, embedding
    and head are never converted.
    """

    method: str
    block: int | None  # block FP8: side of a scale block; four-bit formats: weights per scale
    unconverted: tuple[str, ...]

    def converts(self, module: str) -> bool:
        """Whether this module's weights are quantized."""
        return self.method != "none" and not any(module.startswith(kept.rstrip("*")) for kept in self.unconverted)


@dataclass(frozen=True)
class Engine:
    """What vLLM must be told to serve this model."""

    minimum_version: str
    tool_parser: str | None
    reasoning_parser: str | None
    chat_template: str | None
    remote_code: Mapping[str, str]  # SHA-256 of each reviewed code file of the repository; empty: none is run
    kv_cache_dtype: str
    max_gpu_memory_utilization: float | None
    args: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class Speculative:
    """How the model drafts its own next tokens, from weights that its checkpoint really has."""

    method: str
    num_speculative_tokens: int


@dataclass(frozen=True)
class Card:
    """One model."""

    name: str
    id: str
    revision: str | None  # None: nobody has stated a commit; a plan can be made, a deployment cannot
    architecture: str
    attention: str
    lab: bool
    contract: Mapping[str, bool | str]  # what clients may rely on: reasoning, tools, json_schema
    shape: Shape
    quantization: Quantization
    checkpoint_gib: float
    engine: Engine
    speculative: Speculative | None = None

    @property
    def served_name(self) -> str:
        """What clients call the model: the last part of its id in lower case."""
        return self.id.rpartition("/")[2].lower()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "card") -> Self:
        """Check a card and read it.

        Args:
            data: The card, as in its YAML file; `name` is the file's stem where it came from one.
            source: The file, for messages.

        Raises:
            BadInputError: The message names the file, the key and the remedy.
        """
        check = _Checker(source)
        card = check.mapping(data, "card", _TOP_KEYS)
        if card.get("schema") != SCHEMA:
            check.fail("schema", f"is {card.get('schema')!r}", f"write `schema: {SCHEMA}`")
        lab = check.optional(card, "lab", bool, default=False)
        model_id = check.required(card, "id", str)
        if "revision" not in card:
            check.fail(
                "revision", "is missing", "give the commit, or write `revision: null` while nobody has stated it"
            )
        revision = check.optional(card, "revision", str)
        if not lab and revision is not None and not _COMMIT.fullmatch(revision):
            check.fail(
                "revision",
                f"is {revision!r}",
                "give the commit (40 hex digits), so that everyone serves the same files",
            )
        attention = check.choice(card, "attention", ATTENTION_KINDS)
        contract = check.mapping(check.required(card, "contract", Mapping), "contract", _CONTRACT_KEYS)
        for key in sorted(_CONTRACT_KEYS):
            if (key, contract.get(key)) != ("tools", "forced"):  # forced: these weights call none of their own will
                check.required(contract, key, bool, "contract")
        sources = check.required(card, "sources", Mapping)
        if not sources or not all(isinstance(s, str) and s.startswith("https://") for s in sources.values()):
            check.fail("sources", "must hold an https address per group of facts", "say where each number comes from")
        if "speculative" not in card:
            check.fail("speculative", "is missing", "write `speculative: null` when there is no draft model")
        return cls(
            name=str(card.get("name") or re.sub(r"[^a-z0-9]+", "_", model_id.rpartition("/")[2].lower())),
            id=model_id,
            revision=revision,
            architecture=check.required(card, "architecture", str),
            attention=attention,
            lab=lab,
            contract=contract,
            shape=_shape(check, check.required(card, "shape", Mapping), attention),
            quantization=_quantization(check, check.required(card, "quantization", Mapping)),
            checkpoint_gib=check.number(card, "checkpoint_gib"),
            engine=_engine(check, check.required(card, "engine", Mapping)),
            speculative=_speculative(check, card),
        )


def read_card(name: str, models_dir: str | Path | None = None) -> dict[str, Any]:
    """Read and check a card by name, or by the path of a YAML file.

    Args:
        name: "minimax_m2_5", or a path that ends in .yml or .yaml.
        models_dir: Folder of the cards; the repository's `models/` when not given.

    Returns:
        The card as written, with `name` added.

    Raises:
        BadInputError: No such card (the known ones are listed), or the card is wrong.
    """
    import yaml  # noqa: PLC0415  it costs a fifth of the start of every command

    folder = Path(models_dir) if models_dir else MODELS_DIR
    path = Path(name) if name.endswith((".yml", ".yaml")) else folder / f"{name}.yml"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(known_cards(folder)) or "none"
        raise BadInputError(
            f"There is no model card {name!r} ({path} does not exist). Known cards in {folder}: {known}. "
            "To add one, copy a card of a similar model and change its numbers."
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInputError(f"{path}: not readable as YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(data, dict):
        raise BadInputError(f"{path}: a card is a YAML mapping, and this file holds {type(data).__name__}.")
    data["name"] = path.stem
    Card.from_dict(data, str(path))
    return data


def load(name: str, models_dir: str | Path | None = None) -> Card:
    """Read a card by name or path into its typed view."""
    return Card.from_dict(read_card(name, models_dir), name)


def known_cards(models_dir: str | Path | None = None) -> list[str]:
    """Names of the cards in a folder, sorted."""
    return sorted(p.stem for p in (Path(models_dir) if models_dir else MODELS_DIR).glob("*.yml"))


class _Checker:
    """Field checks whose messages name the file, the key and the remedy."""

    def __init__(self, source: str) -> None:
        self.source = source

    def fail(self, key: str, what: str, remedy: str) -> None:
        raise BadInputError(f"{self.source}: `{key}` {what}; {remedy}.")

    def mapping(self, value: Any, where: str, keys: set[str]) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            self.fail(where, f"must be a mapping, found {type(value).__name__}", "see models/minimax_m2_5.yml")
        for key in value:
            if key not in keys:
                self.fail(
                    key if where == "card" else f"{where}.{key}",
                    "is not a known key",
                    f"known: {', '.join(sorted(keys))}",
                )
        return dict(value)

    def required(self, data: Mapping[str, Any], key: str, kind: type, where: str = "") -> Any:
        dotted = f"{where}.{key}" if where else key
        if key not in data:
            self.fail(dotted, "is missing", "add it; models/minimax_m2_5.yml shows how")
        value = data[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.fail(dotted, f"is {value!r}", f"it must be of type {kind.__name__.lower()}")
        return value

    def optional(self, data: Mapping[str, Any], key: str, kind: type, default: Any = None, where: str = "") -> Any:
        return default if data.get(key) is None else self.required(data, key, kind, where)

    def choice(self, data: Mapping[str, Any], key: str, choices: tuple[str, ...], where: str = "") -> str:
        value: str = self.required(data, key, str, where)
        if value not in choices:
            self.fail(f"{where}.{key}" if where else key, f"is {value!r}", f"this planner knows {', '.join(choices)}")
        return value

    def count(self, data: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
        value: int = (
            self.required(data, key, int, where) if default is None else self.optional(data, key, int, default, where)
        )
        if value < (1 if default is None else 0):
            self.fail(f"{where}.{key}", f"is {value}", "it must be a positive whole number")
        return value

    def number(self, data: Mapping[str, Any], key: str) -> float:
        value = data.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            self.fail(key, f"is {value!r}", "it must be a positive number")
        return float(data[key])


def _shape(check: _Checker, data: Mapping[str, Any], attention: str) -> Shape:
    shape = check.mapping(data, "shape", _SHAPE_KEYS)
    needed = ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"]
    needed += ["num_key_value_heads", "head_dim"] if attention == "gqa" else list(_MLA_KEYS)
    needed += _DSA_KEYS if attention == "dsa" else []
    optional = ["intermediate_size", "first_k_dense_replace", "num_experts", "num_experts_per_tok", "n_shared_experts",
                "moe_intermediate_size", "q_lora_rank", "num_indexer_layers", "sliding_window", "num_sliding_layers",
                "num_nextn_predict_layers"]  # fmt: skip
    numbers = {key: check.count(shape, key, "shape") for key in needed}
    extra = {key: check.count(shape, key, "shape", default=0) for key in optional}
    if attention != "gqa":
        # Compressed attention has one key-value row for all heads, of the compressed size.
        numbers |= {"num_key_value_heads": 1, "head_dim": numbers["kv_lora_rank"] + numbers["qk_rope_head_dim"]}
    if attention == "dsa" and not extra["num_indexer_layers"]:
        extra["num_indexer_layers"] = numbers["num_hidden_layers"]
    sliding, layers = extra["num_sliding_layers"], numbers["num_hidden_layers"]
    if sliding and (not extra["sliding_window"] or sliding >= layers or sliding % (layers - sliding)):
        check.fail(
            "shape.num_sliding_layers",
            f"is {sliding} of {layers} layers with a window of {extra['sliding_window']}",
            "give sliding_window too, and a multiple of the layers that attend in full, as the engine groups them",
        )
    if numbers["num_attention_heads"] % numbers["num_key_value_heads"]:
        check.fail(
            "shape.num_key_value_heads",
            f"is {numbers['num_key_value_heads']}, no divisor of {numbers['num_attention_heads']} attention heads",
            "copy both from the model's config.json",
        )
    if extra["num_experts"] and not (extra["num_experts_per_tok"] and extra["moe_intermediate_size"]):
        check.fail(
            "shape.num_experts", "needs num_experts_per_tok and moe_intermediate_size", "copy them from the config.json"
        )
    if extra["num_experts_per_tok"] > extra["num_experts"]:
        check.fail(
            "shape.num_experts_per_tok",
            f"is {extra['num_experts_per_tok']} of only {extra['num_experts']} experts",
            "copy both from the model's config.json",
        )
    if extra["first_k_dense_replace"] > numbers["num_hidden_layers"]:
        check.fail(
            "shape.first_k_dense_replace", "is more than num_hidden_layers", "copy both from the model's config.json"
        )
    if (not extra["num_experts"] or extra["first_k_dense_replace"]) and not extra["intermediate_size"]:
        check.fail("shape.intermediate_size", "is missing", "a dense layer needs it; copy it from the config.json")
    return Shape(**numbers, **extra, tie_word_embeddings=check.required(shape, "tie_word_embeddings", bool, "shape"))


def _speculative(check: _Checker, card: Mapping[str, Any]) -> Speculative | None:
    if card["speculative"] is None:
        return None
    keys = {"method", "num_speculative_tokens"}
    data = check.mapping(check.required(card, "speculative", Mapping), "speculative", keys)
    method = check.choice(data, "method", SPECULATIVE_METHODS, "speculative")
    if not card["shape"].get("num_nextn_predict_layers"):
        check.fail("speculative.method", f"is {method!r}", "it needs shape.num_nextn_predict_layers in the checkpoint")
    return Speculative(method, check.count(data, "num_speculative_tokens", "speculative"))


def _quantization(check: _Checker, data: Mapping[str, Any]) -> Quantization:
    data = check.mapping(data, "quantization", {"method", "block", "group", "unconverted"})
    method = check.choice(data, "method", QUANTIZATION_METHODS, "quantization")
    block: int | None = None
    if method == "fp8_block":
        sides = check.required(data, "block", list, "quantization")
        if len(sides) != 2 or sides[0] != sides[1] or not isinstance(sides[0], int) or sides[0] < 1:  # noqa: PLR2004
            check.fail("quantization.block", f"is {sides!r}", "give both sides of the square block, as in [128, 128]")
        block = sides[0]
    elif method not in ("none", "fp8_channel"):
        fixed = _FIXED_GROUPS.get(method)
        block = check.count(data, "group", "quantization")
        if fixed not in (None, block):
            check.fail("quantization.group", f"is {block}", f"{method} has one scale per {fixed} weights")
    return Quantization(method, block, tuple(check.optional(data, "unconverted", list, [], "quantization")))


def _engine(check: _Checker, data: Mapping[str, Any]) -> Engine:
    engine = check.mapping(data, "engine", _ENGINE_KEYS)
    remote_code = engine.get("trust_remote_code")
    if not isinstance(remote_code, bool | Mapping) or remote_code is True:
        check.fail(
            "engine.trust_remote_code",
            f"is {remote_code!r}",
            "write false, or a mapping of each code file to its sha256, so that only reviewed code runs",
        )
    reviewed = dict(remote_code or {})
    for name, sha256 in reviewed.items():
        if not (
            isinstance(name, str) and name.endswith(".py") and isinstance(sha256, str) and _SHA256.fullmatch(sha256)
        ):
            check.fail(
                "engine.trust_remote_code",
                f"holds {name!r}: {sha256!r}",
                "write the name of a .py file as in the repository, and what sha256sum says of it",
            )
    args = tuple(str(a) for a in check.required(engine, "args", list, "engine"))
    for arg in args:
        if (name := arg.split("=")[0]) in _PLANNED_ARGS:
            check.fail("engine.args", f"holds {name}", _PLANNED_ARGS[name])
    ceiling = engine.get("max_gpu_memory_utilization")
    if ceiling is not None and not (isinstance(ceiling, float) and 0 < ceiling < 1):
        check.fail("engine.max_gpu_memory_utilization", f"is {ceiling!r}", "it must lie between 0 and 1")
    return Engine(
        minimum_version=check.required(engine, "minimum_version", str, "engine"),
        tool_parser=check.optional(engine, "tool_parser", str, where="engine"),
        reasoning_parser=check.optional(engine, "reasoning_parser", str, where="engine"),
        chat_template=check.optional(engine, "chat_template", str, where="engine"),
        remote_code=reviewed,
        kv_cache_dtype=check.optional(engine, "kv_cache_dtype", str, "auto", "engine"),
        max_gpu_memory_utilization=ceiling,
        args=args,
        env={str(k): str(v) for k, v in check.required(engine, "env", Mapping, "engine").items()},
    )
