"""What only a real transfer, a real build and a real read show of a GPU host. Prints one JSON object.

    gpu_checks.py p2p             copies and reductions between every pair of GPUs, and through host memory
    gpu_checks.py kernel-build    compiles a kernel as the engine does at its first start, and runs it on every GPU
    gpu_checks.py disk --folder F how fast a file in that folder is read

The first two need the engine's own Python, for its torch. Each step runs in a process of its own and has a deadline: a
transfer that hangs is killed and named, so this ends whatever the hardware does. The result is `{"verdict": "ok" |
"broken" | "untested", "detail": "..."}`: `untested` when there was nothing to try, `broken` when something was tried
and went wrong. `disk` prints `{"read_mib_s": ..., "detail": "..."}`.

Runs on target hosts without the rest of this package: one file, standard library, Python 3.9.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import itertools
import json
import mmap
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Optional, Sequence

__all__ = ["Limits", "check_disk", "check_kernel_build", "check_p2p", "supervise"]

_EVENT = "@check "  # starts each line that a child says to its parent; libraries print there too
_MIB = 1 << 20


class Limits(NamedTuple):
    """Deadlines in seconds: to come up (torch, driver, contexts), for one step, and for all."""

    start_seconds: float = 180
    step_seconds: float = 30
    total_seconds: float = 600


class Outcome(NamedTuple):
    """How a supervised child ended.

    `events` is what it said; `hung` the step it was killed in; `error` the last line of its standard error when it died
    by itself; `stuck` its process id when not even SIGKILL ended it.
    """

    events: list[dict[str, Any]]
    hung: Optional[str] = None
    error: Optional[str] = None
    stuck: Optional[int] = None


# --- a child with deadlines -----------------------------------------------------------------------------------------


def supervise(command: Sequence[str], limits: Limits, env: Optional[dict[str, str]] = None) -> Outcome:
    """Run a child that tells each step before it takes it; kill it, with all it started, when one takes too long.

    The child prints lines of `_EVENT` and a JSON object. One with `step` opens a step, one with `ready` the first
    after its start; the deadline of a step runs until the next event.
    """
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        lines: queue.Queue[Optional[str]] = queue.Queue()
        threading.Thread(target=_read_lines, args=(process, lines), daemon=True).start()
        events: list[dict[str, Any]] = []
        step, end = "its start", time.monotonic() + limits.total_seconds
        deadline = time.monotonic() + limits.start_seconds
        while True:
            try:
                line = lines.get(timeout=max(0.0, min(deadline, end) - time.monotonic()))
            except queue.Empty:
                return Outcome(events, hung=step, stuck=_kill(process))
            if line is None:
                break
            event = _event(line)
            if event is None:
                continue
            events.append(event)
            step = str(event.get("step", step))
            deadline = time.monotonic() + limits.step_seconds
        code = process.wait()
        if code == 0:
            return Outcome(events)
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace").strip().splitlines()
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Outcome(events, error=f"{said[-1].strip()[:300] if said else 'no message'} ({ended}, in {step})")


def _read_lines(process: subprocess.Popen[bytes], lines: queue.Queue[Optional[str]]) -> None:
    for line in process.stdout or ():
        lines.put(line.decode("utf-8", "replace"))
    lines.put(None)


def _event(line: str) -> Optional[dict[str, Any]]:
    if not line.startswith(_EVENT):
        return None
    try:
        event = json.loads(line[len(_EVENT) :])
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _kill(process: subprocess.Popen[bytes]) -> Optional[int]:
    """End a child and all it started; its id when it does not end, as a process stuck in the driver does not."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        return process.pid
    return None


def _child(*arguments: str) -> list[str]:
    return [sys.executable, "-u", str(Path(__file__).resolve()), *arguments]


def _say(**event: Any) -> None:
    sys.stdout.write(f"{_EVENT}{json.dumps(event)}\n")
    sys.stdout.flush()


