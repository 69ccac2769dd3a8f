"""Hosts that were each started with the same command: which one this is, and how they come together."""
