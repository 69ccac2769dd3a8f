"""The driver that chaos is done to: a small exact training job under run_with_recovery, events as JSON on stdout.

    victim.py MASTER FOLDER STEPS WORLD

The model is linear regression in float64 by SGD; the rows of step s are s*24 .. s*24+23, so what must have been
consumed is known, and the parameters' last bits are those of an undisturbed run. Exit code 0 when all steps are made.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROWS = 24  # per global batch; divisible by worlds 1, 2 and 3


def train(ctx: Any) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    folder, steps = Path(ctx.payload["folder"]), ctx.payload["steps"]
    ctx.event("pid", {"pid": os.getpid()})
    dist.init_process_group("gloo")
    path = folder / "checkpoint.json"
    state = json.loads(path.read_text()) if path.exists() else {"step": 0, "w": [0.0] * 4, "rows": 0}
    w = torch.tensor(state["w"], dtype=torch.float64)
    rows_done = state["rows"]
    for step in range(state["step"], steps):
        ctx.heartbeat(step + 1, "step")
        ids = torch.arange(step * ROWS, (step + 1) * ROWS, dtype=torch.float64)[ctx.rank :: ctx.world_size]
        x = torch.stack([torch.sin(ids * (k + 1)) for k in range(4)], dim=1)
        y = x @ torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64) + torch.cos(ids)
        gradient = 2 * x.T @ (x @ w - y) / ROWS
        packed = torch.cat([gradient, torch.tensor([float(len(ids)), float(ctx.should_stop())], dtype=torch.float64)])
        dist.all_reduce(packed)
        w -= 0.05 * packed[:4]
        rows_done += int(packed[4])
        stop = packed[5] > 0
        if (step + 1) % 10 == 0 or stop or step + 1 == steps:
            if ctx.rank == 0:
                new = {"step": step + 1, "w": w.tolist(), "rows": rows_done}
                part = path.with_suffix(f".{ctx.attempt}")
                part.write_text(json.dumps(new))
                part.replace(path)
                ctx.event("checkpoint", {"step": step + 1})
            dist.barrier()
        if stop:
            break
        time.sleep(ctx.payload["sleep_s"])
    dist.destroy_process_group()
    digest = hashlib.sha256(json.dumps(w.tolist()).encode()).hexdigest()[:16]
    return {"finished": step + 1 >= steps, "rows": rows_done, "digest": digest, "w": w.tolist()}


def main() -> None:
    master, folder, steps, world = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    import cloudpickle
    from pyspark.sql import SparkSession

    from pipelines.barrier import StageOptions
    from pipelines.recover import run_with_recovery
    from training.attempt import Limits
    from training.elastic import Policy
    from training.job import JobSpec

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    host = os.environ.get("SPARK_LOCAL_IP", "127.0.0.1")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": host,
        "spark.driver.bindAddress": host,
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.network.timeout": "20s",
        "spark.network.timeoutInterval": "5s",
        "spark.executor.heartbeatInterval": "2s",
        "spark.driver.memory": "512m",
        "spark.excludeOnFailure.enabled": "false",
        "spark.decommission.enabled": "true",
    }
    builder = SparkSession.builder.master(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    say("up", {})

    def on_event(event: dict[str, Any]) -> None:
        say(event["kind"], {k: v for k, v in event.items() if k not in ("kind", "values", "text")})

    def latest_step() -> int | None:
        path = folder / "checkpoint.json"
        return json.loads(path.read_text())["step"] if path.exists() else None

    sleep_s = float(os.environ.get("VICTIM_SLEEP_S", "0.05"))
    job = JobSpec(train, {"folder": str(folder), "steps": steps, "sleep_s": sleep_s}, preload=("torch",))
    result = run_with_recovery(
        spark,
        lambda attempt, size: job,
        Policy(world, min_world=1, max_attempts=1000, backoff_s=0.2, max_backoff_s=2.0),
        on_event,
        latest_step=latest_step,
        is_finished=lambda r: r.result["finished"],
        limits=Limits(90, 4.0),
        options=StageOptions(silence_timeout_s=6.0, patience_s=6.0),
    )
    say("result", {**result.result, "world": result.world})
    spark.stop()


def say(kind: str, data: dict[str, Any]) -> None:
    print(json.dumps({"kind": kind, "at": time.time(), **data}), flush=True)


if __name__ == "__main__":
    main()
