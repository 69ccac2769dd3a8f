"""The recipe's `checkpoint` block: when checkpoints are written, and which are kept."""

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from sparkring.conf.schema import Strict


class CheckpointConfig(Strict):
    """Triggers add up: a checkpoint is written when any of them is due, when training ends, and on SIGTERM."""

    every_steps: PositiveInt | None = Field(None, description="steps between checkpoints; None: not by steps")
    every_s: PositiveFloat | None = Field(300.0, description="seconds of training between checkpoints")
    on_improvement: bool = Field(True, description="also when train.best_metric improves at an evaluation")
    keep_last: PositiveInt = Field(2, description="newest checkpoints that stay")
    keep_best: Annotated[int, Field(ge=0)] = Field(1, description="by train.best_metric and train.best_mode")
    keep_every: PositiveInt | None = Field(None, description="keep for ever those whose step is a multiple of this")
    asynchronous: bool = Field(True, description="write behind training, which stalls only for the copy to host memory")
    verify: bool = Field(True, description="check the hash of every file before loading")
    resume: bool = Field(
        True,
        description="continue the newest unfinished run of the same training; false: begin a run folder of its own, in "
        "which a failed attempt is still followed by one from its last checkpoint",
    )
    allow_other_order: bool = Field(
        False,
        description="where no unfinished run is the same training, continue the newest one although its dataset or "
        "settings that decide the model were others",
    )
    timeout_s: PositiveFloat = Field(600.0, description="how long a rank waits for the others to write their parts")
