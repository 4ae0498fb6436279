"""Changes under load: keys come and go by a reload, replicas are drained and come back, and no request is lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from conftest import KEYS, Load, Replica, ask, chat, free_port, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Fleet


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
