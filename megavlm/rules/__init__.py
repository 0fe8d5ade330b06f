"""The table of options and all that relates options to one another: defaults that follow from others, and refusals."""
