"""`sparkring launch`: any script on the slots of Spark, as torchrun would start it on its hosts."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.conf.load import ConfigError
from sparkring.conf.plain_text import count_of
from sparkring.etl.spark_platform.application import add_file, in_process
from sparkring.pipelines.launch.barrier import launch_options
from sparkring.pipelines.launch.recover import RestartableJob, restart_policy, run_with_recovery
from sparkring.pipelines.run.scratch import scratch_folder
from sparkring.pipelines.run.signals import obeying_signals
from sparkring.pipelines.run.spark import spark_session
from sparkring.training.launch.control import Control
from sparkring.training.launch.job import JobResult, JobSpec
from sparkring.training.launch.messages import AttemptStarted, Event, LogLines

log = logging.getLogger(__name__)
MAX_FOLDER_BYTES = 64 << 20
NAME = "sparkring launch"
ARCHIVE = "sparkring-folder.zip"


def launch(
    script: str,
    words: Sequence[str],
    launch: LaunchConfig,
    spark_config: SparkConfig,
    files: Sequence[str],
    as_module: bool = False,
) -> None:
    """Run `script words...` on launch.world ranks.

    In the working directory, or in a copy of it on other hosts. Output goes to stdout by line, with its rank. Raises
    what Recovery raises.

    Args:
        script: path, in the working directory where ranks are on other hosts.
        words: the script's arguments.
        launch: world, attempts and time limits; a rank's output counts as progress for hang_timeout_s.
        spark_config: master and settings of a session made here.
        files: paths that travel although their names begin with a dot, or would not be in the working directory.
        as_module: `script` is the name of a module, run as `python -m` would run it.
    """
    folder, control = Path.cwd(), Control()
    job = JobSpec(script, args=tuple(words), folder=str(folder), as_module=as_module)
    try:
        job.check()
    except (ValueError, OSError) as error:
        raise ConfigError(NAME, [str(error)]) from error
    policy = restart_policy(launch)
    with (
        scratch_folder("folder") as place,
        spark_session(Path(script).stem, spark_config, launch) as spark,
        obeying_signals(control, launch.grace_s),
    ):
        if not in_process(spark):
            archive = pack_folder(folder, None if as_module else script, files, place)
            add_file(spark, archive)  # served from where it is
            job = replace(job, archive=archive.name)
        run_with_recovery(
            spark,
            RestartableJob(lambda attempt, world: job, policy, is_finished=is_finished),
            show,
            control,
            launch_options(launch, by_output=True),
        )


def is_finished(result: JobResult) -> bool:
    """Return whether the script ended by itself: no rank saw our request to end."""
    return not any(result.results)


def show(event: Event) -> None:
    """Print the ranks' output; other events have been logged."""
    if isinstance(event, LogLines):
        for line in event.lines:
            print(f"[{event.child}] {line}", flush=True)
    elif isinstance(event, AttemptStarted):
        log.info("%s started in %.1f s", count_of(event.world, "rank"), event.start_s)


def pack_folder(folder: Path, script: str | None, files: Sequence[str], place: Path) -> Path:
    """Zip a folder's files into `place`, without hidden ones and caches, and `files`.

    ConfigError where the script is not in the folder; where it is more than MAX_FOLDER_BYTES, with the largest files.
    A module (`script` None) may be an installed one.
    """
    if script is not None and folder not in Path(script).resolve().parents:
        raise ConfigError(
            NAME, [f"{script}: not below the working directory {folder}, which is what travels to other hosts"]
        )
    found = dict.fromkeys([*_files_of(folder), *(path for name in files for path in _chosen(folder, name))])
    sizes = {path: path.stat().st_size for path in found}
    if (total := sum(sizes.values())) > MAX_FOLDER_BYTES:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:3]
        named = ", ".join(f"{path.relative_to(folder)} ({sizes[path] >> 20} MiB)" for path in largest)
        words = (
            f"{total >> 20} MiB in {count_of(len(sizes), 'file')}, and at most {MAX_FOLDER_BYTES >> 20} MiB travel to "
            "other hosts"
        )
        advice = "start from a smaller folder, and read data from storage"
        raise ConfigError(NAME, [f"{folder}: {words}; the largest are {named}: {advice}"])
    with zipfile.ZipFile(place / ARCHIVE, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in found:
            archive.write(path, path.relative_to(folder))
    return place / ARCHIVE


def _files_of(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        if "pyvenv.cfg" in names:  # an environment: its packages are for the host that has it
            folders.clear()
            continue
        yield from (path for name in sorted(names) if name[0] != "." and (path := Path(place, name)).is_file())


def _chosen(folder: Path, name: str) -> list[Path]:
    path = (folder / name).resolve()
    if folder.resolve() not in path.parents or not path.exists():
        raise ConfigError(NAME, [f"--files {name}: no file or folder below the working directory {folder}"])
    return list(_files_of(path)) if path.is_dir() else [path]
