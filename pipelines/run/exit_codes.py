"""Exit codes, in one place. A scheduler can tell what to do from the number alone.

The comments are the meanings on the reference page of exit codes (docs/generator).
"""

from __future__ import annotations

from enum import IntEnum

RESULT_LOG = "sparkring.result"  # logger of what a job gives, which the command line writes to standard output


class Exit(IntEnum):
    OK = 0  # done
    BUG = 1  # an unexpected error; its traceback is printed; of `status`, the newest success is older than `--max-age`
    USAGE = 2  # the command line or the configuration is wrong; nothing was trained (of `run`, what only the columns of
    # a built dataset can show is found after the ETL)
    DATA = 3  # source tables, checks, the dataset or its drift (`drift` with the action stop), or of `reproduce` what
    # differs; nothing was trained; of `audit` and `replay-log`, what they found is not what should be
    TRAINING = 4  # a training process failed, and no attempt was left
    RESOURCES = 5  # the cluster cannot give what was asked, storage is full, read-only or cannot be made, the same run
    # is being trained already, `replay` reaches no store, or `gc` cannot delete or ask MLflow
    QUALITY = 6  # trained, tracked and registered, but the alias has not moved: worse than a baseline in a metric of
    # `report.must_beat`, or a baseline could not be computed; not certainly better than a constant guess; or rejected
    # or held by `promote` or `drift`; of `reproduce`, trained again and not equal; of `serve-check` and `export`, a
    # prediction differs
    TRY_LATER = 75  # another job has the date, its interval has not ended, or what it waits for is not there;
    # nothing is wrong with the command
    INTERRUPTED = 130  # Ctrl-C; where training had begun a checkpoint was written first, if a step and it fit into
    # `launch.grace_s`
    PIPE = 141  # what read the output, such as `head`, ended first; nothing is wrong
    TERMINATED = 143  # SIGTERM or SIGHUP; where training had begun a checkpoint was written first, as for Ctrl-C

    @property
    def is_quiet(self) -> bool:
        """Nobody is notified: another process has the work, or a person ended it."""
        return self in (Exit.TRY_LATER, Exit.INTERRUPTED, Exit.PIPE)

    @property
    def has_trained(self) -> bool:
        """A model was trained and tracked, promoted or not."""
        return self in (Exit.OK, Exit.QUALITY)

    @property
    def lets_next_date_run(self) -> bool:
        """A backfill continues: the dates after one that ended so may succeed."""
        return self.has_trained or self in (Exit.DATA, Exit.TRAINING)
