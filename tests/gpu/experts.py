#!/usr/bin/env python3
"""Time vLLM's Triton experts under several tile settings: run with the runtime's Python, prints JSON.

vLLM brings tile settings tuned per GPU, number of experts and width, and falls back to a general rule where it has none
for the pair. This says, per batch size, what another GPU's or another width's settings would give.

Usage: experts.py --experts 256 --width 384 --hidden 3072 --top-k 8 NAME=FILE...
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import override_config
from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts, get_default_config

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = [128, 128]
DRAWS = 16  # choices of experts in turn, so that no weights stay in the cache between two
REPLAYS = 10


def quantized(*shape: int) -> torch.Tensor:
    """Random FP8 weights, made expert by expert to spare memory."""
    made = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    for part in made:
        part.copy_(torch.randn(part.shape, device="cuda") * 8)
    return made


def microseconds(work: Callable[[int], object]) -> float:
    """One call's time inside a CUDA graph of DRAWS calls: median of the replays."""
    for draw in range(2):
        work(draw)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for draw in range(DRAWS):
            work(draw)
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end) / DRAWS)
    return round(statistics.median(times), 1)


def main() -> None:
    """Time every batch size under every setting; equal settings are timed once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("experts", "width", "hidden", "top-k"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--batches", default="1,8,32,64,128,256,1024,4096,8192")
    parser.add_argument("files", nargs="*", metavar="NAME=FILE")
    options = parser.parse_args()
    experts, width, hidden, top_k = options.experts, options.width, options.hidden, options.top_k
    settings: dict[str, dict[int, dict[str, Any]]] = {}
    for text in options.files:
        name, _, file = text.partition("=")
        settings[name] = {int(k): v for k, v in json.loads(Path(file).read_text()).items() if k.isdigit()}

    first, second = quantized(experts, 2 * width, hidden), quantized(experts, hidden, width)
    scales = [
        torch.rand(experts, rows // BLOCK[0], columns // BLOCK[1], device="cuda") / 100
        for rows, columns in ((2 * width, hidden), (hidden, width))
    ]
    quantization = fp8_w8a8_moe_quant_config(w1_scale=scales[0], w2_scale=scales[1], block_shape=BLOCK)

    def compute(states: torch.Tensor, weights: torch.Tensor, chosen: list[torch.Tensor], draw: int) -> torch.Tensor:
        return fused_experts(states, first, second, weights, chosen[draw], quant_config=quantization)

    result: dict[str, dict[str, Any]] = {}
    for batch in map(int, options.batches.split(",")):
        states = torch.randn(batch, hidden, dtype=torch.bfloat16, device="cuda")
        chosen = [torch.rand(batch, experts, device="cuda").topk(top_k)[1].int() for _ in range(DRAWS)]
        weights = torch.full((batch, top_k), 1 / top_k, device="cuda")
        asked = {"default": get_default_config(batch, experts, width, hidden, top_k, "fp8_w8a8", BLOCK)}
        asked |= {name: table[min(table, key=lambda size: abs(size - batch))] for name, table in settings.items()}
        timed: dict[str, float] = {}
        result[str(batch)] = {}
        for name, setting in asked.items():
            key = json.dumps({k: v for k, v in setting.items() if k != "SPLIT_K"}, sort_keys=True)
            if key not in timed:
                with override_config({"SPLIT_K": 1, **setting}):
                    timed[key] = microseconds(partial(compute, states, weights, chosen))
            result[str(batch)][name] = timed[key]
        sys.stderr.write(f"{batch} {json.dumps(result[str(batch)])}\n")
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    with set_current_vllm_config(VllmConfig()):
        main()
