"""Commands that look at what a run has left: its audit of rows, its logs of parameter servers."""
