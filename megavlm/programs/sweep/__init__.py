"""Train the variants of a run that a grid file describes, on this machine or a cluster, and compare their metrics."""
