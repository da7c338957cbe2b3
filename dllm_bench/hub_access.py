"""Access to the hub that says at once when there is no network, and prints nothing of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["TIMEOUT_S", "hub_rows", "quiet"]

TIMEOUT_S = 10
"""Seconds that the first answer of the hub may take."""


def hub_rows(dataset: str, config: str | None = None, *, split: str) -> Any:
    """A split of a data set on the hub, as `datasets` gives it: from its cache where it is there, else fetched.

    So it is fetched once, and a later version on the hub changes nothing. Raises what the hub's client raises, of many
    kinds, where the data is neither here nor to be had.
    """
    from datasets import load_dataset
    from huggingface_hub import HfApi

    with quiet():
        try:
            return _cached(dataset, config, split)
        except Exception:
            pass
        # without a network this fails at once, and `load_dataset` only after half a minute of trying again
        HfApi().dataset_info(dataset, timeout=TIMEOUT_S)
        return load_dataset(dataset, config, split=split)


def _cached(dataset: str, config: str | None, split: str) -> Any:
    from datasets.packaged_modules.cache.cache import Cache

    found = Cache(dataset_name=dataset.split("/")[-1], repo_id=dataset, config_name=config, version="auto", hash="auto")
    return found.as_dataset(split=split)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps the warnings of the hub's libraries off the terminal: what matters of them is told in our own errors."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets", "httpx")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
