"""What is deployed on this host and what of it serves: releases, and each replica with the release it came from.

Below the root (`/opt/vllm-fleet`): `releases/HASH` are releases, `current` and `previous` link to two of them,
`installed/NAME` links to the one that a replica's unit was taken from, `applied/UNIT` is that unit as it last came to
serve, and `applied/NAME.json` says of which release that was and how fast it was measured.

Standard library, Python 3.9.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any, Optional

MARKER = re.compile(r"# vllm-fleet replica ([^:\s]+):")


def checksum(path: Path) -> Optional[str]:
    """SHA-256 of a file; None where there is none."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return None


def read_json(path: Path) -> Any:
    """What a file holds; None where there is none, or not that."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def linked(path: Path) -> Optional[str]:
    """Name of the release that a link leads to; None where none is."""
    target = path.resolve()
    return target.name if path.is_symlink() and target.is_dir() else None


def installed_units(folder: Path) -> dict[str, Path]:
    """Our replicas' units by the name of the replica, which their first line tells."""
    found = {}
    for path in sorted(folder.glob("vllm-*.service")):
        with contextlib.suppress(OSError), path.open(encoding="utf-8") as file:
            marked = MARKER.match(file.readline())
            if marked:
                found[marked[1]] = path
    return found


def key_id(path: Path) -> Optional[str]:
    """What a unit says of the engines' key: a fingerprint that changes with it."""
    with contextlib.suppress(OSError):
        found = re.search(r"^Environment=FLEET_KEY_ID=(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        return found[1] if found else None
    return None


def shown(units: list[str]) -> dict[str, dict[str, str]]:
    """What systemd says of units, by name."""
    if not units:
        return {}
    properties = "Id,ActiveState,NRestarts,ActiveEnterTimestampMonotonic"
    text = subprocess.run(
        ["systemctl", "show", "--property=" + properties, "--", *units],
        check=True,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ).stdout
    blocks = [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in text.split("\n\n")]
    return {block["Id"]: block for block in blocks if "Id" in block}


def read_state(
    root: Path, release: Optional[str] = None, units_folder: Path = Path("/etc/systemd/system")
) -> dict[str, Any]:
    """Read all of it.

    Args:
        root: Folder of releases.
        release: A release whose units' checksums are wanted too.
        units_folder: Where units are installed.

    Returns:
        `current`, `previous`, `releases` (newest first), `units` (checksum by unit, of `release`) and `replicas`: by
        name {"unit", "installed" and "applied" (checksums of its unit), "key_id", "release", "served" (the release that
        it last came to serve), "active", "up_seconds", "restarts", "measured"}, and of its release "replica" (its entry
        of the plan), "model", "vllm_version", "runtime", "weights". What is not known is null.
    """
    releases = [path.parent for path in root.glob("releases/*/plan.json")]
    releases.sort(key=lambda path: path.joinpath("plan.json").stat().st_mtime, reverse=True)
    units = installed_units(units_folder)
    systemd = shown([path.name for path in units.values()])
    return {
        "current": linked(root / "current"),
        "previous": linked(root / "previous"),
        "releases": [path.name for path in releases],
        "units": (
            {path.name: checksum(path) for path in sorted(root.glob("releases/{0}/*.service".format(release)))}
            if release
            else {}
        ),
        "replicas": {name: _replica(root, name, path, systemd.get(path.name, {})) for name, path in units.items()},
    }


def _replica(root: Path, name: str, path: Path, seen: dict[str, str]) -> dict[str, Any]:
    release = linked(root / "installed" / name)
    folder = root / "releases" / (release or "none")
    plan, parts = read_json(folder / "plan.json") or {}, read_json(folder / "release.json") or {}
    entered = int(seen.get("ActiveEnterTimestampMonotonic") or 0) / 1e6
    active = seen.get("ActiveState") or "unknown"
    record = read_json(root / "applied" / "{0}.json".format(name)) or {}
    return {
        "unit": path.name,
        "installed": checksum(path),
        "applied": checksum(root / "applied" / path.name),
        "key_id": key_id(path),
        "release": release,
        "served": record.get("release"),
        "active": active,
        "up_seconds": round(time.monotonic() - entered, 1) if active == "active" and entered else None,
        "restarts": int(seen.get("NRestarts") or 0),
        "measured": record.get("measured"),
        "replica": next((entry for entry in plan.get("replicas", []) if entry["name"] == name), None),
        "model": plan.get("model"),
        "vllm_version": plan.get("vllm_version"),
        "runtime": parts.get("runtime"),
        "weights": parts.get("weights"),
    }
