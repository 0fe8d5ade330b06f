"""See `functional`."""
