"""`sparkring sweep`: one recipe trained with other values of some keys, which Optuna chooses."""
