"""Train a recipe under ``accelerate launch``, which starts this on every process."""

import argparse
import sys

from trainer.cli import run_train

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", help="YAML recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="over the recipe")
    parser.add_argument("--profile", metavar="FOLDER", help="for a trace of three steps")
    given = parser.parse_intermixed_args()
    sys.exit(run_train(given.recipe, given.overrides, given.profile))
