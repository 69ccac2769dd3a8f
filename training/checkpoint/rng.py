"""The random state of one process, as plain data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture_rng() -> dict[str, Any]:
    """Return the states of torch (CPU, and this process's CUDA device once in use), numpy and `random`."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().copy(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().numpy().copy()
    return state


def checked_rng(state: dict[str, Any]) -> dict[str, Any]:
    """Check a captured state. ValueError if it cannot be restored, or numpy would read beyond its own state."""
    try:
        torch.Generator().set_state(torch.from_numpy(state["torch"]))
        random.Random().setstate(state["python"])
        if not 0 <= state["numpy"][2] <= 624:
            raise ValueError(f"numpy's position {state['numpy'][2]} is outside its 624 words")
        np.random.RandomState().set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.Generator("cuda").set_state(torch.from_numpy(state["cuda"]))
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"no random state ({type(error).__name__}: {error})") from error
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Set the random states of torch, numpy and `random` to the captured ones."""
    torch.set_rng_state(torch.from_numpy(state["torch"]))
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(state["cuda"]))
