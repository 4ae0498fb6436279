"""Every plugin explains itself: `ansible-doc` shows what it takes, an example and what it returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(path.stem for path in (ROOT / "plugins" / "modules").glob("*.py"))
FILTERS = [
    "driver_plan",
    "gateway_backends",
    *sorted(path.stem for path in (ROOT / "plugins" / "filter").glob("*.yml")),
]


def documentation(kind: str, names: list[str]) -> dict[str, Any]:
    shown = subprocess.run(
        [Path(sys.executable).parent / "ansible-doc", "--json", "--type", kind, *names],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
    )
    return dict(json.loads(shown.stdout))


@pytest.mark.parametrize(("kind", "names"), [("module", MODULES), ("filter", FILTERS)])
def test_ansible_doc_knows_every_plugin(kind: str, names: list[str]) -> None:
    pages = documentation(kind, names)
    assert sorted(pages) == sorted(names)
    for name, page in pages.items():
        assert page["doc"]["short_description"], name
        assert all(option.get("description") for option in page["doc"]["options"].values()), name
        assert page["examples"].strip(), name
        assert page["return"], name
