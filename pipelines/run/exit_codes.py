"""Exit codes, in one place. A scheduler can tell what to do from the number alone; README lists the same table."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    OK = 0
    BUG = 1  # an unexpected error; its traceback is printed
    USAGE = 2  # the command line or the configuration is wrong; nothing was trained
    DATA = 3  # source tables, checks, the dataset, or its drift; nothing was trained
    TRAINING = 4  # a training process failed, and no attempt was left
    RESOURCES = 5  # the cluster or storage cannot give what was asked, or `replay` or `gc` reaches no store
    QUALITY = 6  # trained, tracked and registered; by report.must_beat, promote or drift the alias has not moved;
    # of `reproduce`: trained again, and what was compared is not equal; of `serve-check` and `export`: a prediction
    # differs
    TRY_LATER = 75  # another job has the date, or what it waits for is not there; nothing is wrong with the command
    INTERRUPTED = 130  # Ctrl-C
    PIPE = 141  # what read the output, such as `head`, ended first; nothing is wrong
    TERMINATED = 143  # SIGTERM; a checkpoint was written first where training had begun
