"""The page that a run leaves: its figures and how they are drawn again."""
