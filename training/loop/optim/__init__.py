"""Optimizers, of ours and of the user's, and the learning rates of their steps."""
