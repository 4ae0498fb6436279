"""A package index that asks for a password, and is slow with engines while a file says so. Standard library.

Usage: mirror.py ACCOUNT_FILE SLOW_FILE FOLDER..., the first with USER:PASSWORD, the last with wheels; serves
http://127.0.0.1:8099/simple/.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ACCOUNT, SLOW, *FOLDERS = sys.argv[1:]
EXPECTED = "Basic " + base64.b64encode(Path(ACCOUNT).read_bytes().strip()).decode()
SLOW_SECONDS = 600


def files() -> dict[str, Path]:
    """Return every wheel by name."""
    return {path.name: path for folder in FOLDERS for path in Path(folder).glob("*.whl")}


def sha256(path: Path) -> str:
    """Return the hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Answers as a simple index does."""

    def do_GET(self) -> None:
        """Send a project's page or a wheel."""
        wheel = files().get(self.path.rsplit("/", 1)[1].replace("%2B", "+"))
        if self.headers["Authorization"] != EXPECTED:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="mirror"')
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif wheel:
            if Path(SLOW).exists() and wheel.name.startswith("vllm"):
                time.sleep(SLOW_SECONDS)
            self._answer(wheel.read_bytes(), "application/octet-stream")
        else:
            project = self.path.strip("/").rpartition("/")[2]
            links = [
                f'<a href="/files/{name.replace("+", "%2B")}#sha256={sha256(path)}">{name}</a>'
                for name, path in files().items()
                if re.sub(r"[-_.]+", "-", name.split("-")[0]).lower() == project
            ]
            self._answer(f"<!DOCTYPE html><html><body>{' '.join(links)}</body></html>".encode(), "text/html")

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


ThreadingHTTPServer(("127.0.0.1", 8099), Handler).serve_forever()
