"""After a job: delete old runs, send notices, count the cost."""
