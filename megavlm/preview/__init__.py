"""A look at the data as the model gets it: one self-contained page."""
