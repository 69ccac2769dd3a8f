"""Turn an error into one message and an exit code."""

from __future__ import annotations

import errno
import os
import re

from sparkring.conf.errors import ConfigError, first_line
from sparkring.conf.stored import StoredError
from sparkring.etl.errors import EtlError
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.signals import Stopped
from sparkring.pipelines.schedule.errors import TryLater
from sparkring.pipelines.tracking.errors import StoreUnreachable
from sparkring.training.launch.failure import Cancelled, LaunchError, WorkerFailed

EXITS: list[tuple[type[BaseException], Exit]] = [
    (ConfigError, Exit.USAGE),
    (StoredError, Exit.DATA),
    (EtlError, Exit.DATA),
    (WorkerFailed, Exit.TRAINING),
    (LaunchError, Exit.RESOURCES),
    (TryLater, Exit.TRY_LATER),
    (StoreUnreachable, Exit.RESOURCES),
    (Cancelled, Exit.TERMINATED),
    (Stopped, Exit.TERMINATED),
    (KeyboardInterrupt, Exit.INTERRUPTED),
]
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def exit_code(error: BaseException) -> Exit:
    """Return the exit code for an error, by its type."""
    if isinstance(error, SystemExit):
        return Exit(error.code) if error.code in set(Exit) else Exit.BUG
    if _missing_spark(error) or _unfit_mlflow(error):
        return Exit.USAGE
    for kinds, code in EXITS:
        if isinstance(error, kinds):
            return code
    is_known = _no_room(error) or _missing_in_workers(error) or _ended_worker(error)
    return Exit.RESOURCES if is_known else Exit.BUG


def message(error: BaseException) -> str:
    """Return the error's message, with a remedy for full disks and missing packages."""
    if _missing_spark(error):
        return f"{error}: this command needs Spark, which is not installed: pip install 'sparkring[spark]'"
    if unfit := _unfit_mlflow(error):
        return unfit
    if missing := _missing_in_workers(error):
        return (
            f"{missing}, in the Python of Spark's workers: install the packages of sparkring where PYSPARK_PYTHON of "
            "each host, or of the server of Spark Connect, points to"
        )
    if ended := _ended_worker(error):
        return (
            f"a Python worker of Spark ended in the middle of a task ({ended}), as by the kernel where memory runs "
            "short (`dmesg` says so), or by a crash of a library: fewer slots (launch.world, spark.master) or a larger "
            "machine leave each more memory; the same command continues from what is done"
        )
    if not (full := _no_room(error)):
        return str(error) or "interrupted"
    return (
        f"{full}: make room there, or point the storage or tracking key of that folder elsewhere; then give the same "
        "command again, which continues from the last checkpoint"
    )


def _missing_spark(error: BaseException) -> bool:
    """Return whether an import failed because Spark is not installed."""
    return isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] in ("pyspark", "py4j")


def _unfit_mlflow(error: BaseException) -> str:
    """Explain why MLflow cannot be imported, and what to install; "" for other errors."""
    if not isinstance(error, ImportError) or str(error.name).partition(".")[0] not in (
        "mlflow",
        "sqlalchemy",
        "alembic",
    ):
        return ""
    if isinstance(error, ModuleNotFoundError) and error.name == "mlflow":
        return f"{error}: this command needs MLflow, which is not installed: pip install 'mlflow>=2.19,<4'"
    return (
        f"MLflow cannot be imported ({first_line(error)}): it does not go with the installed SQLAlchemy, as MLflow "
        "2.19 to 2.22 does not with SQLAlchemy 2.1: pip install 'sqlalchemy<2.1', or a newer MLflow: "
        "pip install 'mlflow>=3,<4'"
    )


def _missing_in_workers(error: BaseException) -> str:
    """Return the line naming a module missing in a Spark task; "" for other errors."""
    if type(error).__module__.partition(".")[0] not in ("py4j", "pyspark"):
        return ""
    found = re.search(r"ModuleNotFoundError: (No module named '[\w.]+')", str(error))
    return found[1] if found else ""


def _ended_worker(error: BaseException) -> str:
    """Return Spark's message about a killed or crashed Python worker; "" for other errors."""
    if type(error).__module__.partition(".")[0] not in ("py4j", "pyspark"):
        return ""
    found = re.search(r"Python worker (?:exited unexpectedly \(crashed\)|failed to connect back)", str(error))
    return found[0] if found else ""


def _no_room(error: BaseException) -> str:
    """Return the message of a full or read-only disk, here or in a Spark task; "" for other errors."""
    if isinstance(error, OSError):
        return str(error) if error.errno in NO_ROOM else ""
    if type(error).__module__.partition(".")[0] not in ("py4j", "pyspark"):  # imported by what raises their errors
        return ""
    found = [line.strip() for line in str(error).splitlines() if any(os.strerror(each) in line for each in NO_ROOM)]
    return min(found, key=len) if found else ""  # the traceback of a task's Python is in it, and frames around it
