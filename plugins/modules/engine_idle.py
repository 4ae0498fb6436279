"""Ansible module: wait until an engine works on no request."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_idle
short_description: Wait until an engine works on no request
version_added: "0.1.0"
description:
  - Reads the engine's own counters, as the health agent does, until they say twice in a row that no request runs or
    waits. Drain the replica in its gateways first. An engine that does not accept connections has none.
  - Changes nothing, and does not fail at its deadline.
options:
  address:
    description: Address that the engine listens on.
    type: str
    required: true
  port:
    description: Its port.
    type: int
    required: true
  deadline_seconds:
    description: How long to wait.
    type: float
    required: true
attributes:
  check_mode:
    support: full
    description: The module only reads.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Wait until the drained replica has finished
  engine_idle:
    address: 10.0.0.11
    port: 8001
    deadline_seconds: 600
"""

RETURN = r"""
idle:
  description: Whether it works on nothing.
  returned: always
  type: bool
running:
  description: Requests that it works on; null where it does not say.
  returned: always
  type: int
waiting:
  description: Requests that wait in it.
  returned: always
  type: int
seconds:
  description: How long it was waited for.
  returned: always
  type: float
"""

import socket
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.health_agent import Load, ask_load

PAUSE_SECONDS = 1.0  # what a gateway had sent just before it was drained has reached the counters by then
CONNECT_SECONDS = 5.0


def listens(address: str, port: int) -> bool:
    """Whether anybody accepts connections there; one that is too busy to is somebody."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "address": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
            "deadline_seconds": {"type": "float", "required": True},
        },
        supports_check_mode=True,
    )
    address, port = module.params["address"], module.params["port"]
    begun = time.monotonic()
    quiet, load = 0, Load()
    while True:
        if not listens(address, port):
            load, idle = Load(0, 0), True
            break
        load = ask_load(address, port) or Load()
        quiet = quiet + 1 if load.running == 0 and load.waiting == 0 else 0
        idle = quiet > 1
        if idle or time.monotonic() - begun >= module.params["deadline_seconds"]:
            break
        time.sleep(PAUSE_SECONDS)
    seconds = round(time.monotonic() - begun, 1)
    module.exit_json(changed=False, idle=idle, running=load.running, waiting=load.waiting, seconds=seconds)


if __name__ == "__main__":
    main()
