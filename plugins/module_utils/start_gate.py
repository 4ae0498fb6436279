"""Decides whether a replica may start: run as root before each start of its unit, and the reason when it may not.

It looks at what makes a start fail, or succeed and break later: GPUs that are missing or failing, a recent Xid, memory
that another process holds, /dev/shm, the caches' disk, the weights, the port. What a dead unit of ours left behind is
ended first: processes of the engines' user that belong to no live unit, and their shared memory. Whatever else is in
the way is named, with process, user and size, and never touched.

The verdict is a file, `passed` or the reasons, and not the exit status: systemd would start the unit again and again
when `ExecStartPre=` fails, while what `start-engine` makes of the verdict ends the matter
(`RestartPreventExitStatus=`). What may pass by itself, such as memory that the driver is still freeing, is given a
minute.

Standard library, Python 3.9.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Optional

from .gpu_topology import parse_smi
from .host_probe import log_problems, read_kernel_log, smi_runner
from .listeners import listeners, unit_from_cgroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PASSED = "passed"
SMI_SECONDS = 60.0  # eight GPUs without persistence mode
LOG_SECONDS = 10.0
XID_SINCE = "1 hour ago"
PAUSE_SECONDS = 5.0
END_SECONDS = 10.0  # for a killed process to be gone

# A ring buffer between the engine's processes is 160 MiB, and the engine refuses to start without that much free (vLLM
# 0.32, shm_broadcast.py); ranks have one each way, and NCCL's buffers beside them.
SHM_MIB = 256
SHM_RANKS_MIB = 512
CACHE_MIB = 256  # compiled kernels of one release are some 100 MB

STALE_SECONDS = 600.0

SHM = "/dev/shm"  # noqa: S108  (not a temporary file: the folder itself is looked at)
MIB = 1 << 20


@dataclass(frozen=True)
class Finding:
    """Why a replica may not start.

    Attributes:
        code: A stable name, by which an inventory may accept it.
        message: What is wrong and what to do, in sentences.
        passing: Whether it may be over in a minute.
    """

    code: str
    message: str
    passing: bool = False


@dataclass(frozen=True)
class Process:
    """A process as procfs shows it."""

    pid: int
    program: str
    user: str
    unit: Optional[str]

    def __str__(self) -> str:
        """Say which it is, for a message."""
        return "process {0} ({1}) of {2}, {3}".format(self.pid, self.program, self.user, self.unit or "no unit")


# --- Processes -------------------------------------------------------------------------------------------------------


class Processes:
    """The processes of the host, and which of them a dead unit of ours left behind."""

    def __init__(self, user: str, unit: str, *, procfs_root: str = "/proc") -> None:
        """Look at procfs.

        Args:
            user: The engines' user.
            unit: The unit that is about to start.
            procfs_root: Where procfs is.
        """
        self._user = user
        self._procfs = Path(procfs_root)
        own = self.read(os.getpid())
        # Started by the unit itself, nothing else of it is meant to run yet; run by hand, it may well.
        self._starting = unit if own is not None and own.unit == unit else None
        self._live: dict[str, bool] = {}

    def read(self, pid: int) -> Optional[Process]:
        """One process; None when it is gone or already dead."""
        folder = self._procfs / str(pid)
        try:
            status = (folder / "status").read_text(encoding="utf-8", errors="replace")
            cgroup = (folder / "cgroup").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        values = dict(re.findall(r"^(\w+):\s*(\S+)", status, re.MULTILINE))
        if values.get("State", "Z") in ("Z", "X"):
            return None
        uid = values.get("Uid", "")
        user = uid
        with contextlib.suppress(KeyError, ValueError):
            user = pwd.getpwuid(int(uid)).pw_name
        return Process(pid, values.get("Name", ""), user, unit_from_cgroup(cgroup))

    def orphans(self) -> list[Process]:
        """Processes of the engines' user that belong to no live unit."""
        numbers = sorted(int(entry.name) for entry in self._procfs.iterdir() if entry.name.isdigit())
        return [process for process in map(self.read, numbers) if process and self.is_orphan(process)]

    def is_orphan(self, process: Process) -> bool:
        """Whether a process is what a dead unit of ours left behind."""
        return process.user == self._user and (process.unit in (None, self._starting) or not self._lives(process.unit))

    def _lives(self, unit: Optional[str]) -> bool:
        """Whether systemd runs a unit; in doubt it does."""
        if unit not in self._live:
            self._live[str(unit)] = unit_state(str(unit)) not in ("inactive", "failed")
        return self._live[str(unit)]


