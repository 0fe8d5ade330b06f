"""What keeps a long run alive. Without torch, so that it works before and after everything else."""
