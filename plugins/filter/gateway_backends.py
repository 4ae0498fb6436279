"""Ansible filter: what a gateway balances over."""

from __future__ import annotations

DOCUMENTATION = r"""
name: gateway_backends
short_description: Merge this run's plans into what a gateway balances over
version_added: "0.1.0"
description:
  - Takes the plans of this run by host and gives each serving host's replicas.
  - A host that this run did not reach keeps its former entry; one that left the inventory is dropped.
positional: previous, serves, gateway_host
options:
  _input:
    description: Plan by host name.
    type: dict
    required: true
  previous:
    description: What this filter returned at the gateway's last deploy, or an empty dictionary.
    type: dict
    required: true
  serves:
    description: Names of the hosts whose replicas the gateway balances over.
    type: list
    elements: str
    required: true
  gateway_host:
    description: The gateway's own name.
    type: str
    required: true
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Show what this gateway balances over
  ansible.builtin.debug:
    msg: "{{ {'gpu-a': vllm_plan_result} | gateway_backends({}, ['gpu-a'], 'gpu-a') }}"
"""

RETURN = r"""
_value:
  description: Served model name and servers by host.
  type: dict
  sample:
    gpu-a:
      model: minimax-m2.5
      servers:
        - name: gpu-a.minimax-m2-5-0
          id: 1219183034
          replica: minimax-m2-5-0
          address: 127.0.0.1
          port: 8001
          places: 128
"""

from typing import Any

from ansible.errors import AnsibleFilterError

try:
    from vllm_fleet.gateway import GatewayError, backends
except ImportError as error:
    raise AnsibleFilterError(
        "The package vllm_fleet is not installed for the Python that runs Ansible. Run `make setup` in the "
        "repository and use .venv/bin/ansible-playbook, or `pip install -e .` into Ansible's environment."
    ) from error


def gateway_backends(plans: dict, previous: dict, serves: list, gateway_host: str) -> dict[str, Any]:
    """See DOCUMENTATION."""
    try:
        return backends(plans, previous, serves, gateway_host)
    except GatewayError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """Offer the filter to Ansible."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {"gateway_backends": gateway_backends}
