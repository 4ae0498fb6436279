"""A job's command line: `python3 -m weights.program fetch JOB.json`, `python3 -m weights.program serve SERVE.json`.

Run by systemd, and by hand where there is none. JOB.json holds the fields of `sources.Job`; how far it is stands in
status.json beside it. It ends with 1, and one paragraph, when it cannot be done.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from . import peer
from .files import WeightsError
from .job import Report, run
from .sources import Job


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Run one command; returns the exit status."""
    if len(arguments) != 2 or arguments[0] not in ("fetch", "serve"):  # noqa: PLR2004
        sys.stderr.write(f"{__doc__}\n")
        return 2
    path = Path(arguments[1])
    options = json.loads(path.read_text(encoding="utf-8"))
    if arguments[0] == "serve":
        peer.serve(**options)
        return 0
    report = Report(path.with_name("status.json"), _say)
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    token_file = Path(credentials) / "hub-token" if credentials else None
    os.environ.update(options.get("environment", {}))  # proxies, for our own questions too
    try:
        run(
            Job(**options),
            report,
            token_file=token_file if token_file and token_file.exists() else None,
            home=path.parent,
        )
    except WeightsError as error:
        report.step("failed", f"Failed: {error}", message=str(error))
        return 1
    except OSError as error:  # such as a disk that is full
        message = f"{options['folder']}: {error}. What was verified is kept; mend that, and deploy again."
        report.step("failed", f"Failed: {message}", message=message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
