"""The models that a trained one is compared with: a constant guess, linear models, trees, popularity and factors."""
