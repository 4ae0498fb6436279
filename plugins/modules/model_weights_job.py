"""Ansible module: start a job that brings a model's files to a host, or hands them on to others."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_weights_job
short_description: Start a job that brings a model's files to a host, or hands them on
version_added: "0.1.0"
description:
  - The job is a transient systemd unit with a user of its own, so that it outlives the controller. A second start finds
    it running and leaves it. M(model_weights_wait) waits for it.
  - A token reaches it by systemd's credentials only, never by an argument or an environment.
options:
  state:
    description:
      - V(started) brings the files; V(serving) hands verified ones on to other hosts; V(stopped) ends what V(serving)
        began.
    type: str
    choices: [started, serving, stopped]
    default: started
  job:
    description: What to bring, with the fields of C(Job) in C(module_utils/weights/sources.py).
    type: dict
    required: true
  user:
    description: User that the job runs as; it owns what it brings.
    type: str
    required: true
  token:
    description: Token for private and gated repositories.
    type: str
  token_file:
    description: File on the host, for root only, that holds the token.
    type: path
  address:
    description: With O(state=serving), the address to listen on.
    type: str
  port:
    description: With O(state=serving), the port to listen on.
    type: int
  limit_seconds:
    description: With O(state=serving), when it ends by itself, should nobody end it.
    type: int
    default: 86400
attributes:
  check_mode:
    support: none
    description: M(model_weights) tells what would be done.
author: vllm-fleet
"""

EXAMPLES = r"""
- name: Begin to bring the files
  model_weights_job:
    job:
      kind: hub
      id: MiniMaxAI/MiniMax-M2.5
      commit: f710177d938eff80b684d42c5aa84b382612f21f
      folder: /var/lib/vllm-fleet/weights/MiniMaxAI--MiniMax-M2.5/f710177d938eff80b684d42c5aa84b382612f21f
      endpoint: https://huggingface.co
      hf: /opt/vllm-fleet/runtimes/R/venv/bin/hf
    user: vllm-weights
"""

RETURN = r"""
unit:
  description: The unit.
  returned: always
  type: str
  sample: vllm-weights-fetch-4f1c02d3aa91.service
fingerprint:
  description: With O(state=serving), the name of what is handed on, the first part of its address.
  returned: when serving
  type: str
  sample: 9f2c...
"""

import os
import socket
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.weights.files import Manifest, WeightsError, manifest_path
from ansible.module_utils.weights.launch import start
from ansible.module_utils.weights.sources import Job
from ansible.module_utils.weights.unit import Unit

# A task's `environment` reaches this module; of that, what a client of the network needs goes on to the job.
LISTENS_WITHIN_SECONDS = 10
PASSED_ON = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir")


def _fetch(module: AnsibleModule) -> dict:
    options = module.params
    job = dict(options["job"])
    root, in_place = job.pop("root"), job["kind"] == "in_place"
    job["manifest"] = str(manifest_path(job["folder"], root, in_place=in_place))
    if not job.get("expected"):  # another host of the fleet is reached without a proxy
        job["environment"] = {name: value for name, value in os.environ.items() if name.lower() in PASSED_ON}
    Job(**job)  # a field that is not known fails here, not in the unit
    unit = Unit(job["folder"])
    started = start(
        unit,
        job,
        user=options["user"],
        writable=[str(Path(job["manifest"]).parent)],
        token=options["token"],
        token_file=options["token_file"],
    )
    return {"changed": started, "unit": unit.name}


def _serve(module: AnsibleModule) -> dict:
    options = module.params
    folder, root = options["job"]["folder"], options["job"]["root"]
    path = manifest_path(folder, root, in_place=options["job"]["kind"] == "in_place")
    manifest = Manifest.read(path)
    if manifest is None or not manifest.complete:
        raise WeightsError(f"{folder} holds no model whose files were all verified, so there is nothing to hand on.")
    unit = Unit(folder, "serve")
    started = start(
        unit,
        {"folder": folder, "manifest": str(path), "address": options["address"], "port": options["port"]},
        user=options["user"],
        writable=[],
        limit_seconds=options["limit_seconds"],
    )
    deadline = time.monotonic() + LISTENS_WITHIN_SECONDS
    while True:
        try:
            socket.create_connection((options["address"], options["port"]), timeout=1).close()
            return {"changed": started, "unit": unit.name, "fingerprint": manifest.fingerprint()}
        except OSError as error:
            if time.monotonic() > deadline or not unit.active():
                raise WeightsError(
                    f"Nothing listens on {options['address']}:{options['port']} for the other hosts ({error}). Set "
                    "model_weights_seed_address to an address of this host and model_weights_seed_port to a free port. "
                    f"The journal of {unit.name} says: {unit.journal() or 'nothing'}"
                ) from None
            time.sleep(0.2)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["started", "serving", "stopped"], "default": "started"},
            "job": {"type": "dict", "required": True},
            "user": {"type": "str", "required": True},
            "token": {"type": "str", "no_log": True},
            "token_file": {"type": "path"},
            "address": {"type": "str"},
            "port": {"type": "int"},
            "limit_seconds": {"type": "int", "default": 86400},
        },
        mutually_exclusive=[("token", "token_file")],
        required_if=[("state", "serving", ("address", "port"))],
    )
    try:
        if module.params["state"] == "stopped":
            unit = Unit(module.params["job"]["folder"], "serve")
            running = unit.active()
            unit.stop()
            module.exit_json(changed=running, unit=unit.name)
        module.exit_json(**(_serve(module) if module.params["state"] == "serving" else _fetch(module)))
    except WeightsError as error:
        module.fail_json(msg=f"{error}")
    except (TypeError, KeyError) as error:
        module.fail_json(msg=f"job: {error}")


if __name__ == "__main__":
    main()
