"""Changes under load: keys come and go by a reload, replicas are drained and come back, and no request is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conftest import BACKEND, KEYS, REPOSITORY, Load, Replica, ask, chat, free_port, wait_for

if TYPE_CHECKING:
    from conftest import Fleet, Gateway


def test_a_key_is_added_and_another_revoked_while_clients_ask(fleet: Fleet) -> None:
    gateway = fleet(environment={"STAND_IN_TOKENS_PER_SECOND": "100"})
    with Load(gateway.port, 8, max_tokens=20, stream=True) as load:
        wait_for(lambda: len(load.answers) > 8)
        gateway.keys = {"alice": KEYS["alice"], "carol": "carol-key-of-no-value"}
        gateway.reload()
        assert ask(gateway.port, key="carol-key-of-no-value").status == 200
        assert ask(gateway.port, key=KEYS["bob"]).status == 401
        before = len(load.answers)
        wait_for(lambda: len(load.answers) > before + 16)
    assert load.failed == []


def test_a_stream_that_was_running_before_a_reload_runs_to_its_end(fleet: Fleet) -> None:
    gateway = fleet(environment={"STAND_IN_TOKENS_PER_SECOND": "10"})
    with ThreadPoolExecutor(1) as clients:
        running = clients.submit(chat, gateway.port, 40, stream=True)
        wait_for(lambda: sum(replica.running for replica in gateway.replicas) == 1)
        gateway.reload()
        assert not running.done()
        assert len(running.result().events) == 40


def test_a_replica_is_added_while_clients_ask(fleet: Fleet, tmp_path: Path) -> None:
    gateway = fleet(count=1)
    more = Replica("r-9", "127.0.0.1", free_port(), tmp_path, 8, {})
    more.start()
    try:
        with Load(gateway.port, 8, max_tokens=5) as load:
            gateway.replicas.append(more)
            gateway.reload()
            wait_for(lambda: more.finished > 5)
        assert load.failed == []
    finally:
        more.stop()


def haproxy_module(gateway: Gateway, replica: Replica, **options: Any) -> None:
    """Run the module that rollouts use."""
    arguments = {
        "socket": str(gateway.folder / "admin.sock"),
        "backend": BACKEND,
        "host": f"gw.{replica.name}",
        "fail_on_not_found": True,
        "wait": True,
        "wait_interval": 1,
        "wait_retries": 30,
        **options,
    }
    command = [
        *(Path(sys.executable).with_name("ansible"), "localhost", "--inventory", "localhost,", "--connection", "local"),
        *("--extra-vars", f"ansible_python_interpreter={sys.executable}"),
        *("--module-name", "community.general.haproxy", "--args", json.dumps(arguments)),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_replica_is_drained_restarted_and_put_back_while_clients_ask(fleet: Fleet) -> None:
    gateway = fleet(environment={"STAND_IN_TOKENS_PER_SECOND": "100"})
    replica = gateway.replicas[0]
    with Load(gateway.port, 8, max_tokens=50, stream=True) as load:
        wait_for(lambda: len(load.answers) > 8)
        haproxy_module(gateway, replica, state="disabled", drain=True)
        assert gateway.status(replica) == "MAINT"
        assert replica.running == 0
        replica.stop()
        time.sleep(1)
        replica.start()
        haproxy_module(gateway, replica, state="enabled")
        wait_for(lambda: gateway.status(replica).startswith("UP"))  # "UP 1/3" after a check that came too early
        wait_for(lambda: replica.finished > 4)
    assert load.failed == []


def test_a_drained_replica_finishes_what_it_has(fleet: Fleet) -> None:
    gateway = fleet(count=1, environment={"STAND_IN_TOKENS_PER_SECOND": "10"})
    with ThreadPoolExecutor(1) as clients:
        running = clients.submit(chat, gateway.port, 60, stream=True)
        wait_for(lambda: gateway.replicas[0].running == 1)
        haproxy_module(gateway, gateway.replicas[0], state="drain")
        assert chat(gateway.port, 2).status == 503
        assert len(running.result().events) == 60
