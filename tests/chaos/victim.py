"""The driver that chaos is done to: a small exact training job under run_with_recovery, events as JSON on stdout.

    victim.py MASTER FOLDER STEPS WORLD FIRST_ATTEMPT

The model is linear regression in float64 by SGD; the rows of step s are s*24 .. s*24+23, so what must have been
consumed is known, and the parameters' last bits are those of an undisturbed run. Checkpoints and the audit of rows are
the product's own, below FOLDER. Exit code 0 when all steps are made.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

ROWS = 24  # per global batch; divisible by worlds 1, 2 and 3
CHECKPOINT_STEPS = 10
PRELOAD = ("torch", "sparkring.training.checkpoint.checkpointer")


def train(ctx: Any) -> dict[str, Any]:
    """One rank. Returns whether all steps are made; every checkpoint is announced with the parameters it holds."""
    import torch
    import torch.distributed as dist

    from sparkring.conf.storage import open_storage
    from sparkring.training.checkpoint.checkpointer import Checkpointer
    from sparkring.training.checkpoint.peers import torch_peers
    from sparkring.training.data.audit.log import FORMAT, AuditHeader, AuditLog
    from sparkring.training.data.batch import Batch

    folder, steps = open_storage(ctx.payload["folder"]), ctx.payload["steps"]
    ctx.event("pid", {"pid": os.getpid()})
    dist.init_process_group("gloo")
    said: dict[int, list[float]] = {}

    def announce(info: Any) -> None:
        ctx.event("checkpoint", {"step": info.step, "w": said[info.step]})

    checkpoints = Checkpointer(folder.at("checkpoints"), torch_peers(timedelta(seconds=60)), on_commit=announce)
    header = AuditHeader(
        format=FORMAT, attempt=ctx.attempt, rank=ctx.rank, size=ctx.world_size, dataset="", order_state={}
    )
    audit = AuditLog(folder.at("audit"), header)
    state = {"w": torch.zeros(4, dtype=torch.float64)}
    latest = checkpoints.latest()
    begin = checkpoints.load(latest, state).trainer["step"] if latest else 0
    w = state["w"]
    step = begin
    stop = False
    while step < steps and not stop:
        ctx.heartbeat(step + 1, "step")
        ids = torch.arange(step * ROWS, (step + 1) * ROWS)[ctx.rank :: ctx.world_size]
        x = torch.stack([torch.sin(ids.double() * (k + 1)) for k in range(4)], dim=1)
        y = x @ torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64) + torch.cos(ids.double())
        gradient = 2 * x.T @ (x @ w - y) / ROWS
        packed = torch.cat([gradient, torch.tensor([float(ctx.should_stop())], dtype=torch.float64)])
        dist.all_reduce(packed)
        w -= 0.05 * packed[:4]
        stop = bool(packed[4] > 0)
        audit.record(0, step, Batch({}, len(ids), ROWS, (step + 1) * ROWS, ids=ids))
        step += 1
        if step % CHECKPOINT_STEPS == 0 or stop or step == steps:
            audit.flush()
            said[step] = w.tolist()
            checkpoints.save(step, state, {"step": step})
        time.sleep(ctx.payload["sleep_s"])
    checkpoints.wait()
    dist.destroy_process_group()
    return {"finished": step >= steps}


def main() -> None:
    master, folder, steps, world, first_attempt = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    import cloudpickle
    from pyspark.sql import SparkSession

    from sparkring.conf.storage import open_storage
    from sparkring.pipelines.launch.barrier import LaunchOptions
    from sparkring.pipelines.launch.recover import RestartableJob, run_with_recovery
    from sparkring.training.checkpoint.catalog import committed
    from sparkring.training.launch.attempt import Limits
    from sparkring.training.launch.job import JobSpec
    from sparkring.training.launch.restart import RestartPolicy

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    host = os.environ.get("SPARK_LOCAL_IP", "127.0.0.1")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": host,
        "spark.driver.bindAddress": host,
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.driver.memory": "512m",
        "spark.excludeOnFailure.enabled": "false",
        "spark.decommission.enabled": "true",
    }
    own_timeouts = "VICTIM_DEFAULT_TIMEOUTS" not in os.environ
    if own_timeouts:  # a soak has little time
        settings |= {"spark.network.timeout": "20s", "spark.network.timeoutInterval": "5s"}
        settings |= {"spark.executor.heartbeatInterval": "2s"}
    builder = SparkSession.builder.master(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    say("up", {})

    def on_event(event: Any) -> None:
        say(type(event).__name__, {k: v for k, v in asdict(event).items() if k not in ("values", "text")})

    def latest_step() -> int | None:
        good, _ = committed(open_storage(folder).at("checkpoints"))
        return good[-1].step if good else None

    sleep_s = float(os.environ.get("VICTIM_SLEEP_S", "0.05"))
    job = JobSpec(train, {"folder": folder, "steps": steps, "sleep_s": sleep_s}, preload=PRELOAD)
    result = run_with_recovery(
        spark,
        RestartableJob(
            lambda attempt, size: job,
            RestartPolicy(world, 1, 1000, 0.2, 2.0, cool_down_s=5.0 if own_timeouts else 60.0),
            latest_step,
            is_finished=lambda r: r.result["finished"],
            first_attempt=first_attempt,
        ),
        on_event,
        options=LaunchOptions(Limits(90, 4.0), silence_timeout_s=6.0, patience_s=6.0)
        if own_timeouts
        else LaunchOptions(Limits(90, 300.0)),
    )
    say("result", {**result.result, "world": result.world})
    spark.stop()


def say(kind: str, data: dict[str, Any]) -> None:
    print(json.dumps({"kind": kind, "at": time.time(), **data}), flush=True)


if __name__ == "__main__":
    main()
