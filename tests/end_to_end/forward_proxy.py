"""A forward proxy that remembers what it was asked for: enough of HTTP for apt, pip and uv."""

from __future__ import annotations

import contextlib
import http.server
import selectors
import socket
import threading
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Handler(http.server.BaseHTTPRequestHandler):
    """Tunnels CONNECT and forwards GET."""

    asked: list[str]
    timeout = 60

    def do_CONNECT(self) -> None:
        self.asked.append(f"CONNECT {self.path}")
        host, _, port = self.path.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as upstream:
            self.send_response(200)
            self.end_headers()
            self.wfile.flush()
            _copy_both_ways(self.connection, upstream)
        self.close_connection = True

    def do_GET(self) -> None:
        self.asked.append(f"GET {self.path}")
        forwarded = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.path, headers=forwarded), timeout=60) as answer:  # noqa: S310  a client's http address
                body, code, headers = answer.read(), answer.status, answer.headers
        except urllib.error.HTTPError as error:
            body, code, headers = error.read(), error.code, error.headers
        self.send_response(code)
        for name, value in headers.items():
            if name.lower() not in _HOP_BY_HOP | {"content-length"}:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep quiet: `asked` is the log."""


_HOP_BY_HOP = frozenset({"connection", "proxy-connection", "keep-alive", "transfer-encoding", "te", "upgrade"})


def _copy_both_ways(one: socket.socket, other: socket.socket) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(one, selectors.EVENT_READ, other)
        selector.register(other, selectors.EVENT_READ, one)
        while ready := selector.select(timeout=60):
            for key, _ in ready:
                source: socket.socket = key.fileobj  # type: ignore[assignment]  # only sockets are registered
                data = source.recv(65536)
                if not data:
                    return
                key.data.sendall(data)


@contextlib.contextmanager
def forward_proxy(address: str) -> Iterator[tuple[str, list[str]]]:
    """Serve on `address` while the block runs; give the proxy's URL and what it was asked for."""
    handler = type("Handler", (_Handler,), {"asked": []})
    with http.server.ThreadingHTTPServer((address, 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{address}:{server.server_address[1]}", handler.asked  # type: ignore[attr-defined]  # made above
        server.shutdown()
