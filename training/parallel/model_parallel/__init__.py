"""What cuts the model: tensor, context and pipeline parallelism."""
