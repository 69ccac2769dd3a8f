"""A cluster as data: its devices, nodes, network and storage, and what share of them training reaches.

Units are those of data sheets; properties that end in `_s`, `_bytes` or `per_s` are in seconds and bytes. Bandwidths
are of one direction.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from sparkring.conf.plain_text import count_of
from sparkring.conf.schema import Strict, refuse_fp8

Precision = Literal["fp32", "bf16", "fp16"]
Share = Annotated[float, Field(gt=0, le=1)]
# Beyond any hardware: a value in another unit is refused
Tflops = Annotated[float, Field(gt=0, le=100_000)]
GbPerS = Annotated[float, Field(gt=0, le=20_000)]
Gib = Annotated[float, Field(gt=0, le=32_768)]
Microseconds = Annotated[float, Field(ge=0, le=1e6)]
# How far predictions were where nothing was fitted: across GPUs, and benchmarks/results/plan_here_2core_202611.md
UNMEASURED = {
    "cuda": "across GPUs such predictions were 25 to 41 % off",
    "cpu": "on CPUs steps took up to 2.7 times as long as such predictions",
}
MICRO, GIGA, GIB, DAY_S = 1e-6, 1e9, 2**30, 86_400.0


class Device(Strict):
    """What one rank computes on."""

    name: str = Field(description="as it is sold, such as A100-SXM4-80GB")
    type: Literal["cuda", "cpu"] = Field("cuda", description="what `train.device` is on it")
    peak_tflops: Annotated[dict[Precision, Tflops], BeforeValidator(refuse_fp8)] = Field(
        min_length=1, description="dense matrix products by dtype of compute, 10^12 operations per second"
    )
    memory_gib: Gib = Field(description="memory that a process can allocate, GiB")
    memory_gb_per_s: GbPerS = Field(description="bandwidth of its memory, 10^9 bytes per second")
    processors: PositiveInt = Field(108, description="multiprocessors of a GPU, cores of a CPU: tiles at once")

    def peak_flops(self, precision: str) -> float:
        """Return operations per second; an unlisted dtype computes as the slowest listed one."""
        known: dict[str, float] = {str(dtype): peak for dtype, peak in self.peak_tflops.items()}
        return known.get(precision, min(known.values())) * 1e12

    @property
    def reached_flops(self) -> float:
        """The peak of the dtype whose `attention` and `depth` a cluster has: of GPUs the fastest, of CPUs fp32."""
        return self.peak_flops("fp32") if self.type == "cpu" else max(self.peak_tflops.values()) * 1e12

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB

    @property
    def memory_bytes_per_s(self) -> float:
        return self.memory_gb_per_s * GIGA


class Node(Strict):
    """One machine, and the links between its devices."""

    devices: PositiveInt = Field(description="devices of a machine")
    link_gb_per_s: GbPerS = Field(description="what a device sends to the others, 10^9 bytes per second")
    link_latency_us: Microseconds = Field(5.0, description="of a message between two of its devices, microseconds")
    turn_us: Microseconds = Field(
        0.0, description="of a message where ranks on CPUs take turns on too few cores, microseconds"
    )
    cores: PositiveInt = Field(96, description="CPU cores of a machine, which read and decode rows")
    memory_gib: Annotated[float, Field(ge=0, le=65_536)] = Field(
        0.0, description="host memory of a machine with GPUs, GiB; 0: not known, and no layout is offloaded to it"
    )
    memory_gb_per_s: GbPerS = Field(200.0, description="bandwidth of the host memory, 10^9 bytes per second")
    copy_gb_per_s: GbPerS = Field(
        12.0, description="what a device copies from or to host memory while all do, 10^9 bytes per second"
    )
    price_per_hour: NonNegativeFloat = Field(0.0, description="of a machine, US dollars; 0: not known")
    days_between_failures: PositiveFloat = Field(
        1000.0, description="mean days between failures of one machine that end a step"
    )

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB

    @property
    def memory_bytes_per_s(self) -> float:
        return self.memory_gb_per_s * GIGA

    @property
    def copy_bytes_per_s(self) -> float:
        return self.copy_gb_per_s * GIGA

    @property
    def link_bytes_per_s(self) -> float:
        return self.link_gb_per_s * GIGA

    @property
    def link_latency_s(self) -> float:
        return self.link_latency_us * MICRO

    @property
    def turn_s(self) -> float:
        return self.turn_us * MICRO

    @property
    def failures_per_s(self) -> float:
        return 1 / (self.days_between_failures * DAY_S)


class Network(Strict):
    """What connects the machines."""

    kind: Literal["ethernet", "efa", "infiniband", "roce"] = Field(description="what it is sold as")
    gbit_per_s: GbPerS = Field(description="what a machine sends, all its adapters together, 10^9 bits per second")
    latency_us: Microseconds = Field(description="of a message between two machines, microseconds")

    @property
    def bytes_per_s(self) -> float:
        return self.gbit_per_s * GIGA / 8

    @property
    def latency_s(self) -> float:
        return self.latency_us * MICRO


class StorageSpeed(Strict):
    """What one machine reads from and writes to the storage of datasets and checkpoints."""

    read_gb_per_s: GbPerS = Field(1.0, description="10^9 bytes per second")
    write_gb_per_s: GbPerS = Field(1.0, description="10^9 bytes per second")

    @property
    def read_bytes_per_s(self) -> float:
        return self.read_gb_per_s * GIGA

    @property
    def write_bytes_per_s(self) -> float:
        return self.write_gb_per_s * GIGA


class Reached(Strict):
    """What training reaches of the hardware: parameters that `sparkring plan calibrate` fits, each of them physical.

    The formulas that use them are in training/planner/timing/roofline.py and training/planner/timing/collectives.py.
    """

    matmul: Share = Field(0.8, description="share of the peak that large matrix products reach")
    attention: Share = Field(0.5, description="share of the peak that fused attention reaches")
    memory: Share = Field(0.8, description="share of the memory's bandwidth that elementwise operations reach")
    link: Share = Field(0.75, description="share of a node's links that collectives reach")
    network: Share = Field(0.75, description="share of the network that collectives reach")
    contention: Annotated[float, Field(ge=0, le=1)] = Field(
        0.22, description="share of a device that an exchange takes from compute while both run"
    )
    kernel_us: Microseconds = Field(3.0, description="beginning and end of a kernel on the device, microseconds")
    launch_us: Microseconds = Field(10.0, description="what a host needs to start one operation, microseconds")
    host: Share = Field(
        0.43, description="share of the host memory's bandwidth that an optimizer's step on offloaded shards reaches"
    )
    depth: NonNegativeFloat = Field(
        300.0, description="depth of a product at which half of its time fills the pipeline"
    )


class Measurement(Strict):
    """Where and how surely `sparkring plan measure` has measured a cluster, and what its reader gives."""

    hosts: list[str] = Field(description="names of the machines")
    ranks: PositiveInt = Field(description="that measured at once, as many as train")
    spread: NonNegativeFloat = Field(description="middle half of the repetitions over their median, the widest")
    dataset: str = Field("", description="that was read; empty: none was there")
    rows_per_s: NonNegativeFloat = Field(0.0, description="that the reader gives all ranks together; 0: not measured")
    reader_threads: PositiveInt = Field(1, description="per rank")


class Cluster(Strict):
    """Machines of one kind. `sparkring plan search --cluster NAME --devices N` takes N devices of it."""

    description: str = Field("", description="one line")
    device: Device
    node: Node
    network: Network
    storage: StorageSpeed = StorageSpeed()
    reached: Reached = Reached()
    fitted_on: str = Field("", description="what `reached` was fitted on; empty: estimates")
    error: Share | None = Field(
        None, description="by how much most measured steps differ from predicted ones, a share; null: not known"
    )
    measured: Measurement | None = Field(None, description="None: from data sheets")

    @model_validator(mode="before")
    @classmethod
    def _from_older(cls, values: Any) -> Any:
        """Read a file of 0.2: of the seconds parallel to compute a share `overlap` was not lost to `contention`."""
        if not isinstance(values, dict):
            return values
        values = {key: value for key, value in values.items() if key != "reached_by_megatron"}
        reached = values.get("reached")
        if isinstance(reached, dict) and isinstance(reached.get("overlap"), (int, float)):
            rest = {key: value for key, value in reached.items() if key != "overlap"}
            values["reached"] = rest | {"contention": 1 - reached["overlap"]}
        return values

    @property
    def basis(self) -> str:
        """What predicted seconds rest on, and how far a measured step may be from them, as a sentence."""
        if self.fitted_on:
            found = f"seconds are fitted on {self.fitted_on}"
        elif self.measured is not None:
            found = f"seconds are of rates measured on {', '.join(self.measured.hosts)}"
        else:
            found = f"seconds are estimates: no step on {self.device.name} was measured"
        if self.error is not None:
            return f"{found}; expect a measured step within {self.error:.0%} of them"
        return f"{found}; {UNMEASURED[self.device.type]}"

    @property
    def machines(self) -> str:
        """What steps measured on one cluster and predicted on another must have in common."""
        return f"{self.device.name}, {self.network.kind}"

    def nodes(self, devices: int) -> int:
        """Return how many machines hold these devices. ValueError if the last one is partly used."""
        if devices < 1 or (devices > self.node.devices and devices % self.node.devices):
            raise ValueError(
                f"{count_of(devices, 'device is')} not whole machines of {self.node.devices} ({self.device.name}): "
                f"take 1 to {self.node.devices}, or a multiple of {self.node.devices}"
            )
        return -(-devices // self.node.devices)
