"""Every message between processes, and every event of the driver's callback.

A message goes between driver, agent, fork server and rank. It is a frozen dataclass; channel/frames.py sends it as a
JSON object of its fields with `kind`, the class name. What a side accepts is one of the unions at the end: other kinds,
unknown or missing fields, other types and values over their bound are refused. Seconds end in `_s`, sizes in bytes
unless they say characters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from sparkring.conf.rank_info import RankInfo
from sparkring.training.launch.channel.codec import AtMost, OneLine
from sparkring.training.launch.failure import Failure
from sparkring.training.launch.host.info import HostInfo
from sparkring.training.launch.topology import AgentInfo, Child, Role

MAX_TRACEBACK_CHARS = 20_000
MAX_STACKS_CHARS = 200_000
MAX_LOG_LINES = 1000  # in one message
MAX_LAST_LINES = 100
MAX_LINE_CHARS = 4096  # a longer line is cut, and says so in the characters of MAX_CUT_LINE_CHARS
MAX_CUT_LINE_CHARS = MAX_LINE_CHARS + 64
MAX_PEERS = 8  # hosts that each host tries to reach
MAX_VALUE_CHARS = 4 * (1 << 20) // 3 + 4  # base64 of a megabyte, the largest value of the rendezvous store

Name = Annotated[str, OneLine(512)]
Line = Annotated[str, AtMost(MAX_CUT_LINE_CHARS)]
Lines = Annotated[tuple[Line, ...], AtMost(MAX_LOG_LINES)]
Base64 = Annotated[str, AtMost(MAX_VALUE_CHARS)]
StoreMethod = Literal["GET", "PUT", "DELETE"]


# ---- connection: agent and driver


@dataclass(frozen=True)
class Hello:
    """Agent to driver, first on every connection: who it is, and the launch's secret."""

    agent: Name
    secret: Name


@dataclass(frozen=True)
class Welcome:
    """Driver to agent: accepted; `received` is the number of the agent's last message that has arrived."""

    received: int


@dataclass(frozen=True)
class Received:
    """Driver to agent: all messages up to `number` have been taken, so the agent's window moves on."""

    number: int


@dataclass(frozen=True)
class KeepAlive:
    """Agent to driver, where no heartbeat is due: the agent is there."""


@dataclass(frozen=True)
class Joined:
    """Sent by a self-started host (torchrun, SLURM): its arguments, equal on all hosts but for `rank` and `process`."""

    rank: int  # of the host
    process: Name  # a random name: two hosts that were given one rank have two
    recipe: str  # digest of the resolved recipe
    dataset: str  # fingerprint
    problem: str  # what keeps this host from running ranks; empty: nothing


@dataclass(frozen=True)
class AgentReady:
    """Agent to driver: a rank can run here. `joined` as of Joined, of an agent that came by itself."""

    agent: AgentInfo
    hostname: str
    host: HostInfo
    joined: Joined | None = None


@dataclass(frozen=True)
class AgentLeaving:
    """Agent to driver: its host is about to go; it waits for the rank's last checkpoint, and a Bye."""


@dataclass(frozen=True)
class Bye:
    """Driver to agent: end, there is nothing more to run. `code`: for the exit of an agent that came by itself."""

    code: int = 0
    why: str = ""


# ---- hosts reach each other


@dataclass(frozen=True)
class ReachPeers:
    """Driver to agent: connect to these addresses and ports of other agents."""

    peers: Annotated[tuple[Peer, ...], AtMost(MAX_PEERS)]


@dataclass(frozen=True)
class Peer:
    address: str
    port: int


@dataclass(frozen=True)
class PeersReached:
    """Agent to driver: the peers that could not be reached."""

    failed: Annotated[tuple[PeerFailure, ...], AtMost(MAX_PEERS)]


@dataclass(frozen=True)
class PeerFailure:
    address: str
    port: int
    reason: str


# ---- rendezvous of Horovod


@dataclass(frozen=True)
class StoreRequest:
    """Agent to driver: one request of the rank's Horovod client to the attempt's key-value store."""

    id: int
    attempt: int
    method: StoreMethod
    key: str
    value: Base64


@dataclass(frozen=True)
class StoreReply:
    """Driver to agent: the answer to the request of this id; None for a key that is not there."""

    id: int
    value: Base64 | None


# ---- a rank's life, and a server's


@dataclass(frozen=True)
class Entry:
    """What a rank calls. A function is pickled into `call`, a script travels in `source`."""

    form: Literal["function", "name", "script", "module"]
    name: str  # of the function; "module:function"; the script's path; the module to run as `python -m` does
    call: str = ""  # base64 of the pickled (function or None, args, kwargs)
    source: str = ""
    args: tuple[str, ...] = ()  # of a script or module
    folder: str | None = None  # where it runs
    archive: str | None = None  # a .zip of that folder


