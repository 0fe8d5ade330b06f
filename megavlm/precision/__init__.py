"""Numbers that layers compute with: FP8 on the devices that have it, or emulated anywhere else."""
