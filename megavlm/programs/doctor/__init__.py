"""Check a machine: what it has, what is missing, and the command that installs or repairs it (`megavlm doctor`)."""
