"""What a client of an OpenAI-compatible server sees: a shim over module_utils/openai_client.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: openai_probe
short_description: Ask an OpenAI-compatible server what a client would ask
version_added: "0.1.0"
author:
  - vllm-fleet contributors
description:
  - Sends the requests that a client would send and fails unless all of them end well within their deadline.
  - A listening port or C(/health) is never taken as proof. An engine with a wrong configuration reports itself healthy
    and dies at the first token.
  - Needs Python 3.9 or later on the host that runs it, and nothing else. HTTP proxy variables are ignored on purpose,
    since the server is named directly.
options:
  url:
    description:
      - Root of the server, V(http://HOST:PORT) or V(https://HOST:PORT), without C(/v1).
    type: str
    required: true
  model:
    description:
      - The served model name, as in the server's model list.
    type: str
    required: true
  api_key:
    description:
      - The key that clients use.
      - It appears in no result and no message, not even where the server echoes it.
    type: str
    required: true
  ca_file:
    description:
      - PEM file, on the host that runs the module, of the authority that signed the server's certificate.
      - Without it the system's authorities are used. Only for https.
    type: path
  server_name:
    description:
      - The name that the server's certificate must be valid for, where O(url) holds an address that clients do not use.
      - Without it the name in O(url). Only for https.
    type: str
  unit:
    description:
      - systemd unit behind the address, to be named in failure messages as the place to look.
    type: str
  checks:
    description:
      - The checks to run, in this order.
      - V(models) wants O(model) in the model list.
      - V(completion) wants a token for a prompt, V(chat) for a chat message.
      - V(chat_stream) wants a streamed chat answer with text or a token count, a finish reason and its final C([DONE]).
      - With O(contract), V(chat) and V(chat_stream) also want reasoning in C(reasoning) if the card promises any, the
        answer in C(content), and no tag of either in it.
      - V(tool_call) and V(tool_call_stream) want a tool called where the question demands it, V(tool_named) and
        V(tool_required) where the request forces it; arguments must be JSON that fits the tool's schema.
      - V(json_schema) wants an answer that fits the JSON schema that came with the question.
      - V(key_required) wants every route to refuse a request with no key and one with a wrong key.
      - V(unknown_routes) wants a path that nobody knows refused, with the right key too; of a gateway also those of its
        engines that it does not expose.
      - A check of something that O(contract) does not promise, or says cannot be had of these weights, is reported as
        not checkable. It neither passes nor fails.
    type: list
    elements: str
    choices: &checks
      - models
      - completion
      - chat
      - chat_stream
      - tool_call
      - tool_call_stream
      - tool_named
      - tool_required
      - json_schema
      - key_required
      - unknown_routes
    default: *checks
  contract:
    description:
      - What the model's card promises, C(model.contract) of a plan.
      - Without it tools and JSON by a schema are not checkable, and nothing is said of reasoning.
    type: dict
    suboptions:
      reasoning:
        description:
          - Its reasoning comes apart from its answer.
        type: bool
        required: true
      tools:
        description:
          - V(true) if it calls tools, V(forced) if only where a request forces it to.
        type: raw
        required: true
      json_schema:
        description:
          - Its answers fit the JSON schema of a request.
        type: bool
        required: true
  gateway_paths:
    description:
      - Of a gateway, the paths that it serves. Each must refuse strangers, and no other may be served.
    type: list
    elements: str
  deadline_seconds:
    description:
      - Total seconds for one try of one check, from looking the name up to the last byte of the answer.
    type: float
    default: 30.0
  retries:
    description:
      - How many more tries all checks together get while the server is not ready (unreachable, 429, 502, 503, 504 or
        late). Any other failure is final at once.
    type: int
    default: 0
  wait_seconds:
    description:
      - Pause before each retry.
    type: float
    default: 5.0
attributes:
  check_mode:
    description: Nothing is changed, so check mode does the same as a normal run. It does send the requests.
    support: full
  diff_mode:
    description: Nothing is changed, so there is no difference to show.
    support: none
"""

EXAMPLES = r"""
- name: See what a client of the first replica sees
  openai_probe:
    url: http://127.0.0.1:8001
    model: minimax-m2.5
    api_key: "{{ vllm_service_api_key }}"
    unit: vllm-minimax-m2-5-0.service
    contract: {reasoning: true, tools: true, json_schema: true}

- name: Wait up to a minute for the gateway, and look at streaming only
  openai_probe:
    url: https://models.example.com
    model: minimax-m2.5
    api_key: "{{ client_key }}"
    ca_file: /etc/ssl/certs/example-ca.pem
    checks: [chat_stream]
    deadline_seconds: 20
    retries: 12
    wait_seconds: 5
"""

