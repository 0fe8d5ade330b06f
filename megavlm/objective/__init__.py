"""Training losses: of each token, or of the embeddings of a global batch."""
