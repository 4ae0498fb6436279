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
      - V(key_required) wants every route above to refuse a request with no key and one with a wrong key.
    type: list
    elements: str
    choices: [models, completion, chat, chat_stream, key_required]
    default: [models, completion, chat, chat_stream, key_required]
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
  description: Whether every check passed.
  returned: when the requests could be sent
  type: bool
  sample: true
seconds:
  description: From the first request to the last verdict, retries and pauses included.
  returned: when the requests could be sent
  type: float
  sample: 1.934
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
      description: Whether the server did what a client needs.
      type: bool
      sample: true
    kind:
      description: V(ok), or the kind of failure.
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
from ansible.module_utils.openai_client import CHECKS, MAX_SECONDS, Endpoint, InputError, failure_summary, run_checks


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
            given["url"], given["model"], given["api_key"], given["ca_file"], given["unit"], given["server_name"]
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
        "ok": all(result.ok for result in results),
        "seconds": round(time.monotonic() - start, 3),
        "checks": [result.as_dict() for result in results],
    }
    if not answer["ok"]:
        module.fail_json(msg=failure_summary(endpoint, results), **answer)
    module.exit_json(changed=False, **answer)


if __name__ == "__main__":
    main()
