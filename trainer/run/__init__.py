"""A training run: loop, launchers, state, checkpoints, evaluation, log."""
