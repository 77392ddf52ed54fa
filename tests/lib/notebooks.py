"""A notebook's kernel, driven as a notebook does it. For scripts: its client has threads and sockets of its own."""

import contextlib

from jupyter_client import KernelManager

LIMIT = 120


class Kernel:
    """A running kernel."""

    def __init__(self, manager, client):
        self.manager, self.client = manager, client

    def run(self, cell, interrupt_at=None):
        """Runs a cell: (status, stdout, stderr, names of errors). Interrupts the kernel when it has written a word."""
        streams, errors, waits = {"stdout": "", "stderr": ""}, [], interrupt_at is not None

        def look(message):
            nonlocal waits
            content = message["content"]
            if message["msg_type"] == "stream":
                streams[content["name"]] += content["text"]
                if waits and interrupt_at in content["text"]:
                    waits = False
                    self.manager.interrupt_kernel()
            elif message["msg_type"] == "error":
                errors.append(content["ename"])

        reply = self.client.execute_interactive(cell, timeout=LIMIT, output_hook=look)
        return reply["content"]["status"], streams["stdout"], streams["stderr"], errors


@contextlib.contextmanager
def kernel():
    """A kernel for the body of a `with` statement."""
    manager = KernelManager(transport="ipc")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(LIMIT)
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