def _verdict(verdict: str, detail: str, **more: Any) -> dict[str, Any]:
    return {"verdict": verdict, "detail": detail, **more}


# --- peer to peer ---------------------------------------------------------------------------------------------------

# A wedged GPU stays busy after its process is gone (https://github.com/local-inference-lab/rtx6kpro/issues/15).
_WEDGED = "These GPUs may stay busy until they are reset (nvidia-smi --gpu-reset) or the host is rebooted."


def check_p2p(devices: Sequence[str], names: Sequence[str], limits: Limits, mib: int, rounds: int) -> dict[str, Any]:
    """Move data between every pair of GPUs and compare what arrives.

    Per pair: a copy each way, both at once, and a reduction by NCCL, which moves data by loads and stores of its
    kernels rather than by a copy engine; what a pair says of its abilities is not believed. After a hang nothing more
    is tried, since the GPUs are in no known state. The way through host memory, to which NCCL is then sent, is tried
    apart.

    Args:
        devices: As torch names them; empty for every GPU that CUDA shows. `cpu` twice tries this check itself.
        names: What to call them in the result, in the same order; empty for the devices' own names.
        limits: The deadlines.
        mib: Size of a transfer.
        rounds: How often each is repeated.

    Returns:
        The verdict, `pairs` (how many moved data rightly), and `fallback`, the verdict on the way through host memory.
    """
    if len(devices) == 1:
        return _verdict("untested", "one GPU: there is no other to talk to", pairs=0, fallback=None)
    command = _child("p2p-child", f"--mib={mib}", f"--rounds={rounds}")
    command += [f"--device={device}" for device in devices] + [f"--name={name}" for name in names]
    peer = supervise([*command, "--over=peer"], limits, {"NCCL_P2P_DISABLE": "0"})
    result = _judge(peer)
    if result["verdict"] == "untested" or any(event.get("failed") == "host" for event in peer.events):
        return {**result, "fallback": None}
    host = _judge(supervise([*command, "--over=host"], limits, {"NCCL_P2P_DISABLE": "1"}))
    fallback = _verdict(host["verdict"], host["detail"])
    return {**result, "fallback": fallback}


def _judge(outcome: Outcome) -> dict[str, Any]:
    """One verdict from what a child said and how it ended."""
    events = outcome.events
    right = sum("pair_ok" in event for event in events)
    wrong = [str(event["wrong"]) for event in events if "wrong" in event]
    without = [str(event["no_access"]) for event in events if "no_access" in event]
    if not any("ready" in event for event in events):
        why = outcome.error or f"no answer in time{_stuck(outcome)}"
        return _verdict("untested", f"torch or the driver did not come up: {why}", pairs=0)
    if outcome.hung is not None:
        wrong.append(f"{outcome.hung} hung and was killed{_stuck(outcome)}. {_WEDGED}")
    elif outcome.error is not None:
        if re.search(r"out of memory", outcome.error, re.IGNORECASE):
            return _verdict("untested", f"the GPUs' memory is in use: {outcome.error}", pairs=right)
        wrong.append(outcome.error)
    few = next((str(event["nothing"]) for event in events if "nothing" in event), None)
    if wrong:
        return _verdict("broken", "; ".join(wrong), pairs=right)
    if few is not None:
        return _verdict("untested", few, pairs=0)
    aside = f"; the driver offers no peer access between {', '.join(without)}" if without else ""
    if right == 0:
        return _verdict("untested", f"no pair could be tried{aside}", pairs=0)
    return _verdict("ok", f"{right} pairs moved data rightly{aside}", pairs=right)


def _stuck(outcome: Outcome) -> str:
    return "" if outcome.stuck is None else f", but process {outcome.stuck} does not end: reboot the host"


