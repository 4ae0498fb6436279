"""A stand-in for the Hugging Face Hub on loopback that misbehaves on demand. The real `hf` client talks to it.

It speaks what the client and our own code ask: the commit of a revision, the tree in pages, `resolve` with HEAD, ranges
and ETags, large files by a redirect to a second host name, and the first steps of Xet, whose storage only hangs. As a
program it serves one tiny model, for scenarios.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import re
import threading
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

MODEL = "org/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE_BYTES = 100_000  # files from here on are LFS: redirected, and known by their SHA-256
PAGE = 4
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_PIECE = 64 * 1024


@dataclass
class Fault:
    """One misbehaviour.

    Attributes:
        kind: `status` (with `code` and `error_code`), `stall` (hangs after `share` of the content), `drop` (closes
            after `share`), `slow` (`seconds` between pieces), `wrong` (one bit of the content differs), `html` (a
            sign-in page).
        where: Which requests: `revision`, `tree`, `resolve` (HEAD and GET), `content` (GET of a file) or `xet`.
        name: Which file, for `resolve` and `content`; empty for every.
        times: How many requests it hits; None for all.
        while_exists: For `slow`, a file that ends it by going away.
    """

    kind: str
    where: str = "content"
    name: str = ""
    times: int | None = None
    share: float = 0.5
    code: int = 500
    error_code: str = ""
    seconds: float = 0.01
    while_exists: str = "/"
    headers: dict[str, str] = field(default_factory=dict)


def model(shards: int = 2, shard_bytes: int = 300_000) -> dict[str, bytes]:
    """Make the files of a tiny model: a configuration, a tokenizer, an index, and shards of random bytes."""
    names = [f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    index = {"weight_map": {f"layer.{n}": name for n, name in enumerate(names)}}
    return {
        ".gitattributes": b"*.safetensors filter=lfs\n",
        "README.md": b"# tiny\n",
        "config.json": b'{"architectures": ["Tiny"]}\n',
        "assets/sub/chat.jinja": b"{{ messages }}\n",
        "tokenizer.json": b"{}\n",
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{name: random.Random(name).randbytes(shard_bytes) for name in names},  # noqa: S311  not a secret
    }


def git_blob(content: bytes) -> str:
    """The id that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def sha256_of(token: str) -> str:
    """What a server needs to know of a token, so that the token is nowhere but with its owner."""
    return hashlib.sha256(token.encode()).hexdigest()


