"""Layers of the model with torch, and their weights. `megavlm.arch` is the half without torch."""
