"""A model before and after training: where it starts, what its layout costs, and what a registered one takes along."""