@dataclass(frozen=True)
class ServerAddress:
    """Where a server process of the attempt listens."""

    address: str
    port: int


@dataclass(frozen=True)
class RankStart:
    """What a rank is started with, and a server is not."""

    rank_info: RankInfo
    results: str | None = None  # folder (URI) for large results
    servers: tuple[ServerAddress, ...] = ()  # by index
    replacement: int = 0  # processes that this rank has had before in this attempt


@dataclass(frozen=True)
class ServerStart:
    """What a server is started with, and a rank is not."""

    servers: int  # of all hosts
    world_size: int
    address: str  # of the interface to listen on


@dataclass(frozen=True)
class StartChild:
    """Driver to agent, agent to fork server (with file descriptors): start a process, with `rank` or `server`."""

    child: Child
    attempt: int
    entry: Entry
    payload: dict[str, Any]
    env: dict[str, str]
    rank: RankStart | None = None
    server: ServerStart | None = None
    server_secret: str = field(default="", repr=False)  # hexadecimal; by which ranks and servers know each other


@dataclass(frozen=True)
class KillChildren:
    """Driver to agent, agent to fork server: SIGKILL the processes of this role and all they have started."""

    role: Role


@dataclass(frozen=True)
class DumpStacks:
    """Driver to agent: send the stacks of the rank."""


@dataclass(frozen=True)
class StopTraining:
    """Driver to agent, agent to rank: the end is wanted, with a checkpoint. For programs without cuts."""


@dataclass(frozen=True)
class WriteCheckpoint:
    """Driver to agent, agent to rank: write a checkpoint and continue. For programs without cuts."""


@dataclass(frozen=True)
class OfferCut:
    """Driver to agent, agent to rank: offer a step after which all ranks can act together (cuts.py)."""

    number: int  # of the cut, from 1


@dataclass(frozen=True)
class CutAt:
    """Driver to agent, agent to rank: act after exactly this step, as every rank does."""

    number: int
    step: int
    stop: bool  # end, with a checkpoint
    checkpoint: bool


@dataclass(frozen=True)
class ChildForked:
    """Fork server to agent: the process exists."""

    child: Child
    pid: int


@dataclass(frozen=True)
class ChildExited:
    """Fork server to agent: the process has ended. `status`: exit code, or minus the signal."""

    child: Child
    status: int


@dataclass(frozen=True)
class FromChild:
    """The base of what concerns a rank or a server of one attempt."""

    child: Child
    attempt: int


@dataclass(frozen=True)
class FromRank:
    """The base of what concerns a rank, and never a server, of one attempt."""

    rank: int
    attempt: int

    @property
    def child(self) -> Child:
        return Child("rank", self.rank)


@dataclass(frozen=True)
class RankRunning(FromRank):
    """Rank to agent to driver: its entry is about to be called."""


@dataclass(frozen=True)
class Heartbeat(FromRank):
    """Rank to agent to driver, and an event: progress. The agent keeps the newest and sends two a second."""

    step: int
    phase: str


@dataclass(frozen=True)
class MeanPart:
    """A rank's part of a mean over ranks: the sum of all `total`s by the sum of all `count`s."""

    total: float
    count: float


@dataclass(frozen=True)
class WindowTiming:
    """Seconds of one rank in one logging window, as means per step unless they say otherwise."""

    step_s: float  # forward, backward and update, with the waits for other ranks
    wait_s: float  # for other ranks, in step_s
    data_stall_s: float  # for the step's batch, before step_s
    busy_sd_s: float  # standard deviation, over the window's steps, of each one's busy_s
    between_s: dict[str, float]  # between steps, by cause: `evaluate_s`, `checkpoint_stall_s`
    reader_s: dict[str, float]  # in the reader and its threads, by cause: `decode_s`, ...
    once_s: dict[str, float]  # the reader's first seconds, by cause, in all: `first_batch_s`, ...

    @property
    def busy_s(self) -> float:
        """Data and computation of the rank's own."""
        return max(0.0, self.step_s - self.wait_s) + self.data_stall_s

    @property
    def loop_s(self) -> dict[str, float]:
        """Seconds of the training loop, by cause."""
        own = {"step_s": self.step_s, "wait_s": self.wait_s, "data_stall_s": self.data_stall_s}
        return own | self.between_s


@dataclass(frozen=True)
class RankMetrics(FromRank):
    """Rank to agent to driver, and an event.

    `timing`: of the logging window that ends here; None: none does. It has no default, so that no window's report can
    leave it out: stragglers are found by it. `means`: parts of means over all ranks, which the driver makes and adds to
    rank 0's `values`, in the event.
    """

    step: int
    values: dict[str, float]
    timing: WindowTiming | None
    means: dict[str, MeanPart] = field(default_factory=dict)