def unit_state(unit: str) -> Optional[str]:
    """`ActiveState` of a unit; None when systemd does not answer."""
    command = ["systemctl", "show", "--property=ActiveState", "--value", "--", unit]
    try:
        shown = subprocess.run(command, check=True, capture_output=True, timeout=LOG_SECONDS, encoding="utf-8").stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.strip() or None


def end(processes: Processes, orphans: Sequence[Process], say: Callable[[str], None]) -> None:
    """Kill orphans and wait until they are gone, which is when their GPU memory is freed."""
    for orphan in orphans:
        say("ending {0}: a dead unit left it behind".format(orphan))
        with contextlib.suppress(ProcessLookupError):
            os.kill(orphan.pid, signal.SIGKILL)
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline and any(processes.read(orphan.pid) == orphan for orphan in orphans):
        time.sleep(0.1)


def stale_segments(uid: int, *, shm: str = SHM, procfs_root: str = "/proc") -> list[Path]:
    """Files of shared memory of the engines' user that no process has mapped or open.

    Young ones are left: a live engine may have made them for a process that is still to open them.
    """
    own = []
    for path in Path(shm).iterdir():
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == uid and path.is_file() and time.time() - status.st_mtime > STALE_SECONDS:
                own.append(path)
    used = _open_files(procfs_root) if own else set()
    return sorted(path for path in own if str(path) not in used)


def _open_files(procfs_root: str) -> set[str]:
    """Paths that any process has mapped or open."""
    used: set[str] = set()
    for process in (entry for entry in Path(procfs_root).iterdir() if entry.name.isdigit()):
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text(encoding="utf-8", errors="replace")
            used.update(re.findall(r" (/\S+)$", maps, re.MULTILINE))
        with contextlib.suppress(OSError):
            for entry in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    used.add(str(entry.readlink()))
    return used


# --- Checks: each takes what was read, and says what is in the way --------------------------------------------------


def gpu_findings(replica: Mapping[str, Any], smi: Mapping[str, Any]) -> list[Finding]:
    """The planned GPUs are there, and the driver reports no failure of theirs.

    Args:
        replica: The replica in the plan.
        smi: What `parse_smi` made of `nvidia-smi -q -x`.
    """
    gpus = _by_uuid(smi)
    missing = [uuid for uuid in replica["gpus"] if uuid not in gpus]
    if missing:
        errors = "".join(" " + entry["message"] for entry in smi["problems"] if entry["severity"] == "error")
        return [
            Finding(
                "gpu_missing",
                "nvidia-smi lists {0} GPUs, and not {1}, which this replica is planned for.{2} Look for it in the "
                "kernel log (NVRM), reset or reboot; if the card was replaced, deploy again to plan anew.".format(
                    len(smi["gpus"]), ", ".join(missing), errors
                ),
                passing=True,  # the driver may still be loading
            )
        ]
    return [
        Finding(entry["code"], "{0} {1}".format(entry["message"], entry["remedy"]))
        for uuid in replica["gpus"]
        for entry in gpus[uuid]["problems"]
        if entry["severity"] == "error"
    ]


def xid_findings(replica: Mapping[str, Any], smi: Mapping[str, Any], kernel_log: Optional[str]) -> list[Finding]:
    """The kernel log of the last hour has no Xid of the planned GPUs that means failing hardware."""
    gpus = _by_uuid(smi)
    places = {gpus[uuid]["pci_bus_id"] for uuid in replica["gpus"] if uuid in gpus}
    return [
        Finding(entry["code"], "{0} {1}".format(entry["message"], entry["remedy"]))
        for entry in (log_problems(kernel_log) if kernel_log is not None else [])
        if entry["severity"] == "error" and entry.get("pci_bus_id") in places
    ]


