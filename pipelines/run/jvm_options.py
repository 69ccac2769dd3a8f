"""Options of a JVM that this process starts on this machine: to start soon, and to run a short job fast.

A job of a minute ends before the compiler of long ones (C2) has repaid what it costs, and spends seconds on loading
Spark's classes. Of these there is an archive (spark_classes.py), which every later JVM of the same Java and Spark maps
into memory. All of it is left out where it does not apply.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import pyspark

from sparkring.conf.config import RunConfig
from sparkring.conf.storage import open_storage
from sparkring.conf.uris import local_path
from sparkring.pipelines.run.spark_settings import is_one_jvm

log = logging.getLogger(__name__)

SHORT_BYTES = 64 << 20  # of sources; of more, C2's code is worth its price
MOST_FILES = 10_000  # looked at to find out
SHORT = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")  # of an archive that does not fit, which is not used
OPTIONS = "spark.driver.defaultJavaOptions"  # Spark puts them before the user's own
USERS_OWN = (OPTIONS, "spark.driver.extraJavaOptions")
REFUSED = (  # says Java of options, and where it crashes, as it does over an archive that is cut off
    "Could not create the Java Virtual Machine",
    "initialization of VM",
    "Unrecognized VM option",
    "fatal error has been detected by the Java Runtime Environment",
)


def options_of(settings: Mapping[str, str], data_bytes: int | None, archive: Path | None) -> str:
    """Choose options of the driver's JVM; "" if the user set some, or executors are elsewhere.

    Args:
        settings: settings of the session.
        data_bytes: bytes of all sources; None if unknown.
        archive: archive of Spark's classes, or None.
    """
    if not is_one_jvm(settings["spark.master"]) or any(key in settings for key in USERS_OWN):
        return ""
    short = SHORT if data_bytes is not None and data_bytes <= SHORT_BYTES else ()
    shared = (f'"-XX:SharedArchiveFile={archive}"', *QUIET) if archive is not None else ()
    return " ".join([*short, *shared])


def is_refused(message: str) -> bool:
    """Return whether a JVM that did not start reports unknown options, or crashed."""
    return any(words in message for words in REFUSED)


def data_bytes(config: RunConfig) -> int | None:
    """Sum the bytes of all sources' files; None if one is remote, or there are too many.

    For a table with versions or partitions every file counts, so it is no less than what is read.
    """
    if config.etl is None:
        return None
    paths: list[str] = []
    for source in config.etl.sources.values():
        location = source.location
        if location is None or local_path(location) is None:
            return None
        paths.append(open_storage(location).root)
    return bytes_below(paths)


def bytes_below(paths: Iterable[str]) -> int | None:
    """Sum bytes of files and folders (a glob: its folder); None above SHORT_BYTES or MOST_FILES."""
    total = files = 0
    for path in paths:
        root = Path(path)
        while any(mark in root.name for mark in "*?["):
            root = root.parent
        for file in [root] if root.is_file() else root.rglob("*"):
            files += 1
            total += file.stat().st_size if file.is_file() else 0
            if files > MOST_FILES or total > SHORT_BYTES:
                return None
    return total


def class_archive(environment: Mapping[str, str]) -> Path | None:
    """Return the path of this Java's and Spark's archive, existing or not; None without Java.

    Its name is `<environment>-<jars>.jsa`. Java compares an archive with its own build and the size and time of each of
    Spark's jars, and silently ignores one that differs: a rebuilt environment needs another.
    """
    home = environment.get("JAVA_HOME")
    java = Path(home, "bin/java") if home else Path(shutil.which("java") or "")
    if not java.is_file():
        return None
    home = environment.get("HOME") or os.path.expanduser("~")
    cache = Path(environment.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"))
    if not cache.is_absolute():  # a user id without a name and without HOME has no home
        return None
    spark = Path(pyspark.__file__).parent
    jars = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in spark.glob("jars/*.jar"))
    name = "-".join(hashlib.sha256(repr(known).encode()).hexdigest()[:16] for known in ((java.resolve(), spark), jars))
    return cache / "sparkring/jvm" / f"{name}.jsa"


def is_own(path: Path) -> bool:
    """Return whether a file or folder is this user's, and nobody else can write it."""
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def found_archive(environment: Mapping[str, str]) -> Path | None:
    """Return the archive made for this Java and Spark, or None, and mark it as used (spark_classes.py).

    It holds code: one that is another's, or that others can write, is not used.
    """
    archive = class_archive(environment)
    if archive is None or not archive.is_file() or not (is_own(archive) and is_own(archive.parent)):
        return None
    with suppress(OSError):
        os.utime(archive)
    return archive
