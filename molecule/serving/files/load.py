"""A client under load: streams that each send one streamed completion after another, and an account of every second.

    python3 load.py --url http://10.89.213.21:8000 --model M --key K --account FILE

Runs until FILE.stop appears or --seconds are over. FILE gets a line of JSON each second: how many requests were sent,
ended well and failed in it, and each failure with its reason and how long it took. Standard library only.
"""

import argparse
import http.client
import json
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit


class Account:
    """What happened in the current second."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._lock = threading.Lock()
        self._empty()

    def _empty(self) -> None:
        self._counts = {"sent": 0, "ok": 0, "failed": 0}
        self._failures: list[dict] = []

    def add(self, kind: str, **failure: object) -> None:
        """Count one event."""
        with self._lock:
            self._counts[kind] += 1
            if failure:
                self._failures.append(failure)

    def take(self) -> dict:
        """The second that is over."""
        with self._lock:
            line = {"at": round(time.time(), 3), **self._counts, "failures": self._failures}
            self._empty()
        return line


def complete(given: argparse.Namespace) -> None:
    """Send one request and read its stream to the end; raises when it does not end well."""
    parts = urlsplit(given.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=given.deadline)
    body = {"model": given.model, "prompt": "Hello", "max_tokens": given.tokens, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {given.key}", "Content-Type": "application/json"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise RuntimeError(f"status {response.status}")
        last = ""
        for line in response:
            last = line.decode().strip() or last
        if last != "data: [DONE]":
            raise RuntimeError("the stream was cut")
    finally:
        connection.close()


def stream(given: argparse.Namespace, account: Account, stopped: threading.Event) -> None:
    """Send requests until stopped."""
    while not stopped.is_set():
        account.add("sent")
        begun = time.monotonic()
        try:
            complete(given)
            account.add("ok")
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            account.add("failed", reason=repr(error), seconds=round(time.monotonic() - begun, 3))
        stopped.wait(given.pause)


def main() -> None:
    """Run the streams and write the account."""
    parser = argparse.ArgumentParser()
    for name in ("url", "model", "key"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--account", type=Path, required=True)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.3)
    parser.add_argument("--deadline", type=float, default=120.0, help="longest silence, in seconds")
    parser.add_argument("--seconds", type=float, default=3600.0)
    given = parser.parse_args()
    account, stopped = Account(), threading.Event()
    streams = [
        threading.Thread(target=stream, args=(given, account, stopped), daemon=True) for _ in range(given.streams)
    ]
    for thread in streams:
        thread.start()
    end, stop = time.monotonic() + given.seconds, Path(f"{given.account}.stop")
    with given.account.open("w", encoding="utf-8", buffering=1) as file:
        while time.monotonic() < end and not stop.exists():
            time.sleep(1)
            file.write(json.dumps(account.take()) + "\n")


if __name__ == "__main__":
    main()
