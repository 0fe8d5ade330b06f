"""The commands of `megavlm`, each a module with `main(argv)`, which returns the exit status."""
