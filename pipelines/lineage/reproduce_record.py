"""What a run keeps so that it can be reproduced: reproduce.json of its folder, and diff.patch next to it.

What summary.json has is not repeated: the configuration, the dataset, the commit, engine, ranks and threads per rank.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Annotated

from sparkring.conf.storage import Storage
from sparkring.conf.stored import CLOSED, Label, Sha256, StoredError, read, up_to

RECORD, PATCH = "reproduce.json", "diff.patch"


@dataclass(frozen=True, kw_only=True)
class ModuleFile:
    """A module of the user's."""

    __pydantic_config__ = CLOSED

    file: str
    sha256: Sha256


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What a training runs on, as the driver's process finds it."""

    __pydantic_config__ = CLOSED

    python: Label
    packages: dict[str, str]  # installed distribution -> version
    torch_build: list[str]  # lines of torch.__config__.show(): compiler, BLAS, kernels
    cpu_capability: str  # the kernels that torch picks here: AVX2, AVX512 ..
    cpu_model: str
    cpu_flags: list[str]  # those of vector instructions
    gpus: list[str]  # names; [] without
    code: dict[str, Sha256]  # package of ours -> sha256 of its source files
    modules: dict[str, ModuleFile]  # behind the references of the recipe, with those of the user's that they import


@dataclass(frozen=True, kw_only=True)
class Record:
    """reproduce.json."""

    __pydantic_config__ = CLOSED

    environment: Environment  # of the last command that trained the run
    changed: list[str] = field(default_factory=list)  # what was another in an earlier command of the same run
    java: str
    datasets: dict[str, Sha256]  # URI -> sha256 of what its manifest says of its content
    start: dict[str, Sha256] = field(default_factory=dict)  # file of the model that it started from -> sha256
    patch: str  # diff.patch, or why it is missing; empty if the checkout had no changes
    weights_sha256: Sha256 | None = None  # of the exported model; None: not finished
    format: Annotated[int, up_to(1)] = 1

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=1, sort_keys=True) + "\n").encode()


def read_record(run: Storage) -> Record:
    """Read what a run folder keeps. StoredError where it is damaged, or of a sparkring that kept nothing."""
    if not run.exists(RECORD):
        raise StoredError(
            f"{run.uri}: cannot be reproduced: an older sparkring trained it and left no {RECORD}, so what it was "
            "trained with is not known; train it again"
        )
    return read(Record, run, RECORD)
