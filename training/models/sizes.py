"""Arguments of `GPT` at published sizes: one place for recipes, the planner's tests and the GPU benchmark."""

from __future__ import annotations

from typing import Any

GPT_SIZES: dict[str, dict[str, Any]] = {
    # GPT-2 small (Radford et al. 2019), with SwiGLU of equal size and the vocabulary padded to a multiple of 64
    "124M": {"vocab": 50304, "width": 768, "layers": 12, "heads": 12, "hidden": 2048, "tied": True},
    # GPT-3 XL (https://arxiv.org/abs/2005.14165, table 2.1)
    "1.3B": {"vocab": 50304, "width": 2048, "layers": 24, "heads": 16, "hidden": 5504, "tied": True},
    # Llama 2 7B and 70B (https://arxiv.org/abs/2307.09288)
    "7B": {"vocab": 32000, "width": 4096, "layers": 32, "heads": 32, "hidden": 11008, "tied": False},
    "70B": {"vocab": 32000, "width": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "hidden": 28672, "tied": False},
}
