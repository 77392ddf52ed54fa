"""Programs whose workers are actors of a Ray cluster: `--start-method ray`. All programs share one cluster."""

import contextlib
import functools
import logging
import os
import re

import ray_cluster

ADDRESS = "RUSTLOADER_TEST_RAY_ADDRESS"
# Ray's own lines on stderr.
LINE = re.compile(r"^\[\d{4}-\d\d-\d\d [\d:,]+ [A-Z] \d+ \d+\] .*\n", re.MULTILINE)
# What a worker says of its process, which is no child of main: its name twice, its class, whether it is a daemon.
PROCESS_FACTS = 4


@contextlib.contextmanager
def cluster():
    """A cluster for the programs that run within, unless there is one for them."""
    if ADDRESS in os.environ:
        yield
        return
    with ray_cluster.in_other_process() as address:
        os.environ[ADDRESS] = address
        yield


def connect():
    """Connects a program's process, before anything is recorded."""
    import ray

    ray.init(address=os.environ[ADDRESS], log_to_driver=False, logging_level=logging.ERROR, configure_logging=True)


@functools.cache
def _type():
    import rustloader.ray

    class Actors(rustloader.ray.RayContext):
        """Looks like torch's context to those who compare them."""

        _name = "forkserver"

        def __reduce__(self):
            return context, ()

    return Actors


def context():
    """Workers as actors that take hardly any of the cluster."""
    return _type()(num_cpus=0.01)


def without_process(record):
    """A record without what workers say of their processes, and without Ray's lines."""
    record["stderr"] = LINE.sub("", record["stderr"])
    for events in record["workers"].values():
        for event in events:
            if event[0] == "worker":
                event[1][-PROCESS_FACTS:] = ["elsewhere"] * PROCESS_FACTS
    return record
