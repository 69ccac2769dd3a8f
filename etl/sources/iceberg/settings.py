"""Where pyiceberg finds its own configuration: not in the working directory, whose file may be another's."""

from __future__ import annotations

import logging
import os
from typing import Any

log = logging.getLogger(__name__)


def ignore_working_directory() -> None:
    """Make pyiceberg read the file of PYICEBERG_HOME or of the home folder; ImportError where it is not installed.

    It looks in the working directory too, and imports what `py-io-impl` there names. To be called before it is used.
    """
    from pyiceberg.utils import config

    if config.Config._from_configuration_files is not read_file:  # TRICK: of pyiceberg 0.12 (test_settings.py)
        config.Config._from_configuration_files = staticmethod(read_file)
        if os.path.isfile(config.PYICEBERG_YML) and not read_file():
            log.warning("%s of the working directory is not read; PYICEBERG_HOME=. reads it", config.PYICEBERG_YML)
        from pyiceberg import catalog

        catalog._ENV_CONFIG = config.Config()  # who imported it before has read the file


def read_file() -> Any:
    """Read the first file there is; None without one."""
    import strictyaml  # type: ignore[import-untyped]
    from pyiceberg.utils.config import PYICEBERG_HOME, PYICEBERG_YML, _lowercase_dictionary_keys

    home = os.path.expanduser("~")
    for folder in (os.environ.get(PYICEBERG_HOME), home if os.path.isabs(home) else None):
        file = os.path.join(folder or os.devnull, PYICEBERG_YML)
        if os.path.isfile(file):
            with open(file, encoding="utf-8") as opened:
                return _lowercase_dictionary_keys(strictyaml.load(opened.read()).data)
    return None
