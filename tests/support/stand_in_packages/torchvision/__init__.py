"""Stands in for torchvision: the functions on tensors that Transformers' video processors call."""

__version__ = "0.28.0"
