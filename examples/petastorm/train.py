"""A DataFrame, written once as Parquet, read by petastorm, and trained on with plain torch.

    python examples/petastorm/train.py /tmp/petastorm-example

Prints the loss of each epoch.
"""

from __future__ import annotations

import sys

import torch
from pyspark.sql import SparkSession

from sparkring.training.data.petastorm_adapter.spark import make_spark_converter

EPOCHS = 3


def main(folder: str) -> None:
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    frame = spark.range(4096).selectExpr("cast(id % 64 as float) / 64 as x", "cast(id % 64 as float) / 32 + 1 as y")
    converter = make_spark_converter(frame, cache=f"file://{folder}", row_group_rows=512, files=2)
    spark.stop()
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with converter.make_torch_dataloader(batch_size=64, num_epochs=EPOCHS) as loader:
        losses = []
        for batch in loader:
            loss = torch.nn.functional.mse_loss(model(batch["x"].float()[:, None])[:, 0], batch["y"].float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    steps = len(loader) // EPOCHS
    for epoch in range(EPOCHS):
        print(f"epoch {epoch}: loss {sum(losses[epoch * steps : (epoch + 1) * steps]) / steps:.4f}")
    converter.delete()


if __name__ == "__main__":
    main(sys.argv[1])
