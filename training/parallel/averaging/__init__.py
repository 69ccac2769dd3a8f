"""Train ranks on weights of their own, and average these at times."""