RETURN = r"""
ok:
  description: Whether no check failed. What could not be checked is in RV(not_checked).
  returned: when the requests could be sent
  type: bool
  sample: true
seconds:
  description: From the first request to the last verdict, retries and pauses included.
  returned: when the requests could be sent
  type: float
  sample: 1.934
not_checked:
  description: Names of the checks that could not be made; their C(detail) says why.
  returned: when the requests could be sent
  type: list
  elements: str
  sample: [tool_call, tool_call_stream]
checks:
  description: What each check saw, in the order they ran. The last try counts.
  returned: when the requests could be sent
  type: list
  elements: dict
  contains:
    check:
      description: Name of the check.
      type: str
      sample: chat_stream
    ok:
      description: Whether the server did what a client needs. Null where that cannot be checked.
      type: bool
      sample: true
    kind:
      description:
        - V(ok), V(not_checkable), or the kind of failure.
        - V(reasoning), V(tools) and V(json_schema) are the part of the contract that is broken.
      type: str
      sample: ok
    seconds:
      description: From the start of the check to its verdict.
      type: float
      sample: 0.412
    first_token_seconds:
      description: From the start of the check to the first streamed text. Null where the check streams nothing, or
        where every token decoded to no text.
      type: float
      sample: 0.087
    detail:
      description: What was seen and, on failure, what to do next.
      type: str
      sample: http://127.0.0.1:8001 streamed 16 tokens, the first text after 0.087 s.
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.openai_client import (
    CHECKS,
    MAX_SECONDS,
    Contract,
    Endpoint,
    InputError,
    failure_summary,
    run_checks,
)


def main() -> None:
    """Run the checks and report."""
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "model": {"type": "str", "required": True},
            "api_key": {"type": "str", "required": True, "no_log": True},
            "ca_file": {"type": "path"},
            "server_name": {"type": "str"},
            "unit": {"type": "str"},
            "checks": {"type": "list", "elements": "str", "choices": list(CHECKS), "default": list(CHECKS)},
            "contract": {
                "type": "dict",
                "options": {
                    "reasoning": {"type": "bool", "required": True},
                    "tools": {"type": "raw", "required": True},
                    "json_schema": {"type": "bool", "required": True},
                },
            },
            "gateway_paths": {"type": "list", "elements": "str"},
            "deadline_seconds": {"type": "float", "default": 30.0},
            "retries": {"type": "int", "default": 0},
            "wait_seconds": {"type": "float", "default": 5.0},
        },
        supports_check_mode=True,
    )
    given = module.params
    for name, usable, rule in (
        ("checks", bool(given["checks"]), "name at least one, or leave it out for all"),
        (
            "deadline_seconds",
            0 < given["deadline_seconds"] <= MAX_SECONDS,
            f"give more than 0 and at most {MAX_SECONDS}",
        ),
        ("retries", given["retries"] >= 0, "give 0 or more"),
        ("wait_seconds", 0 <= given["wait_seconds"] <= MAX_SECONDS, f"give 0 to {MAX_SECONDS}"),
    ):
        if not usable:
            module.fail_json(msg=f"{name}: {given[name]} cannot be used; {rule}.")
    try:
        endpoint = Endpoint(
            url=given["url"],
            model=given["model"],
            api_key=given["api_key"],
            ca_file=given["ca_file"],
            unit=given["unit"],
            server_name=given["server_name"],
            contract=Contract.from_dict(given["contract"]) if given["contract"] else None,
            gateway_paths=given["gateway_paths"],
        )
    except InputError as error:
        module.fail_json(msg=str(error))
    start = time.monotonic()
    results = run_checks(
        endpoint,
        given["checks"],
        given["deadline_seconds"],
        retries=given["retries"],
        wait_seconds=given["wait_seconds"],
    )
    answer = {
        "ok": all(result.ok is not False for result in results),
        "seconds": round(time.monotonic() - start, 3),
        "not_checked": [result.check for result in results if result.ok is None],
        "checks": [result.as_dict() for result in results],
    }
    if not answer["ok"]:
        module.fail_json(msg=failure_summary(endpoint, results), **answer)
    module.exit_json(changed=False, **answer)


if __name__ == "__main__":
    main()
