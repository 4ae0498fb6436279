"""Ansible module: how fast a server of OpenAI's API answers."""

from __future__ import annotations

DOCUMENTATION = r"""
module: speed_probe
short_description: Measure how fast a server of OpenAI's API answers
version_added: "0.1.0"
description:
  - Runs a few streams of a fixed length at once, a short round to warm up and then two, and reports the faster. Small
    enough to run before and after a replica is switched; drain it first, or its clients are measured too.
options:
  url:
    description: Root of the server, V(http://HOST:PORT), without C(/v1).
    type: str
    required: true
  model:
    description: The served model name.
    type: str
    required: true
  api_key:
    description: The key that clients use.
    type: str
    required: true
  streams:
    description: How many requests run at once.
    type: int
    default: 4
  tokens:
    description: How many tokens each asks for.
    type: int
    default: 32
  deadline_seconds:
    description: Longest silence on a connection.
    type: float
    default: 120
  required:
    description: Whether to fail when it cannot be measured; otherwise RV(speed) is null, and RV(why) says why.
    type: bool
    default: true
attributes:
  check_mode:
    support: full
    description: Nothing is changed, so check mode does the same as a normal run. It does send the requests.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Measure the replica
  speed_probe:
    url: http://127.0.0.1:8001
    model: minimax-m2.5
    api_key: "{{ vllm_fleet_engine_key }}"
  register: __speed
"""

RETURN = r"""
speed:
  description: What was measured; null when it could not be.
  returned: always
  type: dict
  sample: {model: minimax-m2.5, streams: 4, tokens: 32, tokens_per_second: 187.2, first_token_seconds: 0.061,
    token_seconds: 0.0201}
why:
  description: Why it could not be measured; empty otherwise.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.openai_client import Endpoint, InputError
from ansible.module_utils.speed_probe import SpeedError, measure


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "model": {"type": "str", "required": True},
            "api_key": {"type": "str", "required": True, "no_log": True},
            "streams": {"type": "int", "default": 4},
            "tokens": {"type": "int", "default": 32},
            "deadline_seconds": {"type": "float", "default": 120},
            "required": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    given = module.params
    for name in ("streams", "tokens", "deadline_seconds"):
        if given[name] <= 0:
            module.fail_json(msg="{0}: {1} cannot be used; give more than 0.".format(name, given[name]))
    try:
        speed = measure(
            Endpoint(given["url"], given["model"], given["api_key"]),
            streams=given["streams"],
            tokens=given["tokens"],
            deadline_seconds=given["deadline_seconds"],
        )
    except (SpeedError, InputError) as error:
        if given["required"]:
            module.fail_json(msg="Its speed could not be measured: {0}".format(error))
        module.exit_json(changed=False, speed=None, why=str(error))
    module.exit_json(changed=False, speed=speed.as_dict(), why="")


if __name__ == "__main__":
    main()
