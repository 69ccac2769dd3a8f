"""Checkpoints: shards per rank and a marker written last; they load on another world and layout."""
