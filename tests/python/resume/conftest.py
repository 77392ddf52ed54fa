"""Tests that take `lib` run on torchdata, too: what they ask for is what torchdata does."""

import logging

import pytest
from stateful import libraries


@pytest.fixture(params=libraries.NAMES)
def lib(request):
    """torchdata's names, then rustloader's."""
    # torchdata warns in the log that it fast-forwards, and that in_order=False has no guarantees.
    logging.getLogger("torchdata").setLevel(logging.ERROR)
    return libraries.library(request.param)


def pytest_collection_modifyitems(items):
    """torchdata's constructor calls a function that newer versions of torch warn of."""
    for item in items:
        if "lib" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"))
            # rustloader's, where torchdata says nothing: test_warnings.py.
            item.add_marker(pytest.mark.filterwarnings("ignore:an epoch of 0 batches:UserWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore:load_state_dict.. replaces an iterator:UserWarning"))
