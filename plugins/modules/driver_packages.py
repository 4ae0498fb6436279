"""Ansible module: ask apt, in a private view, what it has of a driver and what installing it would do."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_packages
short_description: Ask apt what it has of a driver and what installing it would do
version_added: "0.1.0"
description:
  - Gives apt a view of the host with another source, key and preferences, kept in a scratch folder. What it says there
    it would say after the change, so held packages, a changed key, a withdrawn branch or a missing file fail before
    anything on the host is touched.
  - Writes to the scratch folder only, so that a check tells the truth too.
options:
  state:
    description: C(candidates) lists versions of the driver's packages; C(transaction) simulates installing O(install).
    type: str
    choices: [candidates, transaction]
    required: true
  scratch:
    description: Folder of the view. The packages that were fetched stay there until the change is done.
    type: path
    required: true
  source:
    description: Where the driver comes from.
    type: dict
    required: true
    suboptions:
      kind:
        description: NVIDIA's repository by its keyring package, a mirror by address and key, or the host's own sources.
        type: str
        choices: [nvidia, mirror, distribution]
        required: true
      keyring_url:
        description: Address of the keyring package.
        type: str
      keyring_checksum:
        description: Its SHA-256.
        type: str
      mirror_url:
        description: Address of the mirror.
        type: str
      mirror_suite:
        description: Suite of the mirror; C(/) where it has none, as NVIDIA's repository.
        type: str
        default: /
      mirror_components:
        description: Components of the mirror.
        type: list
        elements: str
        default: []
      mirror_key:
        description: Public key of the mirror, armoured.
        type: str
        no_log: false
  retired_keys:
    description: Fingerprints of keys that no repository uses any more; files that trust only these are named.
    type: list
    elements: str
    default: []
    no_log: false
  install:
    description: Arguments of C(apt-get install); C(NAME-) removes. With O(state=transaction).
    type: list
    elements: str
    default: []
  preferences:
    description: Text of the preferences file of the change. With O(state=transaction).
    type: str
    default: ""
  preferences_file:
    description: Where the change writes it; a former one is left out of the view.
    type: path
    default: /etc/apt/preferences.d/00-vllm-fleet-gpu-driver
  download:
    description: Whether to fetch all packages of the transaction now.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Writes to the scratch folder only.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: See which drivers Debian has
  driver_packages:
    state: candidates
    scratch: /var/cache/vllm-fleet/gpu_driver
    source: {kind: distribution}
  become: true
"""

RETURN = r"""
candidates:
  description: Every version of the driver's packages at the source.
  returned: with state=candidates
  type: list
  elements: dict
  sample: [{name: libcuda1, version: 550.163.01-2, repository: "http://mirror/debian"}]
repository:
  description: Files that the change writes or removes for the source.
  returned: always
  type: dict
  sample: {addresses: ["http://mirror/nvidia"], files: {}, replaced: [/etc/apt/sources.list.d/cuda.list]}
apt_options:
  description: Options by which apt-get sees the view.
  returned: always
  type: list
  elements: str
transaction:
  description: What would be installed and removed.
  returned: with state=transaction
  type: dict
  sample: {install: [{name: libcuda1, from: null, to: 580.126.09-1}], remove: []}
command:
  description: The command that does exactly this; with state=candidates it wants for packages.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.apt_view import (
    AptError,
    AptView,
    Repository,
    conflicting_sources,
    mirror,
    repository_addresses,
    retired_key_files,
    unpack_keyring,
)
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.driver_probe import read_repositories, run_patiently

_DISTRIBUTIONS = ("Debian", "Ubuntu")  # what their Release files call themselves
_NAME = "vllm-fleet-gpu-driver"


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["candidates", "transaction"], "required": True},
            "scratch": {"type": "path", "required": True},
            "source": {
                "type": "dict",
                "required": True,
                "options": {
                    "kind": {"type": "str", "choices": ["nvidia", "mirror", "distribution"], "required": True},
                    "keyring_url": {"type": "str"},
                    "keyring_checksum": {"type": "str"},
                    "mirror_url": {"type": "str"},
                    "mirror_suite": {"type": "str", "default": "/"},
                    "mirror_components": {"type": "list", "elements": "str", "default": []},
                    "mirror_key": {"type": "str", "no_log": False},
                },
            },
            "retired_keys": {"type": "list", "elements": "str", "default": [], "no_log": False},
            "install": {"type": "list", "elements": "str", "default": []},
            "preferences": {"type": "str", "default": ""},
            "preferences_file": {"type": "path", "default": "/etc/apt/preferences.d/00-vllm-fleet-gpu-driver"},
            "download": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    asked = module.params
    source = asked["source"]
    view = AptView(run_patiently, asked["scratch"])
    try:
        package, repository = None, Repository({}, {})
        if source["kind"] == "nvidia":
            checksum = (source["keyring_checksum"] or "").replace("sha256:", "")
            package, repository = unpack_keyring(run_patiently, source["keyring_url"], checksum, asked["scratch"])
        elif source["kind"] == "mirror":
            repository = mirror(
                source["mirror_url"], source["mirror_suite"], source["mirror_components"], source["mirror_key"], _NAME
            )
        repository = repository.replacing(conflicting_sources(read_repositories(), repository))
        added = repository_addresses(repository)
        if asked["state"] == "candidates":
            view.prepare(repository, [asked["preferences_file"]])
            view.update(added)
        addresses = added or view.addresses(_DISTRIBUTIONS)
        result = {
            "changed": False,
            "apt_options": view.options,
            "repository": {
                "addresses": addresses,
                # The keyring package brings its own files.
                "files": {} if package else repository.files(),
                "replaced": [*repository.replaces, *retired_key_files(asked["retired_keys"])],
            },
        }
        if asked["state"] == "candidates":
            module.exit_json(candidates=view.candidates(addresses), command=view.install_command([]), **result)
        view.write_preferences(asked["preferences"])
        arguments = [*asked["install"], *([package] if package else [])]
        transaction = view.simulate(arguments)
        if asked["download"] and not module.check_mode:
            view.download(arguments)
    except AptError as error:
        module.fail_json(msg=str(error))
    module.exit_json(transaction=transaction, command=view.install_command(arguments), **result)


if __name__ == "__main__":
    main()
