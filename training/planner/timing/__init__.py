"""The seconds of a step on a cluster, and what fits a cluster to measured steps."""
