"""Train a recipe, as ``headstart train`` does; ``accelerate launch`` starts this script in every process."""

import sys

from trainer.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["train"]
    main()
