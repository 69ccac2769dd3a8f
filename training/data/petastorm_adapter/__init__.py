"""petastorm 0.12.1 behind the reader protocol. Importing this package lets petastorm run on today's libraries."""

from sparkring.training.data.petastorm_adapter import compat

compat.install()
