"""Every role says what it takes: argument_specs and defaults are the same list with the same values."""

from pathlib import Path

import pytest
import yaml

ROLES = sorted((Path(__file__).parents[2] / "roles").iterdir())


def _load(path: Path) -> dict:
    return yaml.safe_load(path.read_text()) or {}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_argument_specs_equal_defaults(role: Path) -> None:
    defaults = _load(role / "defaults" / "main.yml")
    options = _load(role / "meta" / "argument_specs.yml")["argument_specs"]["main"]["options"]
    assert options.keys() == defaults.keys()
    for name, option in options.items():
        if option.get("no_log"):
            assert "default" not in option, f"{name}: a failing check would print what its default resolves to"
        else:
            assert option.get("default") == defaults[name], name


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_public_variables_carry_the_role_name_and_are_described(role: Path) -> None:
    options = _load(role / "meta" / "argument_specs.yml")["argument_specs"]["main"]["options"]
    assert [name for name in options if not name.startswith(f"{role.name}_")] == []
    assert [name for name, option in options.items() if not option.get("description")] == []
