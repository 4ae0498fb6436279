"""Where the engines' key is and must not be: argument lists, units, the release, the journal. Prints each place."""

import subprocess
from pathlib import Path

key = Path("/etc/vllm-fleet/engine.key").read_bytes().strip()
places = [*Path("/etc/systemd/system").glob("vllm-*"), *Path("/opt/vllm-fleet/current/").iterdir()]
for path in [*places, *Path("/proc").glob("[0-9]*/cmdline")]:
    try:
        if key in path.read_bytes():
            print(path)
    except OSError:  # the process ended
        continue
if key in subprocess.run(["journalctl", "--no-pager", "--output=cat"], check=True, capture_output=True).stdout:
    print("the journal")
