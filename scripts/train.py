"""Train a recipe under ``accelerate launch``. Usage: scripts/train.py RECIPE [section.key=value ...]"""

import sys

from trainer.cli import run_train

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(run_train(sys.argv[1], sys.argv[2:]))
