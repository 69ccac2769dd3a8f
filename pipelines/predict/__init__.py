"""Batch scoring: rows of a view, scored in Spark by a model, published whole (docs/how-to/predict.md)."""
