"""The operations of a tracking journal, one closed type per kind, and the state of its sending.

The driver writes them as they are. What is read back is checked against these types (conf/stored.py), since a journal
may be damaged or forged: a file of an operation is below the journal's folder, and a name is a name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import AfterValidator, Field, RootModel, with_config
from typing_extensions import TypedDict  # pydantic asks for this one below Python 3.12

from sparkring.conf.blocks.tracking import experiment_problem
from sparkring.conf.stored import CLOSED, Count, Finite, FolderName, Label, RelativePath
from sparkring.training.worker.result import Decision

Time = Annotated[Finite, Field(ge=0, lt=1e10, description="seconds since 1970; the end is in the year 2286")]
TimeMs = Annotated[int, Field(ge=0, lt=10**13)]
RunId = Annotated[str, Field(pattern=r"^[\w-]{1,100}$")]
UuidText = Annotated[str, Field(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]
Texts = dict[str, str]


@with_config(CLOSED)
class NamedType(TypedDict):
    """Of a dataset or of a model's signature, with MLflow's name of the type."""

    name: str
    type: Label
    required: NotRequired[bool]


@with_config(CLOSED)
@dataclass(frozen=True, kw_only=True)
class _Op:
    op: str
    key: FolderName  # of the run: job, etl, train, evaluate
    at: Time  # when the driver recorded it

    names: ClassVar[str] = ""  # the field that tells two operations of a kind apart

    @property
    def label(self) -> str:
        """The operation in the log, and in the tag that lists what is missing from a run."""
        return f"{self.op} {vars(self).get(self.names, '').rpartition('/')[2]}".rstrip()


@dataclass(frozen=True, kw_only=True)
class StartRun(_Op):
    op: Literal["start"] = "start"
    name: str
    parent: FolderName | None
    tags: Texts
    resume: bool


@dataclass(frozen=True, kw_only=True)
class Params(_Op):
    op: Literal["params"] = "params"
    params: Texts


@dataclass(frozen=True, kw_only=True)
class Metrics(_Op):
    op: Literal["metrics"] = "metrics"
    points: list[tuple[str, Finite, Count, TimeMs]]  # name, value, step, time


@dataclass(frozen=True, kw_only=True)
class Tags(_Op):
    op: Literal["tags"] = "tags"
    tags: Texts


@dataclass(frozen=True, kw_only=True)
class History(_Op):
    """A point of a date, in the run that holds one point per date of the recipe."""

    op: Literal["history"] = "history"
    recipe: str
    number: Count  # of the date's interval since 1970: the points' step
    begins: Time  # of the interval: the points' time, so that a chart over time shows dates
    values: dict[str, Finite]


@dataclass(frozen=True, kw_only=True)
class HistoryFigure(_Op):
    """A figure of a date, in the same run: MLflow shows them with a slider over the dates."""

    op: Literal["history_figure"] = "history_figure"
    recipe: str
    step: Count  # dates since the schedule's begin: MLflow's slider opens at 0
    name: Label  # of the figure, the same for all dates
    file: RelativePath  # PNG, relative to the journal's `files`
    names: ClassVar = "name"


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """A dataset as MLflow shows it."""

    name: str
    uri: str
    fingerprint: str
    profile: dict[str, Any]  # counts of rows and files
    schema: list[NamedType]


@dataclass(frozen=True, kw_only=True)
class DatasetUse(DatasetInfo, _Op):
    op: Literal["dataset"] = "dataset"
    context: str  # such as "training"
    names: ClassVar = "name"


@dataclass(frozen=True, kw_only=True)
class Artifact(_Op):
    op: Literal["artifact"] = "artifact"
    file: RelativePath  # to the journal's `files`
    folder: RelativePath | Literal[""]  # in the store
    names: ClassVar = "file"


@dataclass(frozen=True, kw_only=True)
class Checkpoint(_Op):
    op: Literal["checkpoint"] = "checkpoint"
    step: Count
    uri: str
    bytes: Count
    world: Count
    metric: str


@dataclass(frozen=True, kw_only=True)
class KeepCheckpoints(_Op):
    """The checkpoints a run still has: its pointers to others are deleted."""

    op: Literal["keep_checkpoints"] = "keep_checkpoints"
    uris: list[str]


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The final model as MLflow shows it. Registered once for its run and weights, where a name is given."""

    name: str
    step: Count
    sha256: str  # of the weights
    loader_module: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*$")]  # its `_load_pyfunc(folder)` makes a predictor
    inputs: list[NamedType] = field(default_factory=list)  # the signature
    outputs: list[NamedType] = field(default_factory=list)
    registered_model: str | None = None
    alias: str | None = None  # then points at the version, unless it does at the model of a later job
    tags: Texts = field(default_factory=dict)
    params: Texts = field(default_factory=dict)
    scores: dict[str, Finite] = field(default_factory=dict)  # on the rows of `dataset`
    dataset: str = ""  # name of the run's input that it was scored on, with the digest of `fingerprint`
    fingerprint: str = ""
    card: str = ""  # Markdown; describe.VERSION in it becomes the version's number
    about: str = ""  # description of the registered model, where it has none
    requirements: list[Annotated[str, Field(pattern=r"^[\w.-]+==[\w.!-]+$")]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Model(ModelInfo, _Op):
    op: Literal["model"] = "model"
    file: RelativePath  # folder, relative to the journal's `files`
    code: RelativePath | None = None  # folder whose content is put on Python's path where the model is loaded
    names: ClassVar = "name"


@dataclass(frozen=True, kw_only=True)
class Promote(_Op):
    """What was decided of the version that the run has registered before.

    `promoted` moves the alias under the rules of `refuse_move`, whenever this is applied; any other decision leaves it.
    """

    op: Literal["promote"] = "promote"
    registered_model: Label
    alias: Label
    decision: Decision
    reason: str
    judged_against: Label | None  # version, or NO_CHAMPION; None: it was not judged
    names: ClassVar = "decision"


@with_config(CLOSED)
class LineageColumn(TypedDict):
    """Of a dataset, with the type as we name it."""

    name: str
    type: str


@with_config(CLOSED)
class LineageDataset(TypedDict):
    """A dataset as OpenLineage events name it."""

    namespace: str
    name: str
    kind: Literal["FILE", "TABLE", "MODEL"]
    uri: NotRequired[str]
    version: NotRequired[str]
    schema: NotRequired[list[LineageColumn]]
    rows: NotRequired[Count]
    files: NotRequired[Count]
    bytes: NotRequired[Count]


@with_config(CLOSED)
class LineageParent(TypedDict):
    """The run of a scheduler that has started this job."""

    namespace: str
    name: str
    run_id: UuidText


@dataclass(frozen=True, kw_only=True)
class LineageJob(_Op):
    """What OpenLineage calls the job. It comes before any LineageData; nothing of either is MLflow's."""

    op: Literal["lineage_job"] = "lineage_job"
    namespace: str
    name: str
    nominal: tuple[str, str] | None  # begin and end of a date's interval, ISO 8601
    parent: LineageParent | None
    code_url: str | None
    inputs: list[LineageDataset]
    names: ClassVar = "name"


@dataclass(frozen=True, kw_only=True)
class LineageData(_Op):
    """Datasets that the job has read or made; one that was named before gets what is new here."""

    op: Literal["lineage_data"] = "lineage_data"
    inputs: list[LineageDataset]
    outputs: list[LineageDataset]


@dataclass(frozen=True, kw_only=True)
class Lost(_Op):
    """What the driver could not even copy."""

    op: Literal["lost"] = "lost"
    what: str
    why: str
    names: ClassVar = "what"


@dataclass(frozen=True, kw_only=True)
class End(_Op):
    op: Literal["end"] = "end"
    status: Literal["FINISHED", "FAILED", "KILLED"]
    error: str = ""  # why it failed


Op = (
    StartRun
    | Params
    | Metrics
    | Tags
    | History
    | HistoryFigure
    | DatasetUse
    | Artifact
    | Checkpoint
    | KeepCheckpoints
    | Model
    | Promote
    | LineageJob
    | LineageData
    | Lost
    | End
)


class StoredOp(RootModel[Annotated[Op, Field(discriminator="op")]]):
    """A line of ops.jsonl."""


def _known_place(store: Destination) -> Destination:
    if problem := experiment_problem(store["experiment"], store["uri"]):
        raise ValueError(problem)
    return store


@with_config(CLOSED)
class Destination(TypedDict):
    """Where a journal is sent: these keys of TrackingConfig."""

    experiment: Label
    uri: str | None
    openlineage: NotRequired[Label]


@with_config(CLOSED)
class State(TypedDict):
    """state.json."""

    done: Count  # bytes of ops.jsonl that have been applied
    runs: dict[FolderName, RunId]
    settings: NotRequired[Annotated[Destination, AfterValidator(_known_place)]]
    ended: NotRequired[list[FolderName]]
    failures: NotRequired[Count]  # of the next operation
    given_up: NotRequired[list[str]]  # kinds of operation of which the last one was given up
    not_recorded: NotRequired[dict[str, list[str]]]
    versions: NotRequired[dict[FolderName, Label]]  # of the model that the run has registered


@with_config(CLOSED)
class Sent(TypedDict):
    """sent.json."""

    events: Count  # OpenLineage events of this journal that the collector has