def memory_findings(
    replica: Mapping[str, Any], smi: Mapping[str, Any], holder: Callable[[int], Optional[Process]]
) -> list[Finding]:
    """Each planned GPU has the memory free that the engine will claim.

    Memory of the unit that is about to start counts as free: nothing of it is meant to run, and what still does is
    being ended.

    Args:
        replica: The replica in the plan.
        smi: What `parse_smi` made of `nvidia-smi -q -x`.
        holder: A process by its number, None where it is gone or our own.
    """
    expected, fraction = replica["expected"], replica["gpu_memory_utilization"]
    found = []
    for uuid, gpu in ((uuid, _by_uuid(smi).get(uuid)) for uuid in replica["gpus"]):
        if gpu is None or gpu["memory_total_mib"] is None or gpu["memory_used_mib"] is None:
            continue  # a slice of a GPU, or memory shared with the CPU: its use cannot be told apart
        usable = gpu["memory_total_mib"] - (gpu["memory_reserved_mib"] or 0)
        if fraction is None:
            needed = 1024 * sum(expected[part] for part in ("weights_gib", "overhead_gib", "kv_cache_gib"))
        else:
            needed = fraction * usable
        holders = [(holder(entry["pid"]), entry["memory_mib"]) for entry in gpu["holders"]]
        own = sum(mib or 0 for process, mib in holders if process is None)
        free = usable - gpu["memory_used_mib"] + own
        if free < needed:
            others = ["{0}: {1} MiB".format(process, mib) for process, mib in holders if process is not None]
            found.append(
                Finding(
                    "memory_held",
                    "GPU {0} has {1} MiB free, and this replica claims {2:.0f} of {3}. Held by {4}. Stop that, or "
                    "leave the GPU to it with the planner's option exclude_gpus.".format(
                        uuid, free, needed, usable, "; ".join(others) or "nobody that nvidia-smi shows"
                    ),
                    passing=True,
                )
            )
    return found


def space_findings(ranks: int, cache: str, *, shm: str = SHM) -> list[Finding]:
    """Shared memory and the caches' file system have room.

    Args:
        ranks: GPUs of the replica.
        cache: Folder of compiled kernels.
        shm: Where shared memory is.
    """
    found = []
    for code, folder, needed, remedy in (
        ("shm_full", shm, SHM_RANKS_MIB if ranks > 1 else SHM_MIB, "Remove what fills it (`ls -l {0}`), or enlarge it"),
        ("cache_full", cache, CACHE_MIB, "Make room on that file system (`df {0}`)"),
    ):
        free = shutil.disk_usage(folder).free // MIB
        if free < needed:
            message = "{0} has {1} MiB free, and a start takes up to {2}. {3}.".format(
                folder, free, needed, remedy.format(folder)
            )
            found.append(Finding(code, message, passing=True))
    return found


def weights_findings(folder: str, manifest: str) -> list[Finding]:
    """The weights are those that were verified: the manifest's sizes and times, or without one every named file.

    Args:
        folder: The model's files.
        manifest: JSON with `files`: {name: {"size": bytes, "mtime_ns": ...}}; it need not exist.
    """
    wrong = _unlike_manifest(Path(folder), Path(manifest)) if Path(manifest).exists() else _incomplete(Path(folder))
    if not wrong:
        return []
    more = " and {0} more".format(len(wrong) - 3) if len(wrong) > 3 else ""  # noqa: PLR2004  (three are enough to see)
    return [
        Finding(
            "weights_invalid",
            "The weights in {0} are not whole: {1}{2}. Deploy again, which brings what is missing or changed.".format(
                folder, "; ".join(wrong[:3]), more
            ),
        )
    ]


