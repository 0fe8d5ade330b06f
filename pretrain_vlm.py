"""Train a vision-language model: `torchrun --nproc-per-node 4 pretrain_vlm.py --recipe demo --tp 2 --pp 2`."""

from megavlm.programs.main import run
from megavlm.programs.train import main

if __name__ == "__main__":
    run(main, teardown=False)
