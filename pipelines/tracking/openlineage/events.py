"""Make OpenLineage run events of a journal's operations.

An event is a function of the operations up to its own: the same ones, in the same order, whenever they are made. So
the number of those that were sent is all that must be known to continue.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from openlineage.client import event_v2
from openlineage.client import facet_v2 as facets

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.pipelines.tracking import ops
from sparkring.pipelines.tracking.openlineage.datasets import model_dataset
from sparkring.pipelines.tracking.tags import COMMIT, JOB

State = event_v2.RunState
ENDS = {"FINISHED": State.COMPLETE, "FAILED": State.FAIL, "KILLED": State.ABORT}
PRODUCER = "urn:sparkring:tracking"
Datasets = dict[tuple[str, str], ops.LineageDataset]


@dataclass
class JobEvents:
    """The events of one journal, made as its operations come by. `tracking`: where its models are registered."""

    tracking: TrackingConfig
    journal: str  # its name
    started: ops.StartRun | None = None
    job: ops.LineageJob | None = None
    ended: bool = False
    last: float = 0.0  # time of the newest operation
    inputs: Datasets = field(default_factory=dict)
    outputs: Datasets = field(default_factory=dict)

    def take(self, op: ops.Op, runs: Mapping[str, str], versions: Mapping[str, str]) -> event_v2.RunEvent | None:
        """Return the event that is due with this operation.

        Args:
            op: next operation of the journal.
            runs: MLflow's run id of each key.
            versions: registered model version of each key.
        """
        self.last = max(self.last, op.at)
        if isinstance(op, ops.StartRun) and op.key == JOB:
            self.started = op
        elif isinstance(op, ops.LineageJob):
            self.job = op
            merge(self.inputs, op.inputs)
            return self._event(State.START, self.started.at if self.started else op.at, runs)
        elif isinstance(op, ops.LineageData):
            merge(self.inputs, op.inputs)
            merge(self.outputs, op.outputs)
        elif isinstance(op, ops.Model) and op.registered_model is not None and op.key in versions:
            merge(self.outputs, [model_dataset(self.tracking, op.registered_model, versions[op.key])])
        elif isinstance(op, ops.End) and op.key == JOB:
            self.ended = True
            return self._event(ENDS[op.status], op.at, runs, op.error)
        return None

    def abandoned(self, runs: Mapping[str, str]) -> event_v2.RunEvent | None:
        """Return the missing final event of a dead driver; to be called after its last operation."""
        return None if self.ended else self._event(State.ABORT, self.last, runs)

    def _event(
        self, state: event_v2.RunState, at: float, runs: Mapping[str, str], error: str = ""
    ) -> event_v2.RunEvent | None:
        """Make an event; None for a job without recorded lineage.

        Args:
            state: new state of the run.
            at: time of the change, seconds since 1970.
            runs: MLflow's run id of each key.
            error: why it failed.
        """
        if self.job is None:
            return None
        tags = self.started.tags if self.started else {}
        return event_v2.RunEvent(
            eventType=state,
            eventTime=datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds"),
            run=event_v2.Run(run_id(runs.get(JOB, self.journal)), run_facets(self.job, error)),
            job=event_v2.Job(self.job.namespace, self.job.name, job_facets(self.job, tags.get(COMMIT, ""))),
            producer=PRODUCER,
            inputs=[input_of(dataset) for dataset in self.inputs.values()],
            outputs=[output_of(dataset) for dataset in self.outputs.values()],
        )


def merge(known: Datasets, new: Iterable[ops.LineageDataset]) -> None:
    """Add datasets; one that is known gets what is new of it."""
    for dataset in new:
        key = dataset["namespace"], dataset["name"]
        known[key] = ops.LineageDataset(**{**known.get(key, {}), **dataset})  # type: ignore[typeddict-item]


def run_id(mlflow_id: str) -> str:
    """Return MLflow's run id as a UUID; for other text a reproducible one."""
    try:
        return str(uuid.UUID(mlflow_id))
    except ValueError:
        return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{PRODUCER}:{mlflow_id}"))


def run_facets(job: ops.LineageJob, error: str) -> dict[str, facets.RunFacet]:
    """Make the facets of the run. `error`: empty unless it failed."""
    found: dict[str, facets.RunFacet] = {}
    if job.nominal is not None:
        found["nominalTime"] = facets.nominal_time_run.NominalTimeRunFacet(*job.nominal, producer=PRODUCER)
    if error:
        found["errorMessage"] = facets.error_message_run.ErrorMessageRunFacet(error, "PYTHON", producer=PRODUCER)
    if job.parent is not None:
        found["parent"] = facets.parent_run.ParentRunFacet(
            facets.parent_run.Run(job.parent["run_id"]),
            facets.parent_run.Job(job.parent["namespace"], job.parent["name"]),
            producer=PRODUCER,
        )
    return found


def job_facets(job: ops.LineageJob, commit: str) -> dict[str, facets.JobFacet]:
    """Make the facets of the job. `commit`: of the code; empty if unknown."""
    kind = facets.job_type_job.JobTypeJobFacet("BATCH", "SPARKRING", "JOB", producer=PRODUCER)
    found: dict[str, facets.JobFacet] = {"jobType": kind}
    if commit and job.code_url is not None:
        found["sourceCodeLocation"] = facets.source_code_location_job.SourceCodeLocationJobFacet(
            "git", job.code_url, version=commit, producer=PRODUCER
        )
    return found


def dataset_facets(dataset: ops.LineageDataset) -> dict[str, facets.DatasetFacet]:
    """Make the facets of a dataset, for inputs and for outputs."""
    source = facets.datasource_dataset.DatasourceDatasetFacet(
        name=dataset["namespace"], uri=dataset.get("uri"), producer=PRODUCER
    )
    kind = facets.dataset_type_dataset.DatasetTypeDatasetFacet(dataset["kind"], producer=PRODUCER)
    found: dict[str, facets.DatasetFacet] = {"dataSource": source, "datasetType": kind}
    if "version" in dataset:
        version = facets.dataset_version_dataset.DatasetVersionDatasetFacet(dataset["version"], producer=PRODUCER)
        found["version"] = version
    if columns := dataset.get("schema"):
        fields = [facets.schema_dataset.SchemaDatasetFacetFields(c["name"], c["type"]) for c in columns]
        found["schema"] = facets.schema_dataset.SchemaDatasetFacet(fields, producer=PRODUCER)
    return found


def statistics(dataset: ops.LineageDataset) -> dict[str, int]:
    """Return the known numbers of a dataset, by the names of the facets' fields."""
    names = {"rowCount": "rows", "fileCount": "files", "size": "bytes"}
    return {shown: dataset[name] for shown, name in names.items() if name in dataset}  # type: ignore[literal-required]


def input_of(dataset: ops.LineageDataset) -> event_v2.InputDataset:
    counts = statistics(dataset)
    facet = facets.input_statistics_input_dataset.InputStatisticsInputDatasetFacet(**counts, producer=PRODUCER)
    return event_v2.InputDataset(
        dataset["namespace"],
        dataset["name"],
        facets=dataset_facets(dataset),
        inputFacets={"inputStatistics": facet} if counts else {},
    )


def output_of(dataset: ops.LineageDataset) -> event_v2.OutputDataset:
    counts = statistics(dataset)
    facet = facets.output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(**counts, producer=PRODUCER)
    return event_v2.OutputDataset(
        dataset["namespace"],
        dataset["name"],
        facets=dataset_facets(dataset),
        outputFacets={"outputStatistics": facet} if counts else {},
    )
