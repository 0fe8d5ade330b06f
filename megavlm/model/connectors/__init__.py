"""Torch halves of the connectors in `megavlm/arch/connectors`, one module each."""
