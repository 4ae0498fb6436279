"""Ansible filter: all problems of all hosts as one table."""

from __future__ import annotations

DOCUMENTATION = r"""
name: fleet_findings
short_description: Bring all problems of all hosts into one table
version_added: "0.1.0"
description:
  - Takes the result of M(gpu_topology) of each host and gives a table of their problems, errors first, and their
    numbers. A host that did not answer, or where the module did not run, is an error of its own.
options:
  _input:
    description: The registered result by host name.
    type: dict
    required: true
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Show the table
  ansible.builtin.debug:
    msg: "{{ ({inventory_hostname: __probe} | fleet_findings).lines | join('\n') }}"
"""

RETURN = r"""
_value:
  description: The table and what it counts.
  type: dict
  contains:
    lines:
      description: The table, a line each.
      type: list
      elements: str
    errors:
      description: How many problems are errors.
      type: int
    warnings:
      description: How many are warnings.
      type: int
    findings:
      description: The rows as data, with C(host), C(severity), C(code), C(message) and C(remedy).
      type: list
      elements: dict
"""

from typing import TYPE_CHECKING, Any

from ansible.errors import AnsibleFilterError

if TYPE_CHECKING:
    from collections.abc import Mapping

try:
    from vllm_fleet import doctor
except ImportError as error:
    IMPORT_ERROR: ImportError | None = error
else:
    IMPORT_ERROR = None


def fleet_findings(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Bring all problems of all hosts into one table."""
    if IMPORT_ERROR is not None:
        raise AnsibleFilterError(
            f"The Python that runs Ansible cannot import the package vllm_fleet ({IMPORT_ERROR}). Install this "
            "repository into it: `pip install -e .` here, with the Python that `ansible --version` names."
        )
    return doctor.report(results)


class FilterModule:
    """Where Ansible looks for filters."""

    def filters(self) -> dict[str, Any]:
        """Filters by name."""
        return {"fleet_findings": fleet_findings}
