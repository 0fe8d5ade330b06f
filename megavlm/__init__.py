"""megavlm: train vision-language models on any TP × PP × VPP × DP layout with the same numbers."""

__version__ = "0.1.0"
