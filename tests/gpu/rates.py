#!/usr/bin/env python3
"""What a GPU really moves and computes, for the roofline: run with the runtime's Python, prints JSON.

Rates are medians of repeated runs on random data, since zeros multiply faster.
"""

from __future__ import annotations

import json
import statistics
import sys
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = 2**30
SIDE = 8192
REPEATS = 12


def milliseconds(work: Callable[[], object]) -> float:
    """Median of a few runs, after three to warm up."""
    for _ in range(3):
        work()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    """Measure copy, read, and the matrix rates of BF16 and FP8."""
    device = torch.device("cuda:0")
    properties = torch.cuda.get_device_properties(device)
    source = torch.randint(0, 2**31, (GIB,), dtype=torch.int32, device=device)  # 4 GiB, far beyond the cache
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    copied = 2 * size / milliseconds(partial(target.copy_, source)) / 1e6
    read = size / milliseconds(partial(torch.amax, source.view(torch.float32))) / 1e6
    del source, target
    left, right = (torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device=device) for _ in range(2))
    operations = 2 * SIDE**3
    bf16 = operations / milliseconds(partial(torch.matmul, left, right)) / 1e9
    small, other = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t().contiguous().t()
    one = torch.ones((), device=device)
    scaled = partial(torch._scaled_mm, small, other, one, one, out_dtype=torch.bfloat16)
    fp8 = operations / milliseconds(scaled) / 1e9
    json.dump(
        {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "cuda_total_gib": round(properties.total_memory / GIB, 3),
            "torch": torch.__version__,
            "copy_gb_s": round(copied),
            "read_gb_s": round(read),
            "bf16_tflops": round(bf16),
            "fp8_tflops": round(fp8),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
