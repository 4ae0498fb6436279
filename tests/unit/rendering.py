"""The service role's templates, rendered by Ansible's own engine for a plan."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import init_plugin_loader
from ansible.template import Templar, trust_as_template

from vllm_fleet import catalog, topology
from vllm_fleet.plan import make_plan

ROOT = Path(__file__).parents[2]
ROLE = ROOT / "roles" / "vllm_service"


@cache
def reference_plan() -> dict[str, Any]:
    """MiniMax-M2.5 on the reference host: eight RTX PRO 6000 on two NUMA nodes."""
    host = topology.read(str(ROOT / "tests" / "fixtures" / "captures" / "rtxpro6000-8x-2nodes"))
    return make_plan(host, catalog.read_card("minimax_m2_5"), {}).to_dict()


@cache
def _start_ansible() -> None:
    init_plugin_loader()


def render(template: str, **variables: Any) -> str:
    """A template of the role with its own defaults and vars, as a deploy of the reference host would have them."""
    _start_ansible()
    loader = DataLoader()
    given: dict[str, Any] = {}
    for part in ("defaults", "vars"):
        given |= loader.load_from_file(str(ROLE / part / "main.yml"), trusted_as_template=True)
    plan = variables.get("vllm_service_plan", reference_plan())
    given |= {
        "role_path": str(ROLE),
        "vllm_service_plan": plan,
        "replica": plan["replicas"][0],
        "vllm_service_runtime": "/opt/vllm-fleet/runtimes/vllm-0.32.0-cuda-cp312-x86_64-9f1c2d3e4f5a",
        "vllm_service_weights": "/var/lib/vllm-fleet/weights/minimax_m2_5",
        "vllm_service_weights_manifest": "/var/lib/vllm-fleet/weights/minimax_m2_5/.vllm-fleet.json",
        "vllm_service_cuda_home": "/opt/vllm-fleet/runtimes/vllm-0.32.0-cuda-cp312-x86_64-9f1c2d3e4f5a/cuda",
        "vllm_service_engine_key": "canary-of-the-engines-key",
    } | variables
    text = (ROLE / "templates" / template).read_text(encoding="utf-8")
    return str(Templar(loader, variables=given).template(trust_as_template(text)))


def settings(unit: str) -> dict[str, list[str]]:
    """A unit's settings by name, each with all its values; a comment is none."""
    found: dict[str, list[str]] = {}
    for line in unit.splitlines():
        if "=" in line and not line.startswith("#"):
            name, value = line.split("=", 1)
            found.setdefault(name, []).append(value)
    return found
