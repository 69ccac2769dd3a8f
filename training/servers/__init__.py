"""Servers that hold the weights of workers which do not wait for each other. It knows no process group."""
