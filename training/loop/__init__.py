"""The training loop: steps, what happens between two of them, and the evaluation of a split."""
