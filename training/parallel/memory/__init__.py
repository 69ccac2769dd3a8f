"""Measure the memory that a rank holds."""
