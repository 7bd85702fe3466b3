"""A training run: its loop, launchers, state, checkpoints, evaluations and log."""