def _unlike_manifest(folder: Path, manifest: Path) -> list[str]:
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        wanted = [(name, entry["size"], entry.get("mtime_ns")) for name, entry in sorted(files.items())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return ["the manifest {0} cannot be read ({1!r})".format(manifest, error)]
    wrong = []
    for name, size, mtime_ns in wanted:
        try:
            found = (folder / name).stat()
        except OSError as error:
            wrong.append("{0}: {1}".format(name, error.strerror))
            continue
        if found.st_size != size:
            wrong.append("{0} has {1} bytes instead of {2}".format(name, found.st_size, size))
        elif mtime_ns is not None and found.st_mtime_ns != mtime_ns:
            wrong.append("{0} was changed after it was verified".format(name))
    return wrong


def _incomplete(folder: Path) -> list[str]:
    names = {"config.json"}
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            names.update(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            return ["{0} cannot be read ({1!r})".format(index.name, error)]
    wrong = []
    for name in sorted(names):
        try:
            if (folder / name).stat().st_size == 0:
                wrong.append("{0} is empty".format(name))
        except OSError as error:
            wrong.append("{0}: {1}".format(name, error.strerror))
    return wrong


def port_findings(replica: Mapping[str, Any]) -> list[Finding]:
    """Nothing listens on the replica's port."""
    return [
        Finding(
            "port_taken",
            "Port {0} is taken by {1} (process {2}, {3}). Stop it, or deploy with another vllm_plan_first_port.".format(
                entry["port"], entry["program"] or "a program", entry["pid"] or "unknown", entry["unit"] or "no unit"
            ),
            passing=True,
        )
        for entry in listeners([replica["port"]])
    ]


def _by_uuid(smi: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """GPUs by UUID, and slices of one by theirs: a slice is as healthy as its GPU, and its memory is its own matter."""
    found: dict[str, Mapping[str, Any]] = {}
    for gpu in smi["gpus"]:
        found[gpu["uuid"]] = gpu
        for instance in gpu["mig"]["instances"]:
            found[instance["uuid"]] = {**gpu, "memory_total_mib": None}
    return found


# --- The gate --------------------------------------------------------------------------------------------------------


def examine(given: argparse.Namespace, replica: Mapping[str, Any], say: Callable[[str], None]) -> list[Finding]:
    """Clear away what is ours and dead, and look at all that a start needs."""
    processes = Processes(given.user, replica["unit"])
    end(processes, processes.orphans(), say)
    for path in stale_segments(pwd.getpwnam(given.user).pw_uid):
        say("removing {0}: a dead unit left it behind".format(path))
        path.unlink(missing_ok=True)

    smi = parse_smi(smi_runner(given.nvidia_smi, SMI_SECONDS)(["-q", "-x"]).text)

    def holder(pid: int) -> Optional[Process]:
        process = processes.read(pid)
        return None if process is None or process.unit == replica["unit"] or processes.is_orphan(process) else process

    found = gpu_findings(replica, smi)
    found += xid_findings(replica, smi, read_kernel_log(None, LOG_SECONDS, since=XID_SINCE))
    found += memory_findings(replica, smi, holder)
    found += space_findings(len(replica["gpus"]), given.cache)
    found += weights_findings(given.weights, given.manifest)
    found += port_findings(replica)
    return [finding for finding in found if finding.code not in given.accept]


def _make_device_nodes() -> None:
    """Have NVIDIA's helper load the module for CUDA and make its device nodes, which the engine has no right to."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(["nvidia-modprobe", "-u", "-c", "0"], check=False, timeout=LOG_SECONDS)


def _write(path: Path, text: str) -> None:
    """Replace the verdict, in a folder that only root writes to and everybody reads."""
    for folder in (path.parent.parent, path.parent):  # by parts: the unit's umask is for the engine's files
        if not folder.exists():
            folder.mkdir()
            folder.chmod(0o755)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text + "\n", encoding="utf-8")
    fresh.chmod(0o644)
    fresh.replace(path)


def _say(line: str) -> None:
    sys.stdout.write("start gate: {0}\n".format(line))
    sys.stdout.flush()


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Examine, and write the verdict: exit 0 when there is one, 2 for bad input."""
    parser = argparse.ArgumentParser(description="Decide whether a replica may start.")
    parser.add_argument("--plan", required=True, help="plan.json of the release that runs")
    parser.add_argument("--replica", required=True, help="its name in the plan")
    parser.add_argument("--verdict", required=True, type=Path, help="file to write it to, in a folder of root's")
    parser.add_argument("--user", required=True, help="the engines' user")
    parser.add_argument("--weights", required=True, help="folder of the model's files")
    parser.add_argument("--manifest", required=True, help="what was verified of them; need not exist")
    parser.add_argument("--cache", required=True, help="folder of compiled kernels")
    parser.add_argument("--nvidia-smi", default="nvidia-smi", help="program to ask for GPUs")
    parser.add_argument("--accept", action="append", default=[], help="code of a finding that is no reason to refuse")
    parser.add_argument("--wait-seconds", type=float, default=60.0, help="for what may pass by itself")
    given = parser.parse_args(argv)
    given.verdict.unlink(missing_ok=True)
    try:
        plan = json.loads(Path(given.plan).read_text(encoding="utf-8"))
        replica = next(entry for entry in plan["replicas"] if entry["name"] == given.replica)
    except (OSError, ValueError, KeyError, StopIteration) as error:
        sys.stderr.write("start gate: {0} does not name {1} ({2!r})\n".format(given.plan, given.replica, error))
        return 2
    if plan["accelerator"] == "cuda":
        _make_device_nodes()

    deadline = time.monotonic() + given.wait_seconds
    said: list[Finding] = []
    while True:
        found = examine(given, replica, _say)
        if not all(finding.passing for finding in found) or time.monotonic() > deadline or not found:
            break
        if found != said:
            _say("waiting up to {0:.0f} s: {1}".format(deadline - time.monotonic(), found[0].message))
            said = found
        time.sleep(PAUSE_SECONDS)
    for finding in found:
        _say("refused ({0}): {1}".format(finding.code, finding.message))
    if not found:
        _say(PASSED)
    _write(given.verdict, "\n".join(finding.message for finding in found) or PASSED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
