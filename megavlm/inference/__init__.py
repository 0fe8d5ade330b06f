"""A trained model on one process: its answers, its vectors, and how far its logits are from Transformers'."""
