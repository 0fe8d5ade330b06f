"""Number formats of layers: FP8 on devices with FP8 hardware, emulated FP8 on others."""
