"""Train a recipe under ``accelerate launch``, which starts this on every process: as ``headstart train`` does."""

import sys

from trainer.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["train"]
    main()
