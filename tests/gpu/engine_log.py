"""What a vLLM engine says of itself while it starts, read from its log."""

from __future__ import annotations

import re

# Name, what the line says, how to read it. Of several lines the last counts, of several ranks the fullest.
_FIGURES = (
    ("version", r"Initializing a V1 LLM engine \(v([^)]+)\)", str),
    ("weights_gib", r"Model loading took ([\d.]+) GiB", float),
    ("load_seconds", r"Model loading took [\d.]+ GiB(?: memory)? and ([\d.]+) seconds", float),
    ("kv_cache_gib", r"Available KV cache memory: ([\d.]+) GiB", float),
    ("kv_cache_tokens", r"GPU KV cache size: ([\d,]+) tokens", lambda text: int(text.replace(",", ""))),
    ("full_length_requests", r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x", float),
    ("cuda_graphs_gib", r"Graph capturing finished in \d+ secs, took ([\d.]+) GiB", float),
    ("cuda_graphs_seconds", r"Graph capturing finished in (\d+) secs", float),
    ("compile_seconds", r"torch\.compile took ([\d.]+) s in total", float),
    ("init_seconds", r"init engine \([^)]*\) took ([\d.]+) s", float),
    ("moe_backend", r"Using (\S+) Fp8 MoE backend", str),
    ("linear_kernel", r"Selected (\S+) for Fp8LinearMethod", str),
    ("attention_backend", r"Using (\S+) attention backend", str),
)
_LEAST = {"kv_cache_gib", "kv_cache_tokens", "full_length_requests"}  # the fullest rank decides


def read(text: str) -> dict[str, str | int | float]:
    """Figures by name; what the log does not say is left out. GiB, seconds and tokens as the names say."""
    figures: dict[str, str | int | float] = {}
    for name, pattern, convert in _FIGURES:
        found = [convert(match) for match in re.findall(pattern, text)]
        if found:
            figures[name] = min(found) if name in _LEAST else found[-1]
    return figures


def complaints(text: str, most: int = 8) -> list[str]:
    """The lines that say what went wrong, without the stack's frames, the last ones."""
    wanted, other = re.compile(r"\b(?:\w*Error|ERROR|FATAL)\b"), re.compile(r' File "|\b(?:INFO|WARNING) \d\d-\d\d')
    lines = [line.strip()[:400] for line in text.splitlines() if wanted.search(line) and not other.search(line)]
    return list(dict.fromkeys(lines))[-most:]
