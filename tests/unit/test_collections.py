"""Galaxy and `make setup` bring the same collections."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WANTED = {
    entry["name"]: entry["version"]
    for entry in yaml.safe_load((ROOT / "requirements.yml").read_text(encoding="utf-8"))["collections"]
}
INSTALLED = ROOT / "collections/ansible_collections"


@pytest.mark.skipif(not INSTALLED.is_dir(), reason="`make setup` has not run: no collections here")
def test_setup_installed_what_requirements_yml_lists() -> None:
    manifests = (json.loads(path.read_text(encoding="utf-8")) for path in INSTALLED.glob("*/*/MANIFEST.json"))
    collections = (manifest["collection_info"] for manifest in manifests)
    assert {f"{info['namespace']}.{info['name']}": info["version"] for info in collections} == WANTED
