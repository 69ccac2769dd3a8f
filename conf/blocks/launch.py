"""The recipe's `launch` block: how ranks are started."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from sparkring.conf.schema import Seconds, Strict

HOSTS_WAIT_S = 300.0  # as long as a cluster that grows by itself takes


class LaunchConfig(Strict):
    """How ranks are started, watched and started again."""

    on: Literal["auto", "spark", "hosts", "ray"] = Field(
        "auto",
        description="where ranks run: in barrier stages of `spark`, on `hosts` on each of which torchrun, srun, mpirun "
        "or ssh has started `sparkring train` once, or on a running `ray` cluster; auto: `hosts` where the environment "
        "names several of them or pyspark is not installed, else `spark`",
    )
    world: PositiveInt = Field(2, description="ranks, one per Spark task slot")
    cluster: str | None = Field(
        None,
        description="built-in cluster, or file of one (`sparkring plan measure` writes it), that ranks run on: steps "
        "are predicted on it, and shown beside what is measured; None: only `parallel.layout: auto` predicts, on the "
        "estimated machine that it finds",
    )
    min_world: PositiveInt | None = Field(None, description="smallest world to go on with; None: never shrink")
    max_attempts: PositiveInt = Field(3, description="failed launches in a row, without a new checkpoint between")
    backoff_s: Annotated[float, Field(ge=0)] = Field(
        1.0, description="wait before attempt 2; doubles with each failure"
    )
    max_backoff_s: Seconds = Field(60.0, description="longest wait between two attempts")
    start_timeout_s: Seconds = Field(120.0, description="for all ranks to be started by their agents")
    collective_timeout_s: Seconds = Field(300.0, description="Gloo, NCCL and store timeout given to the workers")
    hang_timeout_s: Seconds | None = Field(300.0, description="no progress of a rank's step for this long is a hang")
    silence_timeout_s: Seconds = Field(20.0, description="an agent not heard of for this long is lost")
    grace_s: Seconds = Field(10.0, description="for a last checkpoint on Ctrl-C, SIGTERM or decommissioning")
    interface: str | None = Field(
        None, description="network interface of the ring; None: the one that reaches the driver"
    )
    log_lines_per_s: PositiveFloat | None = Field(
        200.0,
        description="per rank; more are counted, not sent; None: all, and who prints waits for the driver",
    )
    ranks_per_host: PositiveInt | None = Field(
        None, description="ranks that each host of launch.on: hosts has room for; None: launch.world over the hosts"
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None,
        description="that the driver of launch.on: hosts listens on; None: MASTER_PORT, under torchrun the next one",
    )
    hosts_wait_s: Seconds = Field(
        HOSTS_WAIT_S,
        description="for all hosts of launch.on: hosts to come, or for room on Spark or Ray, as long as a cluster that "
        "grows by itself takes; at the start, and where there is too little for another attempt",
    )
    cpus_per_rank: PositiveInt | None = Field(
        None, description="cores each rank asks of Spark, as a stage-level profile, or Ray; None: spark.task.cpus, or 1"
    )
    gpus_per_rank: Annotated[int, Field(ge=0)] = Field(
        0,
        description="GPUs each rank asks of Spark, as a stage-level profile, or Ray; 0: "
        "spark.task.resource.gpu.amount, or none",
    )

    @property
    def is_without_spark(self) -> bool:
        return self.on in ("hosts", "ray")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.min_world is not None and self.min_world > self.world:
            raise ValueError(f"min_world = {self.min_world}: must not be above world = {self.world}")
        return self
