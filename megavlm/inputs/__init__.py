"""Inputs of a model: image and video processors, which produce tiles and patches, and micro-batches.

`megavlm.families.processor_from` reads the processor options of a model folder.
"""
