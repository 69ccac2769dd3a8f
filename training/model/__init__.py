"""A recipe's model: its columns and its module, the weights it starts with, and the folder that a finished one is."""
