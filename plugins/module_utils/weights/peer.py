"""Hands the verified files of one model on to other hosts, as a server that speaks the Hub's protocol and only reads.

So that the other hosts' `hf` client, watchdog and checks are the same as for the Hub. Every address begins with the
fingerprint of the files: who does not know it, because Ansible has not told him, finds nothing here. What is handed out
needs no encryption to be trusted: the receiver holds listing and files against that fingerprint.
"""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from .files import Manifest, WeightsError

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_IDLE_SECONDS = 120


class _Handler(BaseHTTPRequestHandler):
    """Answers for one manifest; names are looked up in it and never joined to a path unseen."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_SECONDS
    manifest: Manifest
    folder: Path

    def do_GET(self) -> None:
        """Answer with content."""
        self._answer(body=True)

    def do_HEAD(self) -> None:
        """Answer without content."""
        self._answer(body=False)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        """Say nothing: addresses hold the fingerprint."""

    def _answer(self, *, body: bool) -> None:
        manifest = self.manifest
        root = f"/{manifest.fingerprint()}"
        path = unquote(urlsplit(self.path).path)
        listing = f"{root}/api/models/{manifest.id}/tree/{manifest.commit}"
        files = f"{root}/{manifest.id}/resolve/{manifest.commit}/"
        if path == listing:
            entries = [
                {
                    "type": "file",
                    "path": name,
                    "oid": entry["sha256"][:40],
                    "size": entry["size"],
                    "lfs": {"oid": entry["sha256"], "size": entry["size"], "pointerSize": 134},
                }
                for name, entry in sorted(manifest.files.items())
            ]
            content = json.dumps(entries).encode()
            self._headers(HTTPStatus.OK, len(content), {"Content-Type": "application/json"})
            if body:
                self.wfile.write(content)
        elif path.startswith(files) and path[len(files) :] in manifest.files:
            self._file(path[len(files) :], body=body)
        else:
            self._headers(HTTPStatus.NOT_FOUND, 0, {})

    def _file(self, name: str, *, body: bool) -> None:
        entry = self.manifest.files[name]
        size, first, last = entry["size"], 0, entry["size"] - 1
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        headers = {
            "ETag": f'"{entry["sha256"]}"',
            "X-Linked-ETag": f'"{entry["sha256"]}"',
            "X-Linked-Size": str(size),
            "X-Repo-Commit": self.manifest.commit,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        status = HTTPStatus.OK
        if asked:
            first, last = int(asked[1]), min(int(asked[2] or last), last)
            if first > last:
                self._headers(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, 0, {"Content-Range": f"bytes */{size}"})
                return
            status = HTTPStatus.PARTIAL_CONTENT
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self._headers(status, last - first + 1, headers)
        if body and size:
            with (self.folder / name).open("rb") as stream:
                self.wfile.flush()
                self.connection.sendfile(stream, first, last - first + 1)

    def _headers(self, status: HTTPStatus, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()


def server(folder: str, manifest: str, address: str, port: int) -> ThreadingHTTPServer:
    """Make the server, listening.

    Raises:
        WeightsError: There is no complete manifest: nothing unverified is handed on.
    """
    known = Manifest.read(Path(manifest))
    if known is None or not known.complete:
        raise WeightsError(f"{folder} holds no model whose files were all verified, so there is nothing to hand on.")
    handler = type("Handler", (_Handler,), {"manifest": known, "folder": Path(folder)})
    ThreadingHTTPServer.daemon_threads = True
    return ThreadingHTTPServer((address, port), handler)


def serve(folder: str, manifest: str, address: str, port: int) -> None:
    """Hand on until ended."""
    with server(folder, manifest, address, port) as listening:
        listening.serve_forever()
