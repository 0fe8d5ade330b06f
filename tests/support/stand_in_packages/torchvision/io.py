"""Files are not read by the stand-in."""
