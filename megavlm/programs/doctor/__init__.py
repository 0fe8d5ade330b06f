"""Check a machine or all nodes of a run, and name the remedy for each problem found (`megavlm doctor`)."""
