"""Ansible module: resolve a branch or tag of a model's repository to its commit."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_weights_commit
short_description: Resolve a branch or tag of a model's repository to its commit
version_added: "0.1.0"
description:
  - Asks a server that speaks the Hugging Face Hub's protocol. Changes nothing.
options:
  id:
    description: Repository.
    type: str
    required: true
  revision:
    description: Branch, tag or commit.
    type: str
    required: true
  endpoint:
    description: Address of the server.
    type: str
    required: true
  token:
    description: Token for private and gated repositories.
    type: str
  token_file:
    description: File on the host that holds the token.
    type: path
attributes:
  check_mode:
    support: full
    description: The module only reads.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Ask which commit main is
  model_weights_commit:
    id: MiniMaxAI/MiniMax-M2.5
    revision: main
    endpoint: https://huggingface.co
"""

RETURN = r"""
commit:
  description: The commit.
  returned: always
  type: str
  sample: f710177d938eff80b684d42c5aa84b382612f21f
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.weights.files import WeightsError
from ansible.module_utils.weights.hub import Hub, PassingError


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "id": {"type": "str", "required": True},
            "revision": {"type": "str", "required": True},
            "endpoint": {"type": "str", "required": True},
            "token": {"type": "str", "no_log": True},
            "token_file": {"type": "path"},
        },
        mutually_exclusive=[("token", "token_file")],
        supports_check_mode=True,
    )
    options = module.params
    try:
        token = options["token"] or (
            Path(options["token_file"]).read_text(encoding="utf-8").strip() if options["token_file"] else None
        )
        commit = Hub(options["endpoint"], token).commit(options["id"], options["revision"])
    except (WeightsError, PassingError, OSError) as error:
        module.fail_json(msg=f"{options['revision']} of {options['id']} cannot be resolved to a commit: {error}")
    module.exit_json(changed=False, commit=commit)


if __name__ == "__main__":
    main()
