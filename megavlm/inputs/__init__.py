"""What a model reads: images as patches and tiles, as its processor prepares them, and micro-batches.

`megavlm.families.processor_from` reads a model's own options.
"""
