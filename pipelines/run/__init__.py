"""What every command that runs stands on: Spark's session, run folders, signals, exit codes."""
