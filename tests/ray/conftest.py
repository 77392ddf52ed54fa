"""A small Ray cluster. `make test-ray` uses a network namespace, because Ray listens on all interfaces."""

import gc
import os
import sys
import time

import pytest

# An actor takes seconds to start, and many seconds on a busy machine.
os.environ.update(RUSTLOADER_STALL_START_SECONDS="600", RUSTLOADER_STALL_ITEM_SECONDS="600")
# For ray_cluster.py and standin.py.
sys.path.append(os.path.join(os.path.dirname(__file__), "../lib"))

import ray_cluster
from ray_cluster import actors
from ray_support import GONE, links


@pytest.fixture(scope="session", autouse=True)
def ray_folder(tmp_path_factory):
    """Ray's folder. Nothing may be written to the home folder, or to Ray's default folder."""
    home, default = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("default")
    os.environ.update(HOME=str(home), TMPDIR=str(default))
    with ray_cluster.folder() as path:
        yield path
    assert [*home.iterdir(), *(default / "ray").glob("*")] == []


@pytest.fixture(scope="session")
def nodes(ray_folder, request):
    import ray

    nodes = ray_cluster.Nodes()
    ray.init(address=nodes.address, log_to_driver=False)
    # No node can import the tests.
    for module in {item.module for item in request.session.items} | {sys.modules["ray_support"]}:
        ray.cloudpickle.register_pickle_by_value(module)
    yield nodes
    ray.shutdown()
    nodes.cluster.shutdown()


@pytest.fixture
def cluster(nodes):
    """The cluster, with both nodes."""
    nodes.complete()
    return nodes


def reserved():
    """The number of CPUs of the cluster that are not free."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return 0
    return ray.cluster_resources().get("CPU", 0) - ray.available_resources().get("CPU", 0)


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """After each test, actors, connections and the CPUs that were reserved for them must be gone."""
    yield
    if request.session.testsfailed:
        return  # the report keeps frames, and with them iterators
    gc.collect()
    deadline = time.monotonic() + GONE
    while left := [links(), actors(), reserved()]:
        if not any(left):
            break
        assert time.monotonic() < deadline, "{} connections, the actors {} and {} CPUs are left".format(*left)
        time.sleep(0.02)
