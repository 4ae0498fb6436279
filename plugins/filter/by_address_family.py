"""Ansible filter: sort addresses into IPv4 and IPv6."""

from __future__ import annotations

DOCUMENTATION = r"""
name: by_address_family
short_description: Sort addresses and networks into IPv4 and IPv6
version_added: "0.1.0"
description:
  - Takes addresses and networks of both families and returns those of each, sorted, each once.
  - Fails where one is a name.
options:
  _input:
    description: Addresses and networks.
    type: list
    elements: str
    required: true
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Show the IPv4 addresses among the gateways'
  ansible.builtin.debug:
    msg: "{{ (['10.0.0.1', 'fd00::1'] | by_address_family).ipv4 }}"
"""

RETURN = r"""
_value:
  description: Addresses and networks by family.
  type: dict
  sample: {ipv4: [10.0.0.1], ipv6: ['fd00::1']}
"""

from typing import Any

from ansible.errors import AnsibleFilterError

try:
    from vllm_fleet.gateway import GatewayError
    from vllm_fleet.gateway import by_address_family as sorted_addresses
except ImportError as error:
    raise AnsibleFilterError(
        "The package vllm_fleet is not installed for the Python that runs Ansible. Run `make setup` in the "
        "repository and use .venv/bin/ansible-playbook, or `pip install -e .` into Ansible's environment."
    ) from error


def by_address_family(addresses: list) -> dict[str, list[str]]:
    """See DOCUMENTATION."""
    try:
        return sorted_addresses(addresses)
    except GatewayError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """Offer the filter to Ansible."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {"by_address_family": by_address_family}
