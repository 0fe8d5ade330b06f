"""The programs around the trainer, each built on the public names of a run; the trainer imports none of them."""
