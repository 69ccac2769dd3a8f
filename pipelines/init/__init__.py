"""`sparkring init`: a recipe from the user's own files."""

TASKS = ("binary", "multiclass", "regression")  # of a table
