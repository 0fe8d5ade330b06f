"""Show the data as the model receives it, on one self-contained HTML page."""
