"""Training losses: next-token, preference (DPO and others), and contrastive losses over a global batch."""
