"""What a person who waits for a job sees: how far Spark is, how far training is, and what came of it."""
