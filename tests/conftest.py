"""Settings and fixtures of the whole suite."""

from __future__ import annotations

import pytest
import torch

from dllm_bench.decoding import streams

# the networks of the tests are tiny: a second thread only waits for the first
torch.set_num_threads(1)


@pytest.fixture
def bytes_by_pass(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Filled, while a test decodes, with the bytes held after each pass."""
    found: list[dict[str, int]] = []
    original = streams.Streams.bytes

    def watched(self: streams.Streams) -> dict[str, int]:
        found.append(original(self))
        return found[-1]

    monkeypatch.setattr(streams.Streams, "bytes", watched)
    return found
