"""Tests that take the `lib` fixture also run on torchdata, so that they require what torchdata does."""

import logging

import pytest
from stateful import libraries


@pytest.fixture(params=libraries.NAMES)
def lib(request):
    """The names of torchdata, then those of rustloader."""
    # torchdata logs warnings that it fast-forwards, and that in_order=False has no guarantees.
    logging.getLogger("torchdata").setLevel(logging.ERROR)
    return libraries.library(request.param)


def pytest_collection_modifyitems(items):
    """Ignores warnings that the tests on both libraries cause."""
    for item in items:
        if "lib" in getattr(item, "fixturenames", ()):
            # torchdata's constructor calls this function, which newer versions of torch deprecate.
            item.add_marker(pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"))
            # Only rustloader issues these: see test_state_warnings.py.
            item.add_marker(pytest.mark.filterwarnings("ignore:an epoch of 0 batches:UserWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore:load_state_dict.. replaces an iterator:UserWarning"))
