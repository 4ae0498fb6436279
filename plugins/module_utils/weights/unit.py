"""The transient systemd unit of a job: its name, whether it runs, and what it said last."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

RUN = "/run/vllm-weights"


class Unit:
    """The unit of one folder's job.

    Attributes:
        name: The unit's name.
        command: `fetch` or `serve`.
        folder: The model's folder.
        run: The job's own folder, on a memory file system: it is gone after a restart of the host.
    """

    def __init__(self, folder: str, command: str = "fetch", *, run: str = RUN) -> None:
        """Name it by its folder: one folder has one job."""
        key = hashlib.sha256(folder.encode()).hexdigest()[:12]
        self.name = f"vllm-weights-{command}-{key}.service"
        self.command = command
        self.folder = folder
        self.run = Path(run) / f"{command}-{key}"

    def active(self) -> bool:
        """Whether the job runs."""
        shown = _systemctl("show", "--property=ActiveState", "--value", self.name)
        return shown.strip() in ("active", "activating", "deactivating", "reloading")

    def status(self) -> dict[str, Any]:
        """What the job said last; empty before it said anything."""
        try:
            return dict(json.loads((self.run / "status.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def journal(self, lines: int = 20) -> str:
        """The last lines of its journal."""
        command = ["journalctl", f"--unit={self.name}", f"--lines={lines}", "--output=cat", "--no-pager"]
        return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()

    def stop(self) -> None:
        """End the job."""
        _systemctl("stop", self.name)


def _systemctl(*arguments: str) -> str:
    return subprocess.run(["systemctl", *arguments], check=False, capture_output=True, text=True).stdout
