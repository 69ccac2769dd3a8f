"""Exact scores of held-out predictions, by task."""
