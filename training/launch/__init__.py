"""Ranks on hosts, without Spark: the driver's side, the host's agent, the channel between them, and the rank."""
