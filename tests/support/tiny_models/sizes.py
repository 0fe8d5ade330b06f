"""Sizes of the images of tiny models."""

Samples = list[list[tuple[int, int]]]  # (height, width) of each image of each sample
