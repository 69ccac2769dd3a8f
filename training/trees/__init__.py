"""Gradient-boosted trees by XGBoost: the only room that imports it."""
