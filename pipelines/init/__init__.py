"""`sparkring init`: a recipe from the user's own files."""
