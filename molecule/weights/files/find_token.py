"""Print every place of this host where the token on standard input is, but for systemd's credentials."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDERS = ("/etc", "/home", "/opt", "/root", "/run", "/srv", "/tmp", "/usr/local", "/var")  # noqa: S108  looked into, not used
COMMANDS = (
    ["journalctl", "--no-pager", "--all"],
    ["systemctl", "show", "*"],
    ["systemctl", "cat", "*"],
    ["ps", "axeww"],
)

token = sys.stdin.buffer.read().strip()
places = [
    " ".join(command)
    for command in COMMANDS
    if token in subprocess.run(command, check=False, capture_output=True).stdout
]
paths = [
    Path(parent, name)
    for folder in FOLDERS
    for parent, _, names in os.walk(folder)
    if not parent.startswith("/run/credentials/")
    for name in names
]
for path in [*paths, *Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]:
    try:
        if (path.is_file() and not path.is_symlink() and token in path.read_bytes()) or token in str(path).encode():
            places.append(str(path))
    except OSError:  # a process that ended
        continue
print("\n".join(places))
