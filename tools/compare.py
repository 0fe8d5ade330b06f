"""Say at which layer two models part: `megavlm compare`, out of a clone that need not be installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megavlm.programs.compare import main
from megavlm.programs.main import run

if __name__ == "__main__":
    run(main, teardown=True)
