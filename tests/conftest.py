"""Settings of the whole suite."""

from __future__ import annotations

import torch

# the networks of the tests are tiny: a second thread only waits for the first
torch.set_num_threads(1)
