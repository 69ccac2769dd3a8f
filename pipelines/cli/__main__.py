"""`python -m sparkring.pipelines.cli`: the command line, where the script `sparkring` is not installed."""

import sys

from sparkring.pipelines.cli.entry import console

sys.exit(console())
