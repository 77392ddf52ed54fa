"""A context whose workers are processes of this machine, connected through loopback, so that no cluster is needed."""

import multiprocessing
import pickle
import secrets
from pathlib import Path

from rustloader.remote.context import Call, RemoteContext
from rustloader.workers import remote

# The fork server imports torch once, and its children inherit no descriptor of the test.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["rustloader.workers.remote"])


class Worker:
    """A process with the interface of `Started`."""

    def __init__(self, process):
        self.process = process

    def failure(self):
        code = self.process.exitcode
        return None if code is None else f"its process ended with exit code {code}"

    def waits_for(self):
        return "it may be slow"

    def kill(self):
        self.process.kill()
        self.process.join()


class LoopbackContext(RemoteContext):
    """Starts workers on this machine with the multiprocessing context ``server``. ``folder`` holds the dataset."""

    _name = "loopback"

    def __init__(self, folder: Path, serve=None, seconds: float = 60.0, server=SERVER, host="127.0.0.1"):
        self.folder, self.serve, self.seconds = folder, serve or serve_file, seconds
        self.server, self.host = server, host
        self.workers: list[Worker] = []
        self.calls: list[Call] = []

    @property
    def start_seconds(self):
        return self.seconds

    def address(self):
        return self.host

    def dumps(self, value):
        return pickle.dumps(value)

    def put(self, blob):
        path = self.folder / secrets.token_hex(8)
        path.write_bytes(blob)
        return path

    def launch(self, blob, call):
        process = self.server.Process(target=self.serve, args=(blob, call), daemon=True)
        process.start()
        self.calls.append(call)
        self.workers.append(Worker(process))
        return self.workers[-1]


def serve_file(path: Path, call: Call) -> None:
    remote.serve(path.read_bytes, call, 60.0)
