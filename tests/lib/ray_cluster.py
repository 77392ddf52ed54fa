"""A small Ray cluster with its files in a temporary folder, for `tests/ray` and for drivers.

`python -m ray_cluster` starts one, prints its address, and ends it at the end of its input.
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
    """Ray's files: its sockets' names are limited to about 100 bytes. Nothing goes to the home folder. Workers of a
    cluster that is made within find the modules beside this one."""
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
    """Two nodes with `cpus` CPUs each, the driver on the first one. The second one can be lost, and another added."""

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
    """Pids of workers in this network namespace."""
    network, found = os.stat("/proc/self/ns/net").st_ino, []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
            if file.read().startswith("ray::_Actor") and os.stat(f"/proc/{pid}/ns/net").st_ino == network:
                found.append(int(pid))
    return found


@contextlib.contextmanager
def beside():
    """A cluster made by another process: this one stays without Ray's threads."""
    with folder():
        command = [sys.executable, "-m", "ray_cluster"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        process = subprocess.Popen(command, **pipes)
        try:
            address = process.stdout.readline().strip()
            if not address:
                raise RuntimeError("the Ray cluster does not start")
            yield address
        finally:
            process.communicate()


if __name__ == "__main__":
    nodes = Nodes()
    print(nodes.address, flush=True)
    sys.stdin.read()
    nodes.cluster.shutdown()
