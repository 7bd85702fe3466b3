"""Tracking by wandb: where a run asks for it, and where wandb may send figures."""

import importlib.util
import os

from accelerate import Accelerator


def is_installed() -> bool:
    return importlib.util.find_spec("wandb") is not None


def tracker_of(tracking: str | None) -> str | None:
    """Return ``wandb`` if it is installed and the recipe asks for it, or asks for nothing and ``WANDB_API_KEY`` is set.

    Without a key, in the environment or from ``wandb login``, wandb then runs offline.
    """
    wanted = tracking == "wandb" or (tracking is None and bool(os.environ.get("WANDB_API_KEY")))
    if not wanted or not is_installed():
        return None
    os.environ.setdefault("WANDB_SILENT", "true")
    decided = "WANDB_MODE" in os.environ or bool(os.environ.get("WANDB_API_KEY"))
    if not decided and not _is_logged_in():
        os.environ["WANDB_MODE"] = "offline"
    return "wandb"


def _is_logged_in() -> bool:
    """Return True if wandb has a key of its own: in ~/.netrc or its settings. Asks neither the user nor the network."""
    import wandb

    try:
        return bool(wandb.login(prompt=False, verify=False))
    except wandb.Error as error:
        raise ValueError(f"wandb cannot use its login ({error}): run 'wandb login', or set tracking=none") from error
    finally:
        wandb.teardown()  # or the run would go on by the settings of now


def address_of(accelerator: Accelerator) -> str | None:
    """Return the page of the run that wandb sends figures to; None where it sends none."""
    if not any(tracker.name == "wandb" for tracker in accelerator.trackers):
        return None
    url: str | None = accelerator.get_tracker("wandb", unwrap=True).url
    return url
