"""After a job: what is deleted, who is told, what it cost."""
