"""Find what is wrong with the tables of a recipe before anything is built: files, footers, headers. Without Spark.

Of a table of many files some are looked at; the build looks at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.errors import first_line
from sparkring.conf.sources import SourceConfig
from sparkring.etl.errors import EtlError, NoFiles
from sparkring.etl.sources.pin import kind_of
from sparkring.etl.windows.interval import window_of


@dataclass(frozen=True)
class Examined:
    """What was found. `files` and `bytes` by table; `rows` of tables whose footers were all read."""

    problems: list[str] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)


def examine_sources(etl: EtlConfig, pinned_soon: bool = False) -> Examined:
    """Examine every table that can be without Spark.

    Of a table that is read by intervals, the last interval. `pinned_soon`: leave those alone that the pin of a job,
    which is about to come, costs no more than this: Delta, Iceberg, and files that are known by `stat`.
    """
    found = Examined()
    for name, source in etl.sources.items():
        try:
            table = kind_of(source).examine(name, _of_last_interval(name, source, etl), pinned_soon)
            found.problems.extend(table.problems)
            for sizes, size in ((found.files, table.files), (found.bytes, table.bytes), (found.rows, table.rows)):
                if size is not None:
                    sizes[name] = size
        except NoFiles as error:
            if etl.interval is None or name not in etl.interval.sources:  # else the whole window is asked
                found.problems.append(str(error))
        except (EtlError, OSError) as error:
            text = str(error) if isinstance(error, EtlError) else f"etl.sources.{name}: {first_line(error)}"
            found.problems.append(text)
    return found


def _of_last_interval(name: str, source: SourceConfig, etl: EtlConfig) -> SourceConfig:
    if etl.interval is None or name not in etl.interval.sources:
        return source
    return source.cut(window_of(etl.interval)[-1].condition(etl.interval.sources[name]))
