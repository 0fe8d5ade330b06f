"""Run a trained model on one process: generate answers, embed texts and images, compare logits with Transformers."""
