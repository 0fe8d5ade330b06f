"""Run `python -m megavlm`, also under torchrun: `torchrun --nproc-per-node 4 -m megavlm train …`."""

from megavlm.programs.main import program

program()
