"""Keep a long run alive. No module here imports torch, so that they work before and after everything else."""
