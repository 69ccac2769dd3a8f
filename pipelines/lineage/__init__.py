"""Where a model came from: the sources of its rows, recorded and shown, and what it takes to train its run again."""
