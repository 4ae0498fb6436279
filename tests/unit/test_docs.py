"""Generated pages are up to date, and what the documentation points to exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_variables_page_is_what_the_roles_say() -> None:
    command = [sys.executable, ROOT / "scripts" / "variables_table"]
    written = subprocess.run(command, check=True, capture_output=True).stdout
    assert (ROOT / "docs" / "variables.md").read_bytes() == written, "run scripts/variables_table > docs/variables.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_make_target_that_a_page_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = {target for page in PAGES for target in re.findall(r"`make ([a-z-]+)", page.read_text())}
    assert [target for target in sorted(named) if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
