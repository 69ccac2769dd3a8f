"""From row groups of a file to batches: columns and cells decoded, rows held in pages, cut and gathered."""
