"""Imports torch and what ranks use of it once, forks the ranks of each launch, waits, and leaves none behind.

Reads launches from standard input, one JSON line each: world, function ("module:name"), payload, out (a folder),
engine, and for ranks that are alone on a network the commands that set up its namespace. Answers with two lines: the
process group of the launch, and when it has ended its exit code. Each rank calls function(rank, world, payload); its
result is torch.save'd to out/<rank>.pt, what is printed goes to out/log.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sparkring.conf.references import load_reference
from tests.helpers.ports import unused_port


def horovod_environment(rank: int, world: int, port: int) -> dict[str, str]:
    sizes = {"RANK": rank, "SIZE": world, "LOCAL_RANK": rank, "LOCAL_SIZE": world, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    return {f"HOROVOD_{key}": str(value) for key, value in sizes.items()} | {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": "lo",
    }


def run_rank(rank: int, world: int, function: str, payload: dict, out: Path) -> int:
    ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the fork_server
    import torch

    try:
        result = load_reference(function)(rank, world, payload)
        torch.save(result, out / f"{rank}.pt")
        return 0
    except BaseException:
        (out / f"{rank}.error").write_text(traceback.format_exc())
        traceback.print_exc()
        return 1


def leave_network(commands: str) -> None:
    """Move this process to a network namespace of its own, in which `commands` then run."""
    libc = ctypes.CDLL("libc.so.6", use_errno=True)
    if libc.unshare(0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["sh", "-c", commands], check=True)


def launch(world: int, function: str, payload: dict, out: Path, engine: str) -> int:
    """Exit code 0 when every rank's was."""
    port = 0
    if engine == "horovod":
        from horovod.runner.http.http_server import RendezvousServer

        port = RendezvousServer(verbose=0).start()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(unused_port()), GLOO_SOCKET_IFNAME="lo")
    children = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
            if engine == "horovod":
                os.environ.update(horovod_environment(rank, world, port))
            code = run_rank(rank, world, function, payload, out)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        children[pid] = rank
    worst = 0
    while children:
        pid, status = os.wait()
        rank = children.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code != 0 and not worst:
            worst = 1
            time.sleep(1.0)  # let the others report their own error
            print(f"rank {rank} ended with {code}", file=sys.stderr)
            for other in children:
                os.kill(other, signal.SIGKILL)
    return worst


def main() -> None:
    ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)  # never outlive the tests either
    # OMP_NUM_THREADS says one thread. torch.set_num_threads would make a pool here, which a forked process makes anew
    # when first asked for it: of two threads that ask at once one gets none ("Invalid thread pool") and aborts.
    with contextlib.suppress(ImportError, OSError):
        import horovod.torch  # noqa: F401
    import torch._dynamo  # with sympy; the first step of many ranks would import it
    import torch.distributed.pipelining  # noqa: F401

    import sparkring.training.worker.train  # noqa: F401

    gc.freeze()  # a rank's collector need not walk (and so copy) what all of them share
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)
            log = os.open(f"{request['out']}/log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if commands := request.pop("network", None):
                leave_network(commands)
            code = launch(**{**request, "out": Path(request["out"])})
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
