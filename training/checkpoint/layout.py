"""The files of a checkpoint: their names, and what is in those of JSON.

    step-<N>/COMMIT.json                           written last, by rank 0: the generation, the hash of every file
    step-<N>/<generation>/rank-00000.safetensors   the chunks of tensors that rank 0 wrote
    step-<N>/<generation>/rank-00000.json          rank 0's random state
    step-<N>/<generation>/tables/<table>/rank-00000.safetensors   the buckets of a sparse table that rank 0 owns, or
                                                   what changed in them since an earlier step, whose file stays
    step-<N>/<generation>/index.json               where each tensor's chunks are, and the values that are not tensors
    step-<N>/<generation>/trainer.json             step, cursor, schedule, ... of the training loop, and versions

A generation is one attempt to write a step; a half-written one is never named by a marker, so never read.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator, with_config
from typing_extensions import TypedDict  # pydantic asks for this one below Python 3.12

from sparkring.conf.plain_text import count_of
from sparkring.conf.stored import CLOSED, Count, FolderName, RelativePath, Sha256, Stored, up_to
from sparkring.training.checkpoint.format import DTYPES, decode_value
from sparkring.training.checkpoint.rng import checked_rng

CHECKPOINTS = "checkpoints"  # the folder of all steps, below a run's
MARKER = "COMMIT.json"
FORMAT_VERSION = 2  # of a checkpoint that needs files of earlier steps; 1: of one that stands alone
STEP = re.compile(r"step-(\d+)")
TABLE_FILE = re.compile(rf"{STEP.pattern}/[^/]+/tables/(?P<table>.+)/rank-\d+\.safetensors")


def step_folder(step: int) -> str:
    return f"step-{step}"


def index_file(generation: str) -> str:
    return f"{generation}/index.json"


def trainer_file(generation: str) -> str:
    return f"{generation}/trainer.json"


def rank_file(generation: str, rank: int) -> str:
    return f"{generation}/rank-{rank:05d}.json"


def tensors_file(generation: str, rank: int) -> str:
    return f"{generation}/rank-{rank:05d}.safetensors"


def table_file(generation: str, table: str, rank: int) -> str:
    return f"{generation}/tables/{table}/rank-{rank:05d}.safetensors"


class WrittenFile(Stored):
    bytes: Count
    sha256: Sha256


class Marker(Stored):
    """COMMIT.json: every file of a checkpoint. `digest` is of all the rest, so that no part of it can be changed."""

    format: Annotated[int, up_to(FORMAT_VERSION)]
    step: Count
    generation: FolderName
    world: Annotated[int, Field(ge=1)]
    metric: Annotated[float | None, BeforeValidator(decode_value)]
    time: str
    files: dict[RelativePath, WrittenFile]
    needs: dict[RelativePath, WrittenFile] = {}
    digest: Sha256

    @model_validator(mode="after")
    def _lists_every_file(self) -> Self:
        ranks = range(min(self.world, len(self.files)))  # the world may be any number
        made = self.generation
        wanted = [index_file(made), trainer_file(made), *(rank_file(made, rank) for rank in ranks)]
        if missing := [path for path in wanted if path not in self.files]:
            name = missing[0].removeprefix(f"{made}/")
            raise ValueError(f"files of {count_of(self.world, 'rank is')} not all listed, such as {name}")
        return self


class TrainerFile(Stored):
    """trainer.json: the plain values of the training loop."""

    trainer: Annotated[dict[str, Any], AfterValidator(decode_value)]
    versions: dict[str, str]


class RankFile(Stored):
    """rank-00000.json: the random state and the plain values of one rank."""

    rng: Annotated[Any, AfterValidator(decode_value), AfterValidator(checked_rng)]
    state: Annotated[dict[str, Any] | None, AfterValidator(decode_value)]


@with_config(CLOSED)
class StoredChunk(TypedDict):
    """A box of a tensor: where it begins and its sizes, by dimension; it is the bytes [begin, end) of the file."""

    file: RelativePath
    name: str
    offsets: list[Count]
    sizes: list[Count]
    begin: Count
    end: Count


@with_config(CLOSED)
class StoredTensor(TypedDict):
    """A tensor of a checkpoint, and the chunks that hold its elements, each once."""

    dtype: str
    shape: list[Count]
    chunks: list[StoredChunk]


def covered(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Check that the chunks of each tensor hold each of its elements once. ValueError names the tensor."""
    for fqn, entry in tensors.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{fqn}: dtype {entry['dtype']!r} is none of {sorted(DTYPES)}")
        shape, itemsize = entry["shape"], DTYPES[entry["dtype"]].itemsize
        chunks = [chunk for chunk in entry["chunks"] if 0 not in chunk["sizes"]]
        for chunk in entry["chunks"]:
            whole = len(chunk["offsets"]) == len(chunk["sizes"]) == len(shape)
            inside = whole and all(o + n <= d for o, n, d in zip(chunk["offsets"], chunk["sizes"], shape, strict=True))
            if not inside or chunk["end"] - chunk["begin"] != math.prod(chunk["sizes"]) * itemsize:
                raise ValueError(f"{fqn}: {chunk} is no part of a {entry['dtype']} tensor of shape {shape}")
        have = sum(math.prod(chunk["sizes"]) for chunk in chunks)
        if have != math.prod(shape) or _overlap(chunks, len(shape)):
            raise ValueError(f"{fqn}: chunks of {have} elements do not cover a tensor of shape {shape} once")
    return tensors


def _overlap(chunks: list[StoredChunk], dims: int) -> bool:
    """Return whether two chunks share an element; sweeps along the most divided dim."""
    if dims == 0:
        return len(chunks) > 1
    along = max(range(dims), key=lambda dim: len({chunk["offsets"][dim] for chunk in chunks}))
    near: list[StoredChunk] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk["offsets"][along]):
        near = [n for n in near if n["offsets"][along] + n["sizes"][along] > chunk["offsets"][along]]
        if any(_meet(chunk, other) for other in near):
            return True
        near.append(chunk)
    return False


def _meet(one: StoredChunk, other: StoredChunk) -> bool:
    edges = zip(one["offsets"], one["sizes"], other["offsets"], other["sizes"], strict=True)
    return all(a < b + n and b < a + m for a, m, b, n in edges)


@with_config(CLOSED)
class Index(TypedDict):
    """index.json: where tensors' chunks are, the values that are not tensors, and each name's path in the state."""

    tensors: Annotated[dict[str, StoredTensor], AfterValidator(covered)]
    values: dict[str, Any]
    paths: dict[str, list[str | int]]
