"""`sparkring reproduce`: train a run again and compare."""
