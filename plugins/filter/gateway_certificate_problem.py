"""Ansible filter: why clients would refuse a certificate, before it is installed."""

from __future__ import annotations

DOCUMENTATION = r"""
name: gateway_certificate_problem
short_description: Say why clients would refuse a certificate
version_added: "0.1.0"
description:
  - Judges a certificate with its chain and its private key on the controller.
  - That both are PEM text, belong together and stand in order, that none has expired, and that the names which clients
    use are in it.
positional: key, names
options:
  _input:
    description: The certificate and its chain as PEM text.
    type: str
    required: true
  key:
    description: The private key as PEM text, not encrypted. No part of it appears in the result.
    type: str
    required: true
  names:
    description: Host names and addresses that clients use.
    type: list
    elements: str
    required: true
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Refuse a certificate that clients would refuse
  ansible.builtin.assert:
    that: problem == ''
    fail_msg: "{{ problem }}"
  vars:
    problem: >-
      {{ model_gateway_tls_certificate
         | gateway_certificate_problem(model_gateway_tls_key, ['models.example.com']) }}
"""

RETURN = r"""
_value:
  description: One or two sentences with what to do; empty when clients would accept it.
  type: str
  sample: The certificate of CN=models.example.com expired on 2026-11-30 12:00 UTC. Renew it.
"""

from typing import Any

from ansible.errors import AnsibleFilterError

try:
    from vllm_fleet.gateway import certificate_problem
except ImportError as error:
    raise AnsibleFilterError(
        "The package vllm_fleet is not installed for the Python that runs Ansible. Run `make setup` in the "
        "repository and use .venv/bin/ansible-playbook, or `pip install -e .` into Ansible's environment."
    ) from error


def gateway_certificate_problem(certificate: str, key: str, names: list) -> str:
    """See DOCUMENTATION."""
    return certificate_problem(certificate, key, names) or ""


class FilterModule:
    """Offer the filter to Ansible."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {"gateway_certificate_problem": gateway_certificate_problem}
