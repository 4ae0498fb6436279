"""Ansible module: drain replicas in a gateway, put them back, and tell how they are."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gateway_servers
short_description: Drain replicas in a gateway, put them back, and tell how they are
version_added: "0.1.0"
description:
  - Speaks to the gateway's HAProxy over its admin socket. A drained replica finishes what it works on and gets nothing
    new; this outlives a reload of the gateway, not a restart.
  - A replica that this gateway does not have is passed over, and so is a gateway that does not run.
options:
  servers:
    description: Replicas as the gateway names them, HOST.REPLICA.
    type: list
    elements: str
    default: []
  state:
    description: V(drained) takes them out, V(ready) puts them back. Left out, nothing is changed.
    type: str
    choices: [drained, ready]
  keep:
    description:
      - With O(state=drained), how many others must take requests for each model that one of O(servers) takes requests
        for. Where fewer do, none is drained and RV(refused) says why.
    type: int
    default: 0
  wait_seconds:
    description: With O(state=ready), how long to wait until they take requests.
    type: float
    default: 0
  socket:
    description: HAProxy's admin socket.
    type: path
    default: /run/vllm-gateway/admin.sock
  backends:
    description: The file that says what the gateway balances over.
    type: path
    default: /etc/vllm-fleet/gateway/backends.json
attributes:
  check_mode:
    support: full
    description: Says what would change.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Drain a replica in every gateway
  gateway_servers:
    servers: [gpu-01.minimax-m2-5-0]
    state: drained
    keep: 1
  become: true
  delegate_to: "{{ item }}"
  loop: "{{ groups.gateway }}"
"""

RETURN = r"""
servers:
  description: All servers of this gateway by name, as they are afterwards.
  returned: always
  type: dict
  sample:
    gpu-01.minimax-m2-5-0: {backend: model-minimax-m2.5, model: minimax-m2.5, drained: true, up: true, status: DRAIN,
      running: 2, queued: 0}
requests:
  description: What this gateway's present process has running at O(servers), the oldest first.
  returned: always
  type: list
  elements: dict
  sample: [{server: gpu-01.minimax-m2-5-0, client: "10.0.0.5:40212", age_seconds: 731}]
refused:
  description: Why nothing was drained; empty otherwise.
  returned: always
  type: str
late:
  description: Those that did not take requests within O(wait_seconds).
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gateway_admin import AdminError, Gateway, refusal


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "servers": {"type": "list", "elements": "str", "default": []},
            "state": {"type": "str", "choices": ["drained", "ready"]},
            "keep": {"type": "int", "default": 0},
            "wait_seconds": {"type": "float", "default": 0},
            "socket": {"type": "path", "default": "/run/vllm-gateway/admin.sock"},
            "backends": {"type": "path", "default": "/etc/vllm-fleet/gateway/backends.json"},
        },
        supports_check_mode=True,
    )
    given = module.params
    gateway = Gateway(given["socket"], given["backends"])
    servers = gateway.servers()
    named = [name for name in given["servers"] if name in servers]
    drained = given["state"] == "drained"
    due = [name for name in named if given["state"] and servers[name]["drained"] != drained]
    refused = refusal(servers, named, given["keep"]) if drained else ""
    late = []
    try:
        if due and not refused and not module.check_mode:
            gateway.set_drained(servers, due, drained=drained)
        if given["state"] == "ready" and given["wait_seconds"] and not module.check_mode:
            late = gateway.wait_up(named, given["wait_seconds"])
        module.exit_json(
            changed=bool(due) and not refused,
            servers=gateway.servers() if due else servers,
            requests=gateway.requests(named) if named else [],
            refused=refused,
            late=late,
        )
    except (AdminError, OSError) as error:
        module.fail_json(msg="HAProxy at {0}: {1}".format(given["socket"], error))


if __name__ == "__main__":
    main()
