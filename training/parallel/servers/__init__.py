"""Train on servers that hold the weights: ranks form no process group, and may be at different steps."""
