"""`python -m megavlm`, as torchrun starts it: `torchrun --nproc-per-node 4 -m megavlm train …`."""

from megavlm.programs.main import program

program()
