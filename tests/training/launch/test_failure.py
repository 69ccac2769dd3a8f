"""Failures: which one began, what an exception means, and what the error says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkring.training.launch.failure import Failure, WorkerFailed, because_of_death, cause_of, first_failure
from sparkring.training.launch.topology import Child


def failed(rank: int, cause: str, words: str, error: str = "", message: str = "") -> Failure:
    return Failure(Child("rank", rank), f"h{rank}", cause, words, error_type=error, message=message)  # type: ignore[arg-type]


GLOO = "[/p/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:3"
HVD = "Horovod has been shut down. This was caused by an exception on one of the ranks"


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ([failed(0, "exception", "x", "RuntimeError", GLOO), failed(1, "signal", "killed by SIGKILL")], 1),
        ([failed(0, "exception", "x", "HorovodInternalError", HVD), failed(1, "exception", "x", "KeyError", "'a'")], 1),
        ([failed(0, "exception", "x", "KeyError", "'a'"), failed(1, "signal", "killed by SIGKILL")], 0),
        ([failed(0, "exception", "x", "RuntimeError", GLOO), failed(1, "exception", "x", "RuntimeError", GLOO)], 0),
        ([failed(0, "signal", "killed by SIGABRT"), failed(1, "exit", "exited with code 3")], 1),
        ([failed(0, "exception", "x", "torch.distributed.DistBackendError", "NCCL communicator was aborted"),
          failed(1, "memory", "killed by the kernel: out of memory")], 1),
        ([failed(0, "exception", "x", "RuntimeError", "Connection closed by peer [h]:5"), failed(2, "lost", "was")], 2),
    ],
)  # fmt: skip
def test_the_failure_that_began(failures: list[Failure], first: int) -> None:
    assert first_failure(failures).child.index == first


@pytest.mark.parametrize(
    ("error", "message", "cause"),
    [
        ("MemoryError", "", "memory"),
        ("OSError", "[Errno 28] No space left on device", "disk"),
        ("CheckpointError", "writing ... rank 1 of 3: OSError: [Errno 122] Disk quota exceeded", "disk"),
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...", "gpu memory"),
        ("torch.cuda.OutOfMemoryError", "CUDA out of memory.", "gpu memory"),
        ("RuntimeError", "CUDA out of memory. Tried to allocate 2.00 GiB", "gpu memory"),
        ("RuntimeError", "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory", "memory"),
        ("RuntimeError", "CUDA error: out of memory\nCUDA kernel errors might be ...", "gpu memory"),
        ("RuntimeError", "CUDA driver error: out of memory", "gpu memory"),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "gpu memory"),
        ("OSError", "[Errno 12] Cannot allocate memory", "memory"),
        ("numpy._core._exceptions._ArrayMemoryError", "Unable to allocate 7.00 GiB for an array", "memory"),
        ("pyarrow.lib.ArrowMemoryError", "malloc of size 9 failed", "memory"),
        ("torch.AcceleratorError", "CUDA error: device-side assert triggered\nSearch for ...", "gpu error"),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered", "gpu error"),
        ("OSError", "[Errno 13] Permission denied: '/runs'", "exception"),
    ],
)  # fmt: skip
def test_what_an_exception_says_of_the_machine(error: str, message: str, cause: str) -> None:
    assert cause_of(error, message) == cause


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [("gpu memory", "lower train.global_batch or raise parallel.accumulate"), ("gpu error", "CUDA_LAUNCH_BLOCKING=1")],
)
def test_what_to_do_about_a_gpu_is_in_the_error(cause: str, remedy: str) -> None:
    advice = next(line for line in str(WorkerFailed(failed(0, cause, "raised x"))).splitlines() if "what to do" in line)
    assert remedy in advice


def test_a_rank_that_cannot_take_the_place_of_a_dead_one_failed_by_that_death() -> None:
    """Two deaths while checkpoints are written, at whatever steps, are not the same exception of the user's twice."""
    death = replace(failed(1, "signal", "killed by SIGKILL"), step=40, phase="step")
    refused = replace(failed(1, "exception", "raised RuntimeError: rank 1 died", "RuntimeError", "rank 1 died"), step=0)
    found = because_of_death(refused, death)
    assert found.cause == "signal" and not found.error_type
    assert found.headline == (
        "rank 1 on h1 killed by SIGKILL; its next process raised RuntimeError: rank 1 died at step 40 (step)"
    )
    later = replace(refused, step=41)
    assert because_of_death(later, death) is later and because_of_death(refused, None) is refused


@pytest.mark.parametrize(
    ("innermost", "is_value_error", "shown"),
    [
        ("/w/sparkring/training/data/files.py", True, False),
        ("/w/sparkring/training/data/files.py", False, True),  # a defect of ours: frames say where
        ("/usr/lib/python3.11/json/decoder.py", True, True),  # another's words: frames say of what
        ("/w/sparkring/.venv/lib/python3.11/site-packages/torch/nn.py", True, True),
        ("/home/me/model.py", True, True),
    ],
)
def test_a_value_that_our_code_refuses_is_said_once_without_frames(
    innermost: str, is_value_error: bool, shown: bool
) -> None:
    """A shard that was cut had 30 lines of frames around it, and once more by each rank."""
    ours = "/w/sparkring/training/worker/train.py"
    frames = "".join(f'  File "{file}", line 7, in f\n    f()\n' for file in (ours, innermost))
    message = "train-0.parquet: 10 bytes, the manifest says 11; rebuild the dataset"
    of_rank = replace(
        failed(0, "exception", f"raised DataError: {message}", "DataError", message),
        traceback=f"Traceback (most recent call last):\n{frames}DataError: {message}\n",
        is_value_error=is_value_error,
    )
    text = str(WorkerFailed(of_rank, [replace(of_rank, child=Child("rank", 1))]))
    assert ("traceback of rank 0" in text) == shown
    assert "then: rank 1 the same" in text.splitlines()
    headline = replace(of_rank, step=0, phase="ring").headline
    assert headline == f"rank 0 on h0 at step 0 (ring) raised DataError: {message}", "not: rebuild it at step 0"


def test_an_error_says_who_what_when_and_what_to_do() -> None:
    first = Failure(
        Child("rank", 1),
        "h1 (10.0.0.1)",
        "disk",
        "raised OSError: full",
        step=7,
        phase="checkpoint",
        last_lines=("bye",),
    )
    lines = str(WorkerFailed(first, [failed(0, "signal", "killed by SIGABRT")])).splitlines()
    assert lines[0] == "rank 1 on h1 (10.0.0.1) raised OSError: full at step 7 (checkpoint)"
    assert lines[1] == "then: rank 0 killed by SIGABRT"
    assert lines[2].startswith("what to do: free space there")
    assert "what to do" not in str(WorkerFailed(failed(0, "exception", "raised KeyError: 'price'")))
