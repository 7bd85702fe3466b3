"""Loads what every test needs, in the processes that run tests."""

import gc
import signal

import pytest
from hypothesis_profiles import all_examples, in_fewest_combinations, register_profiles


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures, and with them torch, except in the process that only distributes tests to others."""
    register_profiles()
    # A shell that starts the tests in the background makes them, and every process that they start, ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    only_deals = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not only_deals:
        config.pluginmanager.import_plugin("tiny_fixtures")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the types, which take longest; leave most combinations of parameters to `make test`."""
    items.sort(key=lambda item: item.path.name != "test_types.py")
    if not all_examples():
        kept, left = in_fewest_combinations(items)
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def pytest_collection_finish() -> None:
    """Exclude modules and collected tests from later garbage collections, because they stay in memory until the end."""
    gc.collect()
    gc.freeze()
