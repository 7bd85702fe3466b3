"""Loads what every test needs, in the processes that run tests."""

import gc
import signal

import pytest
from hypothesis_profiles import register_profiles


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures, and with them torch, except in the process that only distributes tests to others."""
    register_profiles()
    # A shell that starts the tests in the background makes them, and every process that they start, ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    only_deals = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not only_deals:
        config.pluginmanager.import_plugin("tiny_fixtures")


def pytest_collection_finish() -> None:
    """Exclude modules and collected tests from later garbage collections, because they stay in memory until the end."""
    gc.collect()
    gc.freeze()
