"""A small Ray cluster. `make test-ray` uses a network namespace, because Ray listens on all interfaces."""

import contextlib
import gc
import os
import shutil
import sys
import tempfile
import time

import pytest

# An actor's start takes seconds, and on a busy machine many of them.
os.environ.update(RUSTLOADER_STALL_START_SECONDS="600", RUSTLOADER_STALL_ITEM_SECONDS="600")


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


@pytest.fixture(scope="module")
def cluster(ray_folder):
    """Two nodes with two CPUs each; the driver is on the first one."""
    import ray
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    second = cluster.add_node(num_cpus=2, object_store_memory=80 << 20, resources={"far": 2})
    ray.init(address=cluster.address, log_to_driver=False)
    # No node can import the tests.
    ray.cloudpickle.register_pickle_by_value(sys.modules["test_ray"])
    cluster.second = second
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def links():
    """Threads of this process that serve a connection."""
    found = 0
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            found += file.read() == "rl_link\n"
    return found


def actors():
    """Pids of workers in this network namespace."""
    network, found = os.stat("/proc/self/ns/net").st_ino, []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
            if file.read().startswith("ray::_Actor") and os.stat(f"/proc/{pid}/ns/net").st_ino == network:
                found.append(int(pid))
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """Actors and connections are gone after each test."""
    yield
    if request.session.testsfailed:
        return  # the report keeps frames, and with them iterators
    gc.collect()
    deadline = time.monotonic() + 20
    while links() or actors():
        assert time.monotonic() < deadline, f"{links()} connections and the actors {actors()} are left"
        time.sleep(0.02)
