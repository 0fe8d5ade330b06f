"""Write the vectors of texts and images: `megavlm embed`, run from a clone without installing it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megavlm.programs.embed import main
from megavlm.programs.main import run

if __name__ == "__main__":
    run(main, teardown=True)
