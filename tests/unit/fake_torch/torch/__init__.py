"""A torch with as many GPUs as FAKE_GPUS says, whose transfers fail as FAKE_FAULT says.

Tensors are arrays in host memory with a device's name on them. FAKE_FAULT is "KIND WHERE ONE OTHER": KIND is hang,
corrupt, die or oom, WHERE is copy, all_reduce or host, and ONE and OTHER are the indices of the GPUs (OTHER is "-" for
host). NCCL_P2P_DISABLE=1 mends an all_reduce, as it does where only peer-to-peer is broken.
"""

import array
import os
import random
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any, Self

int32 = "int32"
version = SimpleNamespace(cuda=os.environ.get("FAKE_CUDA", "13.0") or None)
_GPUS = int(os.environ.get("FAKE_GPUS", "0"))
_FAULT = os.environ.get("FAKE_FAULT", "").split()


def _fault(where: str, *devices: str) -> bool:
    """Do what is asked for at this place; true when the data is to arrive wrong."""
    if not _FAULT or _FAULT[1] != where:
        return False
    indices = {device.removeprefix("cuda:") for device in devices if device.startswith("cuda")}
    if indices != set(_FAULT[2:]) - {"-"}:
        return False
    if _FAULT[0] == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])  # only SIGKILL ends it
        time.sleep(600)
    if _FAULT[0] == "die":
        os.kill(os.getpid(), signal.SIGBUS)
    if _FAULT[0] == "oom":
        raise RuntimeError("CUDA out of memory. Tried to allocate 64.00 MiB.")
    return True


class Tensor:
    def __init__(self, numbers: array.array, device: str = "cpu") -> None:
        self.numbers, self.device = numbers, device

    def to(self, device: str) -> "Tensor":
        where = "host" if "cpu" in (self.device, device) else "copy"
        moved = Tensor(self.numbers[:], device)
        if _fault(where, self.device, device):
            moved.numbers[7] ^= 1
        return moved

    def cpu(self) -> "Tensor":
        return Tensor(self.numbers[:])

    def copy_(self, source: "Tensor", **_: Any) -> Self:
        if not _fault("copy", source.device, self.device):  # a wrong copy moves nothing, and says nothing
            self.numbers[:] = source.numbers
        return self

    def __add__(self, other: "Tensor") -> "Tensor":
        return Tensor(array.array("i", map(sum, zip(self.numbers, other.numbers, strict=True))))


class Generator:
    def manual_seed(self, seed: int) -> Self:
        self.random = random.Random(seed)  # noqa: S311  (patterns, not secrets)
        return self


def randint(high: int, shape: tuple[int], *, generator: Generator, **_: Any) -> Tensor:
    numbers = array.array("i")
    numbers.frombytes(generator.random.randbytes(4 * shape[0]))
    return Tensor(array.array("i", (number & (high - 1) for number in numbers)))


def full(shape: tuple[int], value: int, *, device: str, **_: Any) -> Tensor:
    return Tensor(array.array("i", [value]) * shape[0], device)


def equal(one: Tensor, other: Tensor) -> bool:
    return one.numbers == other.numbers


def _all_reduce(parts: list[Tensor]) -> None:
    mended = os.environ.get("NCCL_P2P_DISABLE") == "1"
    wrong = not mended and _fault("all_reduce", *(part.device for part in parts))
    total = parts[0] + parts[1]
    for part in parts:
        part.numbers[:] = total.numbers
    if wrong:
        parts[0].numbers[0] ^= 1


def _may_access(one: str, other: str) -> bool:
    return f"{one[-1]}{other[-1]}" not in os.environ.get("FAKE_NO_ACCESS", "").split()


cuda = SimpleNamespace(
    is_available=lambda: _GPUS > 0,
    device_count=lambda: _GPUS,
    get_device_capability=lambda _: (12, 0),
    can_device_access_peer=_may_access,
    synchronize=lambda _: None,
    nccl=SimpleNamespace(all_reduce=_all_reduce),
)

sys.stdout.write("a library that prints\n")
