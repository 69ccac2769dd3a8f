def progress(step: int, phase: str = "step") -> bool:
    """For a plain script in a rank: `step` is reached; see training.launch.rank.progress."""
    from training.launch import rank  # only here: whoever imports a part of this package need not load it

    return rank.progress(step, phase)
