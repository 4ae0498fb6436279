"""What an inventory asks for: checked once, then frozen."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from vllm_fleet.errors import BadInputError

DEFAULT_VLLM_VERSION = "0.32.0"  # the newest that exists as a CUDA wheel and as the CPU build the lab runs
OLDEST_VLLM_VERSION = "0.24.0"  # from here CUDA_VISIBLE_DEVICES may name GPUs by UUID
ACCELERATORS = ("cuda", "cpu")
OBJECTIVES = ("throughput", "latency", "context")
PEER_TO_PEER = ("measured", "allow", "forbid")

_CHOICES = {"accelerator": ACCELERATORS, "objective": OBJECTIVES, "peer_to_peer": PEER_TO_PEER}
_TEXTS = ("vllm_version", "bind_address", "served_model_name")
_RANGES = {
    "expected_concurrency": (1, 100_000),
    "min_context": (1, 100_000_000),
    "max_num_seqs": (1, 8192),
    "max_replicas": (1, 1024),
    "keep_free_gpus": (0, 1024),
    "first_port": (1024, 65_000),
}


@dataclass(frozen=True)
class Options:
    """The planner's options. `None` means that the planner decides."""

    vllm_version: str = DEFAULT_VLLM_VERSION
    accelerator: str = "cuda"
    objective: str = "throughput"
    expected_concurrency: int = 64  # requests in flight on the host
    min_context: int | None = None
    max_num_seqs: int | None = None
    max_replicas: int | None = None
    keep_free_gpus: int = 0
    exclude_gpus: tuple[str, ...] = ()  # UUIDs, PCI bus ids or indices
    bind_address: str = "127.0.0.1"
    first_port: int = 8001
    served_model_name: str | None = None
    peer_to_peer: str = "measured"  # between GPUs: as a real transfer on the host went, or the owner's own word

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Check and read options; null means the default.

        Raises:
            BadInputError: An option is unknown or nonsense; the message names it and what it may be.
        """
        known = {f.name for f in fields(cls)}
        for key in data:
            if key not in known:
                raise BadInputError(f"Unknown plan option {key!r}. Known: {', '.join(sorted(known))}.")
        given = {key: value for key, value in data.items() if value is not None}
        for key, choices in _CHOICES.items():
            if key in given and given[key] not in choices:
                raise BadInputError(f"Plan option {key} is {given[key]!r}; it may be {', '.join(choices)}.")
        given |= {key: _whole_number(key, given[key]) for key in _RANGES if key in given}
        excluded = given.get("exclude_gpus", ())
        if isinstance(excluded, str | int):
            raise BadInputError("Plan option exclude_gpus must be a list of GPU UUIDs, PCI bus ids or indices.")
        given["exclude_gpus"] = tuple(str(gpu) for gpu in excluded)
        for key in _TEXTS:
            if key in given and not (isinstance(given[key], str) and given[key].strip()):
                raise BadInputError(f"Plan option {key} is {given[key]!r}; it must be a non-empty string.")
        name = given.get("served_model_name", "served")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:-]*", name):
            raise BadInputError(
                f"Plan option served_model_name is {name!r}; it may hold letters, digits and . _ / : - only, since "
                "units and gateways carry it."
            )
        _check_bind_address(given.get("bind_address", "127.0.0.1"))
        parse_version(given.get("vllm_version", DEFAULT_VLLM_VERSION))
        return cls(**given)


def _check_bind_address(text: str) -> None:
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        address = None
    if address is None or address.is_unspecified or address.is_multicast:
        raise BadInputError(
            f"Plan option bind_address is {text!r}; it must be one IPv4 address of the host: 127.0.0.1, or its address "
            "on the fleet network. Engines guard only part of their routes, so they never listen on all addresses."
        )


def parse_version(text: str) -> tuple[int, ...]:
    """Release numbers of a version: "0.32.0rc1" and "0.32.0+cpu" give (0, 32, 0)."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        raise BadInputError(f"{text!r} is not a vLLM version; write it like {DEFAULT_VLLM_VERSION}.")
    return tuple(int(part or 0) for part in match.groups())


def _whole_number(key: str, value: Any) -> int:
    low, high = _RANGES[key]
    # Ansible hands numbers from the command line over as text.
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadInputError(f"Plan option {key} is {value!r}; it must be a whole number from {low} to {high}.")
    return value