class HubServer:
    """The server, serving while its `with` block runs.

    `files`, `faults`, `token_sha256` (None lets anyone in), `gated` and `xet` may be changed at any time. `seen` lists
    every request as (method, path, Authorization, Range).
    """

    def __init__(self, files: dict[str, bytes] | None = None, *, address: str = "127.0.0.1", port: int = 0) -> None:
        self.files = model() if files is None else files
        self.repository = MODEL
        self.revisions = {"main": COMMIT}
        self.faults: list[Fault] = []
        self.token_sha256: str | None = None
        self.gated = False
        self.xet = False
        self.seen: list[tuple[str, str, str | None, str | None]] = []
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._http = ThreadingHTTPServer((address, port), handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.content_url = f"http://localhost:{self.port}"  # another name, as a CDN's is

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._http.shutdown()
        self._http.server_close()

    def serve_forever(self) -> None:
        """Serve until the process ends."""
        self._http.serve_forever()

    def fault(self, where: str, name: str = "") -> Fault | None:
        """Take the fault that hits a request, if one does."""
        with self._lock:
            for fault in self.faults:
                if fault.where == where and fault.name in ("", name) and fault.times != 0:
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return None

    def asked(self, part: str, method: str = "GET") -> int:
        """Count the requests whose path holds `part`."""
        return sum(part in path and method == verb for verb, path, _, _ in self.seen)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        """Say nothing."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # clients that are ended in the middle are what this is for
            super().handle()

    def do_HEAD(self) -> None:
        self._route(body=False)

    def do_GET(self) -> None:
        self._route(body=True)

    def do_POST(self) -> None:
        self._route(body=True)

    def _route(self, *, body: bool) -> None:
        hub = self.hub
        url = urlsplit(self.path)
        path = unquote(url.path)
        hub.seen.append((self.command, path, self.headers.get("Authorization"), self.headers.get("Range")))
        if path.startswith("/content/"):  # signed by its address, needs no token
            self._content(path.removeprefix("/content/"), body=body)
        elif path.startswith("/cas/"):
            hub.stopping.wait()
        elif hub.token_sha256 not in (None, sha256_of(self.headers.get("Authorization", "").removeprefix("Bearer "))):
            self._refuse(401, "RepoNotFound")
        elif path.startswith(f"/api/models/{hub.repository}/"):
            self._api(path.removeprefix(f"/api/models/{hub.repository}/"), parse_qs(url.query))
        elif path.startswith(f"/{hub.repository}/resolve/"):
            self._resolve(*path.removeprefix(f"/{hub.repository}/resolve/").split("/", 1), body=body)
        else:
            self._refuse(401, "RepoNotFound")

    def _api(self, rest: str, query: dict[str, list[str]]) -> None:
        kind, _, revision = rest.partition("/")
        fault = self.hub.fault({"xet-read-token": "xet"}.get(kind, kind))
        if fault and fault.kind == "html":
            self._send(HTTPStatus.OK, b"<html>Sign in</html>", {"Content-Type": "text/html"})
        elif fault:
            self._refuse(fault.code, fault.error_code, fault.headers)
        elif (commit := self.hub.revisions.get(revision, revision)) not in self.hub.revisions.values():
            self._refuse(404, "RevisionNotFound")
        elif kind == "revision":
            self._json({"id": self.hub.repository, "sha": commit, "siblings": []})
        elif kind == "tree":
            self._tree(commit, int(query.get("cursor", ["0"])[0]))
        elif kind == "xet-read-token":
            self._json(
                {},
                {
                    "X-Xet-Cas-Url": f"{self.hub.url}/cas",
                    "X-Xet-Access-Token": "xet-token",
                    "X-Xet-Token-Expiration": str(int(time.time()) + 3600),
                },
            )
        else:
            self._refuse(404, "")

    def _tree(self, commit: str, start: int) -> None:
        folders = {name.rsplit("/", 1)[0] for name in self.hub.files if "/" in name}
        entries = [{"type": "directory", "oid": git_blob(name.encode()), "size": 0, "path": name} for name in folders]
        for name, content in sorted(self.hub.files.items()):
            entry: dict[str, Any] = {"type": "file", "oid": git_blob(content), "size": len(content), "path": name}
            if len(content) >= LARGE_BYTES:
                sha256 = hashlib.sha256(content).hexdigest()
                entry |= {
                    "oid": git_blob(sha256.encode()),
                    "lfs": {"oid": sha256, "size": len(content), "pointerSize": 134},
                }
                entry |= {"xetHash": sha256} if self.hub.xet else {}
            entries.append(entry)
        more = start + PAGE < len(entries)
        address = f"{self.hub.url}/api/models/{self.hub.repository}/tree/{commit}?recursive=true&cursor={start + PAGE}"
        self._json(entries[start : start + PAGE], {"Link": f'<{address}>; rel="next"'} if more else {})

    def _resolve(self, commit: str, name: str, *, body: bool) -> None:
        content = self.hub.files.get(name)
        fault = self.hub.fault("resolve", name)
        if self.hub.gated:
            self._refuse(403, "GatedRepo")
        elif fault:
            self._refuse(fault.code, fault.error_code, fault.headers)
        elif commit not in self.hub.revisions.values():
            self._refuse(404, "RevisionNotFound")
        elif content is None:
            self._refuse(404, "EntryNotFound")
        elif len(content) < LARGE_BYTES:
            self._content(name, body=body, headers={"X-Repo-Commit": commit, "ETag": f'"{git_blob(content)}"'})
        else:
            sha256 = hashlib.sha256(content).hexdigest()
            headers = {
                "X-Repo-Commit": commit,
                "X-Linked-Size": str(len(content)),
                "X-Linked-ETag": f'"{sha256}"',
                "Location": f"{self.hub.content_url}/content/{name}",
            }
            if self.hub.xet:
                route = f"{self.hub.url}/api/models/{self.hub.repository}/xet-read-token/{commit}"
                headers |= {"X-Xet-Hash": sha256, "Link": f'<{route}>; rel="xet-auth"'}
            self._send(HTTPStatus.FOUND, b"", headers)

    def _content(self, name: str, *, body: bool, headers: dict[str, str] | None = None) -> None:
        content = self.hub.files[name]
        first, last = 0, len(content) - 1
        status = HTTPStatus.OK
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", **(headers or {})}
        if len(content) >= LARGE_BYTES:  # the client may have followed a redirect to the same host name
            headers |= {"X-Repo-Commit": COMMIT, "X-Linked-ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        if asked := _RANGE.fullmatch(self.headers.get("Range", "")):
            first, last = int(asked[1]), min(int(asked[2] or last), last)
            status = HTTPStatus.PARTIAL_CONTENT
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        fault = self.hub.fault("content", name) if body else None
        kind = fault.kind if fault else ""
        if fault and kind == "status":
            self._refuse(fault.code, fault.error_code, fault.headers)
            return
        if kind == "wrong":
            content = bytes([content[0] ^ 1]) + content[1:]
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(last - first + 1)}.items():
            self.send_header(header, value)
        self.end_headers()
        if body:
            self._pieces(content[first : last + 1], fault)

    def _pieces(self, content: bytes, fault: Fault | None) -> None:
        kind = fault.kind if fault else ""
        end = int(len(content) * fault.share) if fault and kind in ("stall", "drop") else len(content)
        for start in range(0, end, _PIECE):
            self.wfile.write(content[start : min(start + _PIECE, end)])
            if fault and kind == "slow" and Path(fault.while_exists).exists():
                self.hub.stopping.wait(fault.seconds)
        if kind == "stall":
            self.wfile.flush()
            self.hub.stopping.wait()
        self.close_connection = kind in ("stall", "drop")

    def _refuse(self, code: int, error_code: str, headers: dict[str, str] | None = None) -> None:
        known = {"X-Error-Code": error_code, "X-Error-Message": error_code} if error_code else {}
        self._send(HTTPStatus(code), b"", {**known, **(headers or {})})

    def _json(self, data: Any, headers: dict[str, str] | None = None) -> None:
        self._send(HTTPStatus.OK, json.dumps(data).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: HTTPStatus, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("port", type=int)
    parser.add_argument("--token-sha256")
    parser.add_argument("--shard-bytes", type=int, default=300_000)
    parser.add_argument("--slow-while", help="a file; while it exists, pieces come a second apart")
    options = parser.parse_args()
    hub = HubServer(model(shard_bytes=options.shard_bytes), address=options.address, port=options.port)
    hub.url = hub.content_url = f"http://{options.address}:{options.port}"
    hub.token_sha256 = options.token_sha256
    if options.slow_while:
        hub.faults = [Fault("slow", seconds=1, while_exists=options.slow_while)]
    hub.serve_forever()


if __name__ == "__main__":
    main()
