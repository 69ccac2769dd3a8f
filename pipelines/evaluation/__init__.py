"""A model's scores on held-out rows by task, its baselines, and how the splits differ."""