@dataclass(frozen=True)
class CutOffered(FromRank):
    """Rank to agent to driver: a step that this rank does not pass until the cut is announced."""

    number: int
    step: int


@dataclass(frozen=True)
class CheckpointWanted(FromRank):
    """Rank to agent to driver: time for a checkpoint of all ranks."""


@dataclass(frozen=True)
class ChildEvent(FromChild):
    """Process to agent to driver, and an event: what the program wants the driver to know."""

    name: str
    data: dict[str, Any]


@dataclass(frozen=True)
class RankResult(FromRank):
    """Rank to agent to driver: what the entry has returned (results.py), in `data` or in a stored file."""

    form: Literal["json", "torch"]
    data: str | None  # JSON, or base64 of torch's file
    stored: StoredResult | None = None


@dataclass(frozen=True)
class StoredResult:
    folder: str  # URI
    file: str
    host: str


@dataclass(frozen=True)
class ChildError(FromChild):
    """Process to agent to driver: its entry has raised an exception."""

    error_type: str
    message: Annotated[str, AtMost(MAX_TRACEBACK_CHARS)]
    traceback: Annotated[str, AtMost(MAX_TRACEBACK_CHARS)]
    is_value_error: bool


@dataclass(frozen=True)
class LogLines(FromChild):
    """Agent to driver, and an event: output. No lines: it has printed, and not yet to the end of a line."""

    lines: Lines


@dataclass(frozen=True)
class Stacks(FromRank):
    """Agent to driver, and an event: Python stacks of all threads of the rank."""

    text: Annotated[str, AtMost(MAX_STACKS_CHARS)]


@dataclass(frozen=True)
class ChildEnded(FromChild):
    """Agent to driver, and an event: the process and all it has started are gone."""

    status: int | None  # exit code, or minus the signal; None: lost with its fork server
    words: str  # "exited with code 1", "killed by SIGKILL", ...
    was_killed: bool = False  # by the driver's order
    last_lines: Annotated[tuple[Line, ...], AtMost(MAX_LAST_LINES)] = ()


@dataclass(frozen=True)
class ServerReady(FromChild):
    """Server to agent to driver: it listens there."""

    address: str
    port: int


# ---- events that no agent sends


@dataclass(frozen=True)
class RankReplaced(FromRank):
    """A new process of the rank runs, in place of one that died; the others went on."""

    replacement: int  # 1 for the first
    took_s: float  # from the end of the old one until the new one's entry was about to run


@dataclass(frozen=True)
class AttemptStarted:
    """All ranks run."""

    attempt: int
    world: int
    start_s: float


@dataclass(frozen=True)
class LateLogLines(FromRank):
    """Output after the first failure of a rank that is not its cause."""

    lines: Lines


@dataclass(frozen=True)
class Straggler(FromRank):
    """The rank has been slow in several successive logging windows."""

    host: str
    step: int
    busy_s: float  # a step
    others_wait_s: float  # a step, mean over the other ranks


@dataclass(frozen=True)
class ChildFailed(FromChild):
    """The rank or server whose failure has ended the attempt."""

    failure: Failure


@dataclass(frozen=True)
class AttemptEnded:
    """An attempt has ended before training was finished, and what follows."""

    attempt: int
    world: int
    cause: str
    words: str
    step: int | None  # last one reported
    steps_lost: int  # that the next attempt repeats
    decision: str
    next_world: int
    why: str  # of the decision


@dataclass(frozen=True)
class Recovered:
    """The attempt has made its first new step."""

    attempt: int
    recover_s: float  # since the last step before the first failure in a row


# ---- who accepts what

FromRankToAgent: TypeAlias = (
    RankRunning | Heartbeat | RankMetrics | ChildEvent | RankResult | ChildError | CutOffered | CheckpointWanted
)
FromServerToAgent: TypeAlias = ServerReady | ChildEvent | ChildError
ToDriver: TypeAlias = (
    FromRankToAgent
    | ServerReady
    | Hello
    | KeepAlive
    | AgentReady
    | AgentLeaving
    | PeersReached
    | StoreRequest
    | LogLines
    | Stacks
    | ChildEnded
)
ToRank: TypeAlias = StopTraining | WriteCheckpoint | OfferCut | CutAt
ToForkServer: TypeAlias = StartChild | KillChildren
FromForkServer: TypeAlias = ChildForked | ChildExited
ToAgent: TypeAlias = ToRank | ToForkServer | Welcome | Received | Bye | ReachPeers | StoreReply | DumpStacks
Message: TypeAlias = ToDriver | ToAgent | FromForkServer
Event: TypeAlias = (
    AttemptStarted
    | Heartbeat
    | RankMetrics
    | ChildEvent
    | LogLines
    | LateLogLines
    | Stacks
    | Straggler
    | ChildEnded
    | RankReplaced
    | ChildFailed
    | AttemptEnded
    | Recovered
)
