"""What a sample cost beside its seconds: peak memory, and the percentiles of its passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

__all__ = ["MemoryPeak", "is_out_of_memory", "percentile", "release_memory"]

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class MemoryPeak:
    """The peak memory of one sample.

    On CUDA the bytes that torch's allocator gave out at most; on the CPU the high-water mark of the process's resident
    memory where the system lets it be reset (Linux); otherwise nothing, since an old peak would count.

    Attributes:
        kind: what is counted, "cuda_allocated" or "rss"; None where nothing is.
    """

    def __init__(self, device_type: str) -> None:
        self.kind: str | None = {"cuda": "cuda_allocated", "cpu": "rss"}.get(device_type)

    def start(self) -> None:
        """Forgets earlier peaks."""
        if self.kind == "cuda_allocated":
            import torch

            torch.cuda.reset_peak_memory_stats()
        elif self.kind == "rss":
            try:
                _CLEAR.write_text("5", encoding="ascii")
            except OSError:
                self.kind = None

    def stop(self) -> int | None:
        """Bytes at the peak since `start`; None where they cannot be measured."""
        if self.kind == "cuda_allocated":
            import torch

            return int(torch.cuda.max_memory_allocated())
        return _resident_peak() if self.kind == "rss" else None


def _resident_peak() -> int | None:
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device's or the host's allocator gave up."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch's CPU allocator raises a bare RuntimeError
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def release_memory(device_type: str) -> None:
    """Gives cached blocks of the device back after it ran out of memory."""
    if device_type == "cuda":
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between the two nearest ranks; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
