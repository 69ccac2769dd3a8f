"""Ranks in Spark's barrier stages: launch, recovery, and the checks before it; 'sparkring launch'."""
