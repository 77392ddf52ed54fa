"""A small Ray cluster. `make test-ray` uses a network namespace, because Ray listens on all interfaces."""

import gc
import os
import shutil
import sys
import tempfile
import time

import pytest

# An actor's start takes seconds, and on a busy machine many of them.
os.environ.update(RUSTLOADER_STALL_START_SECONDS="600", RUSTLOADER_STALL_ITEM_SECONDS="600")
# The stand-ins for devices.
sys.path.append(os.path.join(os.path.dirname(__file__), "../python"))

from ray_support import GONE, actors, links


@pytest.fixture(scope="session", autouse=True)
def ray_folder():
    """Ray's files: its sockets' names are limited to about 100 bytes. Nothing goes to the home folder."""
    folder = tempfile.mkdtemp(prefix="rl-ray-")
    token = os.path.join(folder, "token")
    with open(token, "w") as file:
        file.write("0123456789abcdef" * 4)
    os.environ["RAY_TMPDIR"] = folder
    os.environ["RAY_AUTH_TOKEN_PATH"] = token
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class Nodes:
    """Two nodes with two CPUs each; the driver is on the first one. The second one can be lost, and another added."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        options = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=options)
        self.address = self.cluster.address
        self.second = None
        self.complete()

    def complete(self):
        if self.second is None:
            self.second = self.cluster.add_node(num_cpus=2, object_store_memory=80 << 20, resources={"far": 2})

    def lose(self):
        self.cluster.remove_node(self.second)
        self.second = None


@pytest.fixture(scope="session")
def nodes(ray_folder, request):
    import ray

    nodes = Nodes()
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
    """CPUs of the cluster that are not free."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return 0
    return ray.cluster_resources().get("CPU", 0) - ray.available_resources().get("CPU", 0)


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """Actors, connections and what Ray has reserved for them are gone after each test."""
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
