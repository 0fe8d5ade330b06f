"""The number formats of layers: FP8 on devices that have it, emulated FP8 on others."""