def _p2p_child(options: argparse.Namespace) -> None:
    torch = importlib.import_module("torch")
    devices = options.device or [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    names = options.name or devices
    _say(ready=len(devices))
    if len(devices) < 2:  # noqa: PLR2004  (a pair)
        few = "one GPU: there is no other to talk to" if devices else "CUDA shows no GPU here"
        _say(nothing=few)
        return
    bench = _Bench(torch, options.mib, options.rounds)
    for device, name in zip(devices, names):  # noqa: B905  (no `strict` in Python 3.9)
        _say(step=f"a transfer between {name} and host memory")
        if not bench.through_host(device):
            _say(wrong=f"data changed on its way between host memory and {name}", failed="host")
            return
    for (one, first), (other, second) in itertools.combinations(zip(devices, names), 2):  # noqa: B905
        pair = f"{first} and {second}"
        if options.over == "peer" and not bench.may_access(one, other):
            _say(no_access=pair)
            continue
        wrong = [what for what, moved in bench.between(one, other, pair, options.over) if not moved]
        _say(**({"wrong": f"data changed between {pair} ({', '.join(wrong)})"} if wrong else {"pair_ok": pair}))


class _Bench:
    """The transfers themselves. A pattern is used once, so what a buffer held before is never taken for what came."""

    def __init__(self, torch: Any, mib: int, rounds: int) -> None:
        self._torch = torch
        self._elements = mib * _MIB // 4
        self._rounds = rounds
        self._seed = 0

    def through_host(self, device: str) -> bool:
        return all(self._same(self._pattern(), lambda source: source.to(device)) for _ in range(self._rounds))

    def may_access(self, one: str, other: str) -> bool:
        cuda = self._torch.cuda
        return not one.startswith("cuda") or bool(
            cuda.can_device_access_peer(one, other) and cuda.can_device_access_peer(other, one)
        )

    def between(self, one: str, other: str, pair: str, over: str) -> Iterator[tuple[str, bool]]:
        """Each kind of transfer of a pair, told before it is tried, with whether the data arrived."""
        if over == "peer":
            _say(step=f"a copy between {pair}")
            yield "copy", all(self._copy(*way) for _ in range(self._rounds) for way in ((one, other), (other, one)))
            _say(step=f"copies both ways at once between {pair}")
            yield "both ways at once", all(self._exchange(one, other) for _ in range(self._rounds))
        if one.startswith("cuda"):
            _say(step=f"an NCCL all-reduce between {pair}")
            yield "all-reduce", all(self._all_reduce(one, other) for _ in range(self._rounds))
        elif over == "host":
            yield "through host memory", self.through_host(one) and self.through_host(other)

    def _copy(self, source: str, target: str) -> bool:
        return self._same(self._pattern(), lambda pattern: self._moved(pattern.to(source), target))

    def _exchange(self, one: str, other: str) -> bool:
        first, second = self._pattern(), self._pattern()
        there, back = first.to(one), second.to(other)
        arrived, returned = self._blank(other), self._blank(one)
        arrived.copy_(there, non_blocking=True)
        returned.copy_(back, non_blocking=True)
        self._wait(one, other)
        return bool(self._torch.equal(arrived.cpu(), first) and self._torch.equal(returned.cpu(), second))

    def _all_reduce(self, one: str, other: str) -> bool:
        first, second = self._pattern(), self._pattern()
        parts = [first.to(one), second.to(other)]
        self._torch.cuda.nccl.all_reduce(parts)
        self._wait(one, other)
        wanted = first + second
        return all(bool(self._torch.equal(part.cpu(), wanted)) for part in parts)

    def _moved(self, source: Any, target: str) -> Any:
        arrived = self._blank(target)
        arrived.copy_(source)
        self._wait(str(source.device), target)
        return arrived

    def _same(self, pattern: Any, move: Callable[[Any], Any]) -> bool:
        return bool(self._torch.equal(move(pattern).cpu(), pattern))

    def _pattern(self) -> Any:
        """Numbers that were not used before; two of them add up within 32 bits."""
        self._seed += 1
        generator = self._torch.Generator().manual_seed(self._seed)
        return self._torch.randint(1 << 30, (self._elements,), dtype=self._torch.int32, generator=generator)

    def _blank(self, device: str) -> Any:
        return self._torch.full((self._elements,), -1, dtype=self._torch.int32, device=device)

    def _wait(self, *devices: str) -> None:
        for device in devices:
            if device.startswith("cuda"):
                self._torch.cuda.synchronize(device)


# --- building a kernel ----------------------------------------------------------------------------------------------

# Adds two arrays on a device of the driver's runtime and counts the elements that came out wrong.
_KERNEL = r"""
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <vector>

__global__ void add(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = __bfloat162float(a[i]) + __bfloat162float(b[i]);
}

// The number of wrong elements, or minus the number of a CUDA error.
extern "C" int fleet_add(int device, int n) {
  int version = 0;
  if (cuDriverGetVersion(&version) != CUDA_SUCCESS) return -1;
  if (cudaError_t error = cudaSetDevice(device)) return -int(error);
  std::vector<__nv_bfloat16> a(n), b(n);
  std::vector<float> c(n);
  for (int i = 0; i < n; ++i) { a[i] = __float2bfloat16(i % 256); b[i] = __float2bfloat16(i % 64); }
  __nv_bfloat16 *da = nullptr, *db = nullptr;
  float* dc = nullptr;
  cudaMalloc(&da, n * 2); cudaMalloc(&db, n * 2); cudaMalloc(&dc, n * 4);
  cudaMemcpy(da, a.data(), n * 2, cudaMemcpyHostToDevice);
  cudaMemcpy(db, b.data(), n * 2, cudaMemcpyHostToDevice);
  add<<<(n + 255) / 256, 256>>>(da, db, dc, n);
  cudaMemcpy(c.data(), dc, n * 4, cudaMemcpyDeviceToHost);
  cudaFree(da); cudaFree(db); cudaFree(dc);
  if (cudaError_t error = cudaGetLastError()) return -int(error);
  int wrong = 0;
  for (int i = 0; i < n; ++i) wrong += c[i] != float(i % 256 + i % 64);
  return wrong;
}
"""

_TRITON_KERNEL = """
import triton
import triton.language as tl


@triton.jit
def add(a, b, c, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(c + i, tl.load(a + i, mask=i < n) + tl.load(b + i, mask=i < n), mask=i < n)
"""

_ARCHITECTURE_SPECIFIC_FROM = 9  # from Hopper on kernels use instructions of one architecture: sm_90a, sm_120a
_TOOLS = {
    "nvcc": "the CUDA compiler; cuda_toolkit puts it there",
    "ninja": "what FlashInfer builds with; it is in the engine's environment",
    "c++": "the host compiler; Debian's package is g++",
    "gcc": "what Triton builds its launchers with; Debian's package is gcc",
}
_ELEMENTS = 1 << 20


def check_kernel_build(cuda_home: str, capabilities: Sequence[str], limits: Limits) -> dict[str, Any]:
    """Compile and link a kernel with the commands that FlashInfer uses, then run it, and one of Triton's, on each GPU.

    Args:
        cuda_home: What the engine has as CUDA_HOME.
        capabilities: Compute capabilities to compile for ("12.0"); those of the GPUs are added where CUDA shows any.
        limits: The deadlines.

    Returns:
        The verdict; `untested` where it compiles and there is no GPU to run it on.
    """
    try:
        return _verdict("ok", _build_and_run(cuda_home, capabilities, limits))
    except _Ended as end:
        return _verdict(*end.args)


def _build_and_run(cuda_home: str, capabilities: Sequence[str], limits: Limits) -> str:
    home = _tools(cuda_home)
    release, present = _same_cuda(home, limits)
    targets = sorted({*capabilities, *present}, key=lambda text: [int(part) for part in text.split(".")])
    if not targets:
        raise _Ended("untested", "no GPU, and no compute capability to compile for was given")
    with tempfile.TemporaryDirectory(prefix="kernel-build.") as folder:
        _compile(home, targets, Path(folder), limits.step_seconds)
        built = f"nvcc {release} compiles and links for {', '.join(targets)}"
        if not present:
            raise _Ended("untested", f"{built}; CUDA shows no GPU to run it on")
        _run(built, Path(folder), limits)
    return f"{built}; it and Triton's ran on {len(present)} GPUs"


class _Ended(Exception):  # noqa: N818  (a verdict, which may be no error)
    """The check ends here: verdict and detail."""


def _tools(cuda_home: str) -> Path:
    home = Path(cuda_home)
    if not home.is_absolute() or not (home / "bin/nvcc").exists():
        raise _Ended("broken", f"CUDA_HOME is {cuda_home!r}, and there is no {home / 'bin/nvcc'}")
    missing = [f"{tool} ({what})" for tool, what in _TOOLS.items() if shutil.which(tool) is None]
    if missing:
        raise _Ended("broken", f"not in PATH ({os.environ.get('PATH')}): {', '.join(missing)}")
    return home


def _same_cuda(home: Path, limits: Limits) -> tuple[str, list[str]]:
    """The CUDA release, which nvcc and torch must share, and the compute capabilities of the GPUs."""
    outcome = supervise(_child("torch-child"), limits)
    facts = outcome.events[-1] if outcome.events else {}
    if "cuda" not in facts:
        raise _Ended("broken", f"the engine's torch does not come up: {outcome.error or 'no answer in time'}")
    told = subprocess.run([home / "bin/nvcc", "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"release (\d+\.\d+)", told)
    release = match[1] if match else "unknown"
    if facts["cuda"] not in (None, release):
        remedy = "take both from one lock, or set cuda_toolkit_version"
        raise _Ended("broken", f"nvcc is of CUDA {release}, torch's runtime of {facts['cuda']}: {remedy}")
    return release, list(facts["capabilities"])


def _run(built: str, folder: Path, limits: Limits) -> None:
    (folder / "triton_add.py").write_text(_TRITON_KERNEL, encoding="utf-8")
    env = {"TRITON_CACHE_DIR": str(folder / "triton")}
    outcome = supervise(_child("run-child", f"--folder={folder}"), limits, env)
    wrong = [str(event["wrong"]) for event in outcome.events if "wrong" in event]
    if outcome.hung is not None:
        wrong.append(f"{outcome.hung} hung and was killed{_stuck(outcome)}")
    if outcome.error is not None:
        wrong.append(outcome.error)
    if wrong:
        raise _Ended("broken", f"{built}, but: {'; '.join(wrong)}")


def _compile(home: Path, capabilities: Sequence[str], folder: Path, seconds: float) -> None:
    """Leave `kernel.so` in the folder."""
    source, compiled, library = (str(folder / f"kernel.{kind}") for kind in ("cu", "o", "so"))
    Path(source).write_text(_KERNEL, encoding="utf-8")
    targets = []
    for capability in capabilities:
        major, _, minor = capability.partition(".")
        name = f"{major}{minor}{'a' if int(major) >= _ARCHITECTURE_SPECIFIC_FROM else ''}"
        targets.append(f"-gencode=arch=compute_{name},code=sm_{name}")
    libraries = [f"-L{home}/lib64", f"-L{home}/lib64/stubs", "-lcudart", "-lcuda"]
    for command in (
        [str(home / "bin/nvcc"), "--compiler-options=-fPIC", *targets, "-c", source, "-o", compiled],
        ["c++", "-shared", compiled, *libraries, "-o", library],
    ):
        name = Path(command[0]).name
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", check=False, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            raise _Ended("broken", f"{name} took longer than {seconds:g} s") from None
        except OSError as error:
            raise _Ended("broken", f"{command[0]} does not start: {error}") from None
        if done.returncode != 0:
            said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            telling = [line for line in said if re.search(r"error|fatal|cannot|not found|denied", line)]
            raise _Ended("broken", f"{name} failed: {(telling or said or ['no message'])[0][:300]}")


def _torch_child(_options: argparse.Namespace) -> None:
    torch = importlib.import_module("torch")
    found = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    capabilities = [".".join(map(str, torch.cuda.get_device_capability(index))) for index in found]
    _say(ready=len(capabilities), cuda=torch.version.cuda, capabilities=capabilities)


def _run_child(options: argparse.Namespace) -> None:
    torch = importlib.import_module("torch")  # before the kernel: its CUDA runtime is the one that the kernel finds
    devices = range(torch.cuda.device_count())
    _say(ready=len(devices))
    _say(step="loading the compiled kernel")
    run = ctypes.CDLL(str(Path(options.folder, "kernel.so"))).fleet_add
    for device in devices:
        _say(step=f"the kernel on GPU {device}")
        wrong = run(device, _ELEMENTS)
        if wrong:
            said = f"CUDA error {-wrong}" if wrong < 0 else f"{wrong} of {_ELEMENTS} elements wrong"
            _say(wrong=f"the kernel on GPU {device}: {said}")
    sys.path.insert(0, options.folder)
    _say(step="loading Triton")
    kernel = importlib.import_module("triton_add")
    for device in devices:
        _say(step=f"Triton's kernel on GPU {device}")
        with torch.cuda.device(device):
            first, second = (torch.rand(_ELEMENTS, device="cuda") for _ in range(2))
            total = torch.empty_like(first)
            kernel.add[(_ELEMENTS // 1024,)](first, second, total, _ELEMENTS, BLOCK=1024)
            if not torch.equal(total, first + second):
                _say(wrong=f"Triton's kernel on GPU {device} came out wrong")


# --- disk -----------------------------------------------------------------------------------------------------------

_BLOCK = 8 * _MIB
_ROUND_TO = 2  # significant digits: start deadlines follow from this, and should not change with its noise


def check_disk(folder: str, seconds: float = 4, most_mib: int = 4096) -> dict[str, Any]:
    """Read from the disk that holds a folder, past the page cache, for a few seconds.

    The largest file there is read if it has 1 GiB at least; else one is written, with the same deadline, and removed.
    One stream reads, as the engine's loader does.

    Args:
        folder: A folder; where it does not exist yet, the one above it.
        seconds: How long to read at most, and to write.
        most_mib: How much to read at most.

    Returns:
        `read_mib_s`, rounded to two significant digits, or null with the reason in `detail`.
    """
    asked = place = Path(folder)
    while not place.is_dir() and place != place.parent:
        place = place.parent
    try:
        files = [path for path in asked.rglob("*") if path.is_file() and not path.is_symlink()]
        largest = max(files, key=lambda path: path.stat().st_size, default=None)
        if largest is not None and largest.stat().st_size >= 1024 * _MIB:
            return _read_speed(largest, seconds, most_mib)
        free_mib = shutil.disk_usage(place).free // _MIB
        if free_mib < 2 * most_mib:
            return {"read_mib_s": None, "detail": f"{place}: {free_mib} MiB free are too few to write a test file"}
        with tempfile.NamedTemporaryFile(dir=place, prefix=".read-speed.") as scratch:
            _write_noise(scratch.fileno(), seconds, most_mib)
            return _read_speed(Path(scratch.name), seconds, most_mib)
    except OSError as error:
        return {"read_mib_s": None, "detail": f"{place}: {error}"}


def _write_noise(file: int, seconds: float, most_mib: int) -> None:
    """Bytes that no file system compresses away: each block differs from the others."""
    noise = bytearray(os.urandom(_BLOCK))
    end = time.monotonic() + seconds
    for index in range(most_mib * _MIB // _BLOCK):
        noise[:8] = index.to_bytes(8, "little")
        noise[4096:4104] = os.urandom(8)
        os.write(file, noise)
        if time.monotonic() > end:
            break
    os.fsync(file)


def _read_speed(path: Path, seconds: float, most_mib: int) -> dict[str, Any]:
    how = "direct"
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system without direct I/O: drop what the page cache has of the file instead
        how, file = "after dropping its cache", os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        buffer = mmap.mmap(-1, _BLOCK)  # direct I/O asks for aligned memory
        read, start = 0, time.monotonic()
        while read < most_mib * _MIB and time.monotonic() - start < seconds:
            got = os.preadv(file, [buffer], read)
            read += got
            if got < _BLOCK:  # the end, which may not be aligned
                break
        took = time.monotonic() - start
    finally:
        os.close(file)
    speed = read / _MIB / took if took > 0 else 0.0
    rounded = float(f"{speed:.{_ROUND_TO}g}")
    return {
        "read_mib_s": rounded if rounded >= 1 else None,
        "detail": f"{read // _MIB} MiB of {path.parent} in {took:.1f} s, {how}",
    }


# --- command line ---------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Try what only the hardware can answer. Prints one JSON object.")
    commands = parser.add_subparsers(dest="command", required=True)
    limits = argparse.ArgumentParser(add_help=False)
    for name, default in Limits()._asdict().items():
        limits.add_argument(f"--{name.replace('_', '-')}", type=float, default=default, help="(default: %(default)s)")
    transfers = argparse.ArgumentParser(add_help=False)
    transfers.add_argument("--mib", type=int, default=64, help="size of a transfer (default: %(default)s)")
    transfers.add_argument("--rounds", type=int, default=3, help="repetitions of each (default: %(default)s)")
    transfers.add_argument("--device", action="append", default=[], help="cuda:0 and so on (default: every GPU)")
    transfers.add_argument("--name", action="append", default=[], help="what to call it, for each device in turn")

    p2p = commands.add_parser("p2p", parents=[limits, transfers], help="transfers between every pair of GPUs")
    p2p.set_defaults(
        run=lambda o: _print(check_p2p(o.device, o.name, _limits(o), o.mib, o.rounds)),
    )
    build = commands.add_parser("kernel-build", parents=[limits], help="compile a kernel and run it on every GPU")
    build.add_argument("--cuda-home", default=os.environ.get("CUDA_HOME", ""), help="(default: $CUDA_HOME)")
    build.add_argument("--capability", action="append", default=[], help="also compile for this one, such as 12.0")
    build.set_defaults(run=lambda o: _print(check_kernel_build(o.cuda_home, o.capability, _limits(o))))
    disk = commands.add_parser("disk", help="how fast a file is read")
    disk.add_argument("--folder", required=True)
    disk.add_argument("--seconds", type=float, default=4, help="(default: %(default)s)")
    disk.add_argument("--most-mib", type=int, default=4096, help="(default: %(default)s)")
    disk.set_defaults(run=lambda o: _print(check_disk(o.folder, o.seconds, o.most_mib)))

    # What a check starts of itself.
    child = commands.add_parser("p2p-child", parents=[transfers])
    child.add_argument("--over", choices=["peer", "host"], required=True)
    child.set_defaults(run=_p2p_child)
    commands.add_parser("torch-child").set_defaults(run=_torch_child)
    run = commands.add_parser("run-child")
    run.add_argument("--folder", required=True)
    run.set_defaults(run=_run_child)
    return parser


def _limits(options: argparse.Namespace) -> Limits:
    return Limits(options.start_seconds, options.step_seconds, options.total_seconds)


def _print(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.exit(1 if result.get("verdict") == "broken" else 0)


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Run one check. Exit code 1 when its verdict is `broken`."""
    options = _parser().parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
