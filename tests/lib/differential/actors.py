"""Programs whose workers are actors of a Ray cluster: `--start-method ray`. All programs share one cluster."""

import contextlib
import functools
import logging
import os
import re

import ray_cluster

ADDRESS = "RUSTLOADER_TEST_RAY_ADDRESS"
# Ray's own log lines on stderr.
LOG_LINE = re.compile(r"^\[\d{4}-\d\d-\d\d [\d:,]+ [A-Z] \d+ \d+\] .*\n", re.MULTILINE)
# The number of facts that a worker records about its process, which is not a child of main: its name twice, its class,
# and whether it is a daemon.
PROCESS_FACTS = 4


@contextlib.contextmanager
def cluster():
    """Starts a cluster for the programs that run in this context, unless the environment names one."""
    if ADDRESS in os.environ:
        yield
        return
    with ray_cluster.in_other_process() as address:
        os.environ[ADDRESS] = address
        yield


def connect():
    """Connects a program's process to the cluster, before anything is recorded."""
    import ray

    ray.init(address=os.environ[ADDRESS], log_to_driver=False, logging_level=logging.ERROR, configure_logging=True)


@functools.cache
def _type():
    import rustloader.ray

    class Actors(rustloader.ray.RayContext):
        """Reports the start method of torch's context, so that the records match."""

        _name = "forkserver"

        def __reduce__(self):
            return context, ()

    return Actors


def context():
    """A context whose workers are actors that take hardly any of the cluster's resources."""
    return _type()(num_cpus=0.01)


def without_process(record):
    """Masks what the workers recorded about their processes, and removes Ray's log lines."""
    record["stderr"] = LOG_LINE.sub("", record["stderr"])
    for events in record["workers"].values():
        for event in events:
            if event[0] == "worker":
                event[1][-PROCESS_FACTS:] = ["elsewhere"] * PROCESS_FACTS
    return record
