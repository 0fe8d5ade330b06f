"""Import and export Hugging Face checkpoints. `families/` has a table of weight names for each architecture."""
