"""The configuration: declarations of all options, and facts that follow from them."""
