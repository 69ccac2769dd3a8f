"""Spread one step over ranks. Enter by `build_strategy` (compose.py)."""
