"""Find the fastest layout: `megavlm plan`, run from a clone without installing it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megavlm.programs.main import run
from megavlm.programs.plan import main

if __name__ == "__main__":
    run(main, teardown=True)
