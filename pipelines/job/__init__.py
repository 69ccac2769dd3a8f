"""A job from raw tables to a registered model, and the dataset alone."""
