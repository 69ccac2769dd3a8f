"""Check what the dataset is made of, and where it goes. Imports no torch: `sparkring etl` begins with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs as pafs

from sparkring.conf.config import RunConfig
from sparkring.conf.errors import first_line
from sparkring.conf.storage import Storage, open_storage
from sparkring.etl.errors import EtlError
from sparkring.etl.foreseen import row_problems
from sparkring.etl.sources.examine import Examined, examine_sources
from sparkring.etl.sources.types import NoSuchType, parse_type
from sparkring.etl.views import own_modules, rows_function
from sparkring.pipelines.validate.problems import Problems


def check_tables(config: RunConfig) -> None:
    """Raise one error with everything that is wrong with a recipe's tables, its rows and its storage, which is made."""
    problems = table_problems(config, examine(config, lakes=False))
    (problems + storage_problems(config)).raise_any(config.name)
    storage_problems(config, make=True).raise_any(config.name)


def examine(config: RunConfig, lakes: bool = True) -> Examined:
    """Examine the recipe's tables, where their declarations are right; nothing without an etl block.

    `lakes`: Delta and Iceberg tables too, which else are looked at when they are pinned.
    """
    return Examined() if config.etl is None or type_problems(config) else examine_sources(config.etl, lakes)


def table_problems(config: RunConfig, examined: Examined) -> Problems:
    """What is wrong with the tables, as they were examined, and with the rows that are made of them."""
    if config.etl is None:
        return Problems()
    recipe = [*type_problems(config), *row_problems(config.etl), *_function_problems(config.etl.rows)]
    return Problems(recipe + batch_problems(config, examined), examined.problems)


def type_problems(config: RunConfig) -> list[str]:
    """List the declared columns whose type Spark does not have."""
    declared = {
        f"etl.sources.{name}.{block}": getattr(source, block, {})
        for name, source in (config.etl.sources.items() if config.etl else ())
        for block in ("columns", "partitions")
    }
    found = []
    for key, columns in declared.items():
        for column, text in columns.items():
            try:
                parse_type(text)
            except NoSuchType as problem:
                found.append(f"{key}.{column} = {text!r}: not a Spark type: {problem}")
    return found


def _function_problems(rows: str) -> Iterator[str]:
    """Import `module:function` of etl.rows, where it is one."""
    if ":" in rows:
        try:
            own_modules(rows)
            rows_function("etl.rows", rows)
        except EtlError as error:
            yield str(error)


def batch_problems(config: RunConfig, examined: Examined) -> list[str]:
    """A batch larger than the table that the rows are made of, one by one, so than any split of it."""
    etl, data, batch = config.etl, config.data, config.train.global_batch
    if etl is None or etl.interval is not None or data.tail == "pad" or data.mix is not None or etl.kind == "text":
        return []
    table = etl.one_per or etl.rows
    rows = examined.rows.get(table)
    if rows is None or batch <= rows:
        return []
    return [
        f"train.global_batch = {batch}: larger than the whole table {table!r} of {rows} rows, so an epoch has no full "
        "batch; make it smaller, or set data.tail to pad"
    ]


def storage_problems(config: RunConfig, make: bool = False) -> Problems:
    """The folders of the recipe that cannot be made or written. `make`: local ones are made, else only looked at."""
    folders = {"storage.datasets": config.storage.datasets, "storage.runs": config.storage.runs}
    if config.tracking.enabled and config.tracking.uri is None:
        folders["tracking.root"] = config.tracking.root
    problems = {key: _unwritable(uri, make) for key, uri in folders.items()}
    return Problems(
        resources=[
            f"{key} = {folders[key]!r}: cannot be made or written: {why}; name a folder that can"
            for key, why in problems.items()
            if why
        ]
    )


def _unwritable(uri: str, make: bool) -> str:
    """Why a folder cannot be written; '' where it can, as far as is known without writing a file."""
    try:
        storage = open_storage(uri)
        if not storage.is_local:
            return _remote_problem(storage)
        problem = _local_problem(Path(storage.root))
        if make and not problem:
            os.makedirs(storage.root, exist_ok=True)
        return problem
    except (OSError, ValueError) as error:
        return first_line(error)


def _local_problem(folder: Path) -> str:
    there = next(above for above in (folder, *folder.parents) if above.exists() or above.is_symlink())
    if not there.is_dir():
        return f"{there} is a file" if there.exists() else f"{there} is a link to nothing"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"no right to write in {there}"
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        return f"{there} is on a filesystem that is read-only"
    return ""


def _remote_problem(storage: Storage) -> str:
    """OSError where it does not answer."""
    storage.fs.get_file_info(storage.root)
    bucket = storage.root.partition("/")[0]
    if not isinstance(storage.fs, pafs.S3FileSystem):
        return ""
    try:
        return f"there is no bucket {bucket!r}" if not Storage(storage.fs, bucket, storage.uri).exists() else ""
    except OSError:  # the right to write below a prefix does not include that to look at the bucket
        return ""
