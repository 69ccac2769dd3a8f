"""What is wrong with a recipe, found before anything runs: of itself, its code, its tables and this machine."""
