"""The states of the global random number generators."""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

import torch


class GeneratorStates:
    """The states of the global generators of torch, Python and NumPy when this object was created. NumPy's state is
    omitted if the program has not imported ``numpy.random``. A ``with`` statement restores the states at its end."""

    def __init__(self) -> None:
        self._torch_state = torch.default_generator.get_state()
        self._python_state = random.getstate()
        numpy_random = loaded_numpy_random()
        self._numpy_generator: Any = None if numpy_random is None else numpy_random.mtrand._rand
        self._numpy_state = None if numpy_random is None else numpy_random.get_state(legacy=False)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Sets the generators to the saved states. A bit generator of NumPy that is of another type than at that time
        keeps its state."""
        torch.default_generator.set_state(self._torch_state)
        random.setstate(self._python_state)
        state, generator = self._numpy_state, self._numpy_generator
        if state is not None and type(generator._bit_generator).__name__ == state["bit_generator"]:
            generator.set_state(state)


def loaded_numpy_random() -> Any:
    """Returns the module ``numpy.random``; None if the program has not imported it. If another thread is importing it,
    waits until that is done."""
    return importlib.import_module("numpy.random") if sys.modules.get("numpy.random") is not None else None
