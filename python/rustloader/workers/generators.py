"""The states of the generators that torch seeds in a worker."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class GeneratorStates:
    """The states of torch's, Python's and NumPy's global generators at one moment."""

    def __init__(self) -> None:
        self._torchs = torch.get_rng_state()
        self._pythons: Any = random.getstate()
        self._numpys: Any = np.random.get_state(legacy=False)

    def restore(self) -> None:
        """Sets the generators to these states."""
        torch.set_rng_state(self._torchs)
        random.setstate(self._pythons)
        np.random.set_state(self._numpys)
