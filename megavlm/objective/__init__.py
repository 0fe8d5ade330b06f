"""Losses of training: of each token, or of the embeddings of a global batch."""
