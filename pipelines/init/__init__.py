"""`sparkring init`: a recipe from the user's own files."""

TASKS = ("binary", "multiclass", "multilabel", "regression")  # of a table
