"""What a model is worth on held-out rows: its scores by task, baselines beside it, and how the splits differ."""
