"""A training function of one's own that survives what it runs on: `python examples/elastic/train.py FOLDER [MASTER]`.

FOLDER is where checkpoints are: a path that every host reaches. It runs on 2 to 4 ranks, as many as there is room for.
"""

import os
import sys

from pyspark.sql import SparkSession

from sparkring.pipelines.launch.recover import RestartableJob, run_with_recovery
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.restart import RestartPolicy

STEPS = 2000


def train(ctx, folder, lr=0.05):
    """One rank: DDP on rows that follow from step and rank, so the samples of a step do not depend on the world."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    path, step = f"{folder}/checkpoint.pt", 0
    if os.path.exists(path):
        state = torch.load(path, weights_only=True)
        model.module.load_state_dict(state["model"])
        step = state["step"]
    while step < STEPS:
        ctx.heartbeat(step + 1, "step")  # no change of it for long is a hang
        rows = torch.randn(96, 8, generator=torch.Generator().manual_seed(step))[ctx.rank :: ctx.world_size]
        loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        stop = torch.tensor(float(ctx.should_stop()))  # heard of at another moment by each rank: agree on it
        dist.all_reduce(stop)
        if step % 100 == 0 or stop:
            if ctx.rank == 0:
                torch.save({"model": model.module.state_dict(), "step": step}, f"{path}.new")
                os.replace(f"{path}.new", path)
                ctx.event("checkpoint", {"step": step})  # the moment at which the world may grow
            dist.barrier()
        if stop:
            break
    dist.destroy_process_group()
    return {"finished": step >= STEPS, "loss": loss.item(), "weight": model.module.weight.detach()}


def saved_step(folder):
    """Step of the last checkpoint: what failures are counted by, as those before it are made good."""
    import torch

    path = f"{folder}/checkpoint.pt"
    return torch.load(path, weights_only=True)["step"] if os.path.exists(path) else None


def main(folder, master="local[4]"):
    spark = SparkSession.builder.master(master).getOrCreate()
    result = run_with_recovery(
        spark,
        RestartableJob(
            lambda attempt, world: JobSpec(train, args=(folder,), kwargs={"lr": 0.1}),
            RestartPolicy(world=4, min_world=2, max_attempts=3),
            latest_step=lambda: saved_step(folder),
            is_finished=lambda result: result.result["finished"],
        ),
    )
    print(f"loss {result.result['loss']:.2e} on {result.world} ranks, weight {result.result['weight'].tolist()}")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
