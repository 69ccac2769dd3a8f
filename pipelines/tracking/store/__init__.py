"""MLflow itself: what the journal says is written to its store, and what its store holds is read."""
