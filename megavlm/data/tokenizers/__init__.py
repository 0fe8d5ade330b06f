"""Tokenizers: Hugging Face's, SentencePiece's, and one trained on the run's own texts."""
