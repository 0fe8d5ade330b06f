"""Chat with a trained model, or embed texts and images, from its exported or Hugging Face folder."""
