"""A small Ray cluster with its files in a temporary folder, for `tests/ray` and for drivers.

`python -m ray_cluster` starts a cluster, prints its address, and ends it when stdin is closed.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))


@contextlib.contextmanager
def folder():
    """Creates a folder for Ray's files, so that none are in the home folder. Its path is short, since the names of
    sockets are limited to about 100 bytes. Workers of a cluster that starts in the body can import this folder's
    modules."""
    path = tempfile.mkdtemp(prefix="rl-ray-")
    token = os.path.join(path, "token")
    with open(token, "w") as file:
        file.write("0123456789abcdef" * 4)
    os.environ.update(RAY_TMPDIR=path, RAY_AUTH_TOKEN_PATH=token, RAY_USAGE_STATS_ENABLED="0")
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Nodes:
    """Two nodes with `cpus` CPUs each; the driver is on the first. The second can be lost and replaced."""

    def __init__(self, cpus=2):
        from ray.cluster_utils import Cluster

        self.options = {"num_cpus": cpus, "object_store_memory": 80 << 20}
        self.cluster = Cluster(initialize_head=True, head_node_args={**self.options, "include_dashboard": False})
        self.address = self.cluster.address
        self.second = None
        self.complete()

    def complete(self):
        if self.second is None:
            self.second = self.cluster.add_node(**self.options, resources={"far": 2})

    def lose(self):
        if self.second is not None:
            self.cluster.remove_node(self.second)
        self.second = None


def actors():
    """Returns the pids of the workers in this network namespace."""
    network, pids = os.stat("/proc/self/ns/net").st_ino, []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
            if file.read().startswith("ray::_Actor") and os.stat(f"/proc/{pid}/ns/net").st_ino == network:
                pids.append(int(pid))
    return pids


@contextlib.contextmanager
def in_other_process():
    """Runs a cluster in another process, so that this process has none of Ray's threads."""
    with folder():
        command = [sys.executable, "-m", "ray_cluster"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        process = subprocess.Popen(command, **pipes)
        try:
            address = process.stdout.readline().strip()
            if not address:
                raise RuntimeError("the Ray cluster failed to start")
            yield address
        finally:
            process.communicate()


if __name__ == "__main__":
    nodes = Nodes()
    print(nodes.address, flush=True)
    sys.stdin.read()
    nodes.cluster.shutdown()
