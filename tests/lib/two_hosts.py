"""Two hosts for `test_two_hosts.py`: this process's network namespace, and another one connected to it by a veth pair.

Run it in its own network namespace, which ends with it: `unshare --net --map-root-user python -m two_hosts`.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from remote_support import LoopbackContext, serve_file
from sample_data import Numbers

import rustloader

OWN_ADDRESS, OTHER_ADDRESS = "10.77.0.1", "10.77.0.2"
# The exit status if namespaces are not permitted.
NOT_PERMITTED = 77


def ip(*words, inside=()):
    subprocess.run([*inside, "ip", *words], check=True, capture_output=True)


class OtherHost:
    """A network namespace that ends with its process."""

    def __init__(self):
        self.holder = subprocess.Popen(["unshare", "--net", "sleep", "600"])
        self.inside = ["nsenter", f"--net=/proc/{self.holder.pid}/ns/net"]
        own = os.stat("/proc/self/ns/net").st_ino
        while os.stat(f"/proc/{self.holder.pid}/ns/net").st_ino == own:
            if self.holder.poll() is not None:
                raise PermissionError("unshare --net")
            time.sleep(0.01)
        ip("link", "set", "lo", "up")
        ip("link", "add", "here", "type", "veth", "peer", "name", "there", "netns", str(self.holder.pid))
        ip("address", "add", f"{OWN_ADDRESS}/24", "dev", "here")
        ip("link", "set", "here", "up")
        ip("link", "set", "there", "up", inside=self.inside)
        self.answers = False
        self.answer()

    def answer(self):
        if not self.answers:
            ip("address", "add", f"{OTHER_ADDRESS}/24", "dev", "there", inside=self.inside)
            self.answers = True

    def fall_silent(self):
        """Makes the host stop answering, without closing connections."""
        ip("address", "del", f"{OTHER_ADDRESS}/24", "dev", "there", inside=self.inside)
        self.answers = False

    def close(self):
        self.holder.kill()
        self.holder.wait()


class Process(subprocess.Popen):
    """A worker on the other host, with the interface of `Started`."""

    def failure(self):
        code = self.poll()
        return None if code is None else f"its process ended with exit code {code}"

    def waits_for(self):
        return "it may be slow"


class HostContext(LoopbackContext):
    """Starts workers on the other host, after making it answer again."""

    def __init__(self, folder, host):
        super().__init__(folder, seconds=200.0)
        self.host = host

    def address(self):
        return OWN_ADDRESS

    def launch(self, blob, call):
        self.host.answer()
        worker = Process([*self.host.inside, sys.executable, "-m", "two_hosts", "worker"], stdin=subprocess.PIPE)
        with worker.stdin as file:
            pickle.dump((blob, call), file)
        self.workers.append(worker)
        return worker


class Noise(Numbers):
    """Each sample is random, and too large to be inline in a message."""

    def __getitem__(self, i):
        return torch.rand(10_000)


def loader(context, **options):
    torch.manual_seed(5)
    return rustloader.DataLoader(
        Noise(40), batch_size=2, num_workers=1, seed_by="sample", multiprocessing_context=context, **options
    )


def main():
    try:
        host = OtherHost()
    except (OSError, subprocess.CalledProcessError) as error:
        print(error, getattr(error, "stderr", b""))
        sys.exit(NOT_PERMITTED)
    with contextlib.closing(host), tempfile.TemporaryDirectory() as folder:
        context = HostContext(Path(folder), host)
        expected = list(loader("fork"))
        batches, restarting = [], loader(context, max_restarts=1)
        for batch in restarting:
            batches.append(batch)
            if len(batches) == 5:
                host.fall_silent()
        assert all(map(torch.equal, batches, expected)) and len(batches) == len(expected) == 20
        assert rustloader.stats(restarting).faults.restarts == 1 and len(context.workers) == 2
        print("batches are equal")
        # The first worker has lost its main process, and the second was told to exit.
        for worker in context.workers:
            worker.wait(200)
        print("workers are gone")


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        serve_file(*pickle.load(sys.stdin.buffer))
    else:
        main()
