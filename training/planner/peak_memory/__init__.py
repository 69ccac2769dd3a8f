"""Predict the peak of a step: trace whole passes (timeline.py, codec.py) and play them in its order (play.py)."""
