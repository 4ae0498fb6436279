"""Ansible module: say whether a model's files are all there, verified, and usable by an engine."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_weights
short_description: Say whether a model's files are there, verified and usable
version_added: "0.1.0"
description:
  - Compares a folder with the manifest of what was verified there, by names, sizes and modification times, so that it
    takes milliseconds. M(model_weights_job) brings and verifies what is missing.
  - Once verified, requires that it is a model, that the engine's user can open every file, and that the repository
    holds no code but what the card lists; and removes former downloads that nothing names any more.
options:
  id:
    description: Repository.
    type: str
    required: true
  commit:
    description: Commit of the repository.
    type: str
    required: true
  folder:
    description: Where the model's files are.
    type: path
    required: true
  in_place:
    description: The folder is not ours. It is only read, and the record of it is kept below O(root).
    type: bool
    default: false
  root:
    description: Folder that holds downloads and records.
    type: path
    required: true
  exclude:
    description: Patterns of files that are left out.
    type: list
    elements: str
    default: []
  user:
    description: The engine's user. One that does not exist yet counts as one without any special rights.
    type: str
    required: true
  remote_code:
    description: SHA-256 of each Python file that the card lets run; empty where no code of a repository is run.
    type: dict
    default: {}
  keep:
    description: How many former downloads that nothing names are kept.
    type: int
    default: 1
  used_by:
    description: Patterns of files, such as units; a download whose path stands in one of them is never removed.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
    description: Files that are not verified, and downloads that would be removed, are reported as a change.
  diff_mode:
    support: full
    description: Shows what is not verified, and what is removed.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Look at the files
  model_weights:
    id: MiniMaxAI/MiniMax-M2.5
    commit: f710177d938eff80b684d42c5aa84b382612f21f
    folder: /var/lib/vllm-fleet/weights/MiniMaxAI--MiniMax-M2.5/f710177d938eff80b684d42c5aa84b382612f21f
    root: /var/lib/vllm-fleet/weights
    user: vllm
"""

RETURN = r"""
verified:
  description: Every file is there, and is the one that was verified.
  returned: always
  type: bool
  sample: true
manifest:
  description: Where on the host the record of what was verified is.
  returned: always
  type: str
  sample: /var/lib/vllm-fleet/weights/MiniMaxAI--MiniMax-M2.5/f710177d938eff80b684d42c5aa84b382612f21f/.vllm-fleet.json
summary:
  description: A sentence for a reader.
  returned: always
  type: str
  sample: "/srv/m: 130 files, 214.3 GiB, compared with the repository's own checksums."
files:
  description: How many files are verified.
  returned: always
  type: int
  sample: 130
size_bytes:
  description: Their size.
  returned: always
  type: int
  sample: 230103924736
compared:
  description: What their hashes were compared with (publisher, bundle, peer or nothing).
  returned: always
  type: str
  sample: publisher
fingerprint:
  description: SHA-256 over repository, commit and the name, size and hash of every file; empty when not verified.
  returned: always
  type: str
  sample: 9f2c...
code_files:
  description: Python files of the repository with their SHA-256.
  returned: always
  type: dict
  sample: {}
removed:
  description: Former downloads that were removed.
  returned: always
  type: list
  elements: str
  sample: []
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.weights import state
from ansible.module_utils.weights.files import WeightsError, manifest_path


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "id": {"type": "str", "required": True},
            "commit": {"type": "str", "required": True},
            "folder": {"type": "path", "required": True},
            "in_place": {"type": "bool", "default": False},
            "root": {"type": "path", "required": True},
            "exclude": {"type": "list", "elements": "str", "default": []},
            "user": {"type": "str", "required": True},
            "remote_code": {"type": "dict", "default": {}},
            "keep": {"type": "int", "default": 1},
            "used_by": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    options = module.params
    folder = Path(options["folder"])
    manifest = manifest_path(options["folder"], options["root"], in_place=options["in_place"])
    seen = state.look(
        folder,
        manifest,
        repository=options["id"],
        commit=options["commit"],
        exclude=options["exclude"],
    )
    removed = []
    try:
        # What is used in place must be right from the start; what we bring is looked at when it is there.
        if options["in_place"] or seen.verified:
            state.require_model(folder, seen.found, options["id"])
            state.require_usable(folder, seen.found, options["user"])
        if seen.verified:
            state.require_reviewed(seen, options["remote_code"])
            removed = state.prunable(Path(options["root"]), folder, options["keep"], options["used_by"])
    except WeightsError as error:
        module.fail_json(msg=f"{error}")
    if not module.check_mode:
        for former in removed:
            state.remove(former)
    name = f"{options['id']} at {options['commit']}"
    module.exit_json(
        changed=bool(removed) or (module.check_mode and not seen.verified),
        verified=seen.verified,
        manifest=str(manifest),
        summary=seen.summary(options["folder"]),
        files=len(seen.manifest.files),
        size_bytes=seen.manifest.size,
        compared=seen.manifest.compared,
        fingerprint=seen.manifest.fingerprint() if seen.verified else "",
        code_files=seen.code,
        removed=[str(former) for former in removed],
        diff={
            "before": "".join(
                [f"{name}: {seen.why}\n"] * (not seen.verified)
                + [f"{former}: not used any more\n" for former in removed]
            ),
            "after": f"{name}: every file verified\n" * (not seen.verified),
        },
    )


if __name__ == "__main__":
    main()
