"""Filters over the planner in `src/vllm_fleet`: arguments in, plain data out, errors as one paragraph.

Each filter is documented in the YAML file of its name beside this one.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ansible.errors import AnsibleFilterError

try:
    from vllm_fleet import catalog, explain, topology
    from vllm_fleet.errors import PlanError
    from vllm_fleet.plan import make_plan
except ImportError as error:
    IMPORT_ERROR: ImportError | None = error
else:
    IMPORT_ERROR = None


def _paragraphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn the planner's errors, or its absence, into the filter error that Ansible prints."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if IMPORT_ERROR is not None:
            raise AnsibleFilterError(
                f"The Python that runs Ansible cannot import the package vllm_fleet ({IMPORT_ERROR}). Install this "
                "repository into it: `pip install -e .` here, with the Python that `ansible --version` names."
            )
        try:
            return function(*args, **kwargs)
        except PlanError as error:
            raise AnsibleFilterError(str(error)) from None

    return wrapper


@_paragraphs
def vllm_plan(
    gpu_topology: Mapping[str, Any],
    card: Mapping[str, Any] | str,
    options: Mapping[str, Any] | None = None,
    models_dir: str | None = None,
    on_error: Literal["raise", "report"] = "raise",
) -> dict[str, Any]:
    """Plan a model on a host."""
    try:
        known = catalog.read_card(card, models_dir) if isinstance(card, str) else card
        return make_plan(gpu_topology, known, options or {}).to_dict()
    except PlanError as error:
        if on_error == "report":
            return {"error": str(error)}
        raise


@_paragraphs
def vllm_card(name: str, models_dir: str | None = None) -> dict[str, Any]:
    """Read and check a model card."""
    return catalog.read_card(name, models_dir)


@_paragraphs
def vllm_topology(path: str) -> dict[str, Any]:
    """Read a saved topology."""
    return topology.read(path)


@_paragraphs
def vllm_explain(plan: Mapping[str, Any]) -> list[str]:
    """Lay a plan out for a terminal."""
    return explain.render(plan).splitlines()


class FilterModule:
    """Names of the filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "vllm_plan": vllm_plan,
            "vllm_card": vllm_card,
            "vllm_topology": vllm_topology,
            "vllm_explain": vllm_explain,
        }
