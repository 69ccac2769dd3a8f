"""Names of the tags that the product gives to runs and versions in MLflow."""

from __future__ import annotations

JOB = "job"  # key of the parent run
PROCESS, HEARTBEAT = "sparkring.process", "sparkring.heartbeat"  # tags of a run
DECISION, REASON = "sparkring.decision", "sparkring.reason"  # tags of a version and of a job's run
NO_CHAMPION = "none"  # what a model was judged against where no version had the alias
DATE = "sparkring.date"  # tag of a version and of a job's run
ERROR = "sparkring.error"  # tag of a run that failed: the first line of why
COMMIT = "sparkring.commit"  # tag of a job's run
FINGERPRINT = "sparkring.fingerprint"  # tag of a job's run and of a version: of the dataset
FAMILY = "sparkring.family"  # tag of a job's run that trained both: whose model continues
RECIPE = "sparkring.recipe"  # tag of a job's run
HISTORY = "sparkring.history"  # tag of the run with one point per date: the recipe
CLUSTER = "sparkring.cluster"  # tag of a job's run: name of the cluster that its steps are predicted on
MACHINES = "sparkring.machines"  # tag of a job's run: devices and network of that cluster
WEIGHTS = "sparkring.weights_sha256"  # tag of a version
ENGINE = "sparkring.engine"  # tag of a part's run and of a version
