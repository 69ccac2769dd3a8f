def progress(step: int, phase: str = "step") -> bool:
    """Report, in a plain script in a rank, that `step` is reached; see sparkring.training.launch.host.rank.progress."""
    from sparkring.training.launch.host import (
        rank,  # only here: an import of another part of this package need not load it
    )

    return rank.progress(step, phase)
