"""Train the variants of one run that a grid describes, on a cluster or here, and compare what came out."""
