"""Drives a Jupyter kernel as a notebook does. Only for scripts, because its client has its own threads and sockets."""

import contextlib
import os
import subprocess
import tempfile

from jupyter_client import KernelManager

LIMIT = 120


class Kernel:
    """A running kernel."""

    def __init__(self, manager, client):
        self.manager, self.client = manager, client

    def run(self, cell, interrupt_at=None, lines=0):
        """Runs a cell. Returns (status, stdout, stderr, error names). Interrupts the kernel once its output contains
        `interrupt_at`. Waits until stdout has `lines` lines: output of workers may arrive after the cell has ended."""
        streams, errors, interrupt_pending = {"stdout": "", "stderr": ""}, [], interrupt_at is not None

        def on_output(message):
            nonlocal interrupt_pending
            content = message["content"]
            if message["msg_type"] == "stream":
                streams[content["name"]] += content["text"]
                if interrupt_pending and interrupt_at in content["text"]:
                    interrupt_pending = False
                    self.manager.interrupt_kernel()
            elif message["msg_type"] == "error":
                errors.append(content["ename"])

        reply = self.client.execute_interactive(cell, timeout=LIMIT, output_hook=on_output)
        while not errors and streams["stdout"].count("\n") < lines:
            on_output(self.client.get_iopub_msg(timeout=LIMIT))
        return reply["content"]["status"], streams["stdout"], streams["stderr"], errors


@contextlib.contextmanager
def kernel():
    """Runs a kernel for the body of a `with` statement."""
    # The default place of the sockets is the current folder, which kernels of other tests share.
    with tempfile.TemporaryDirectory() as folder:
        manager = KernelManager(transport="ipc", ip=f"{folder}/kernel")
        # With this variable, a kernel does not show what processes that are not forked print.
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        manager.start_kernel(env=environment, stdout=subprocess.DEVNULL)
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(LIMIT)
            yield Kernel(manager, client)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
