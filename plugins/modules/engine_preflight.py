"""Ansible module: prove that an engine comes up, before anything depends on it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_preflight
short_description: Prove that an engine comes up, before anything depends on it
version_added: "0.1.0"
description:
  - Imports vLLM as the user and with the variables that its units have, and fails where it does not import, cannot
    write to its caches, or does not know a parser that the command lines name.
  - With O(build_for) it also compiles what every engine on such a GPU compiles at its first start, into the engine's
    own cache. That takes a compiler and no GPU, so that engines may be serving meanwhile.
  - What was found is kept in the environment, and asked for again when something of it has changed. No GPU is touched.
options:
  runtime:
    description: Folder of the environment, with C(venv) in it.
    type: path
    required: true
  user:
    description: User that the engine runs as.
    type: str
    required: true
  environment:
    description: Variables of its units that say where things are. HOME is the folder that it starts in.
    type: dict
    required: true
  arguments:
    description: Command lines of the engines, whose parsers are checked.
    type: list
    elements: list
    default: []
  build_for:
    description: Compute capabilities of the host's GPUs.
    type: list
    elements: str
    default: []
  timeout_seconds:
    description: How long an import or a build may take.
    type: int
    default: 1200
attributes:
  check_mode:
    support: full
    description: In check mode only what was found before is looked at.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Prove that the engine comes up
  engine_preflight:
    runtime: /opt/vllm-fleet/runtimes/vllm-0.32.0-cuda-cp312-x86_64-9f1c03ab52de
    user: vllm
    environment: {HOME: /var/lib/vllm-fleet/cache/vllm-0.32.0-cuda-cp312-x86_64-9f1c03ab52de}
    arguments: [[--tool-call-parser, minimax_m2, --reasoning-parser, minimax_m2]]
    build_for: ["12.0"]
"""

RETURN = r"""
found:
  description: What the engine said of itself; empty in check mode where it was not asked yet.
  returned: always
  type: dict
  sample: {version: 0.32.0, tool_parsers: [minimax_m2], reasoning_parsers: [minimax_m2], built: [], problems: []}
"""

import hashlib
import inspect
import json
import pwd
import subprocess
from pathlib import Path

from ansible.module_utils import engine_check
from ansible.module_utils.basic import AnsibleModule

# What a parser's flag is called, where its names are listed, and what the card calls it.
PARSER_FLAGS = (
    ("--tool-call-parser", "tool_parsers", "engine.tool_parser"),
    ("--reasoning-parser", "reasoning_parsers", "engine.reasoning_parser"),
)
TAIL_LINES = 12


def unknown_parsers(arguments: list[list[str]], found: dict) -> list[str]:
    """A sentence for each parser that a command line names and the engine does not have."""
    wrong = []
    for flag, listed, key in PARSER_FLAGS:
        known = found.get(listed)
        named = {line[line.index(flag) + 1] for line in arguments if flag in line}
        wrong += [
            "vLLM {version} has no {flag} named {name}. It has: {known}. Set {key} in the model's card to one of "
            "these, or another vllm_plan_vllm_version.".format(
                version=found["version"], flag=flag[2:], name=name, known=", ".join(known), key=key
            )
            for name in sorted(named - set(known or named))
        ]
    return wrong


def ask(module: AnsibleModule, capability: str | None) -> dict:
    """Run the check in the environment and return what it printed."""
    given = module.params
    account = pwd.getpwnam(given["user"])
    python = "{0}/venv/bin/python".format(given["runtime"])
    # From standard input: the user may not be able to read where Ansible puts its files.
    command = ["nice", "-n", "10", python, "-", *(["--build-for", capability] if capability else [])]
    # No GPU is to be seen: looking at one takes memory of it, which a serving engine may not have to give.
    environment = {
        **given["environment"],
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    failure = "The engine in {0} does not come up as user {1}".format(given["runtime"], given["user"])
    try:
        done = subprocess.run(
            command,
            input=inspect.getsource(engine_check),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=given["timeout_seconds"],
            cwd=given["environment"].get("HOME", "/"),
            env={name: str(value) for name, value in environment.items()},
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=[],
        )
    except subprocess.TimeoutExpired:
        module.fail_json(msg="{0}: no answer in {1} seconds.".format(failure, given["timeout_seconds"]))
    except OSError as error:
        module.fail_json(msg="{0}: {1}.".format(failure, error))
    if done.returncode != 0:
        tail = "\n".join((done.stderr + done.stdout).strip().splitlines()[-TAIL_LINES:])
        what = " (it was building kernels for compute capability {0})".format(capability) if capability else ""
        module.fail_json(msg="{0}{1}. It said:\n{2}".format(failure, what, tail))
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "runtime": {"type": "path", "required": True},
            "user": {"type": "str", "required": True},
            "environment": {"type": "dict", "required": True},
            "arguments": {"type": "list", "elements": "list", "default": []},
            "build_for": {"type": "list", "elements": "str", "default": []},
            "timeout_seconds": {"type": "int", "default": 1200},
        },
        supports_check_mode=True,
    )
    given = module.params
    decides = [given["user"], given["environment"], given["build_for"], inspect.getsource(engine_check)]
    key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
    kept = Path(given["runtime"], "preflight", key + ".json")
    if kept.exists():
        changed, found = False, json.loads(kept.read_text(encoding="utf-8"))
    elif module.check_mode:
        module.exit_json(changed=True, found={})
    else:
        changed = True
        answers = [ask(module, capability) for capability in given["build_for"] or [None]]
        found = {**answers[0], "built": [answer["built"] for answer in answers if answer["built"]]}
        if found["problems"]:
            module.fail_json(
                msg="vLLM in {0} would not work as user {1}: {2}.".format(
                    given["runtime"], given["user"], "; ".join(found["problems"])
                ),
                found=found,
            )
        kept.parent.mkdir(mode=0o755, exist_ok=True)
        draft = kept.with_suffix(".draft")
        draft.write_text(json.dumps(found), encoding="utf-8")
        draft.rename(kept)
    wrong = unknown_parsers(given["arguments"], found)
    if wrong:
        module.fail_json(msg=" ".join(wrong), found=found)
    module.exit_json(changed=changed, found=found)


if __name__ == "__main__":
    main()
