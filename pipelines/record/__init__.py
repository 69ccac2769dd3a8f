"""What is kept of a run so that it can be made again, and compared."""
