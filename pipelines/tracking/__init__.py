"""MLflow: the driver's tracker appends to a journal, a thread sends the journal to the store."""
