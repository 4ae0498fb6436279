"""Ansible filter: what to do about a host's NVIDIA driver."""

from __future__ import annotations

DOCUMENTATION = r"""
name: driver_plan
short_description: Decide what to do about a host's NVIDIA driver
version_added: "0.1.0"
description:
  - Takes what the module M(driver_facts) read and decides, by the support matrix of GPU generations, CUDA majors,
    kernels and branches, what is to change on the host and what speaks against it.
  - A pure function. Called again with what the source has (C(candidates)) and what apt would do (C(transaction)), it
    gives exact versions and the whole table.
positional: options
options:
  _input:
    description: The facts of M(driver_facts), with C(candidates) and C(transaction) of M(driver_packages) where known.
    type: dict
    required: true
  options:
    description: Wishes by name, such as C(source), C(branch), C(version), C(modules) and C(cuda_major).
    type: dict
    required: true
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Show what would change
  ansible.builtin.debug:
    msg: "{{ (driver_host.facts | driver_plan({'branch': 580})).lines }}"
"""

RETURN = r"""
_value:
  description: The plan; see C(vllm_fleet.drivers.driver_plan).
  type: dict
  sample:
    state: change
    target: {branch: 580, version: null, modules: open}
    refusals: []
"""

from typing import Any

from ansible.errors import AnsibleFilterError

try:
    from vllm_fleet import drivers
    from vllm_fleet.errors import PlanError
except ImportError as error:
    raise AnsibleFilterError(
        "The package vllm_fleet is not installed for the Python that runs Ansible. Run `make setup` in the "
        "repository and use .venv/bin/ansible-playbook, or `pip install -e .` into Ansible's environment."
    ) from error


def driver_plan(facts: dict, options: dict) -> dict[str, Any]:
    """See DOCUMENTATION."""
    try:
        return drivers.driver_plan(facts, options)
    except PlanError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """Offer the filter to Ansible."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {"driver_plan": driver_plan}
