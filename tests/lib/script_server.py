"""Runs scripts in children of a process that has imported torch and the test helpers, since each import takes seconds.

The server is `python -c` of `SERVER`. In a forked child `next_script` returns the code to run as `__main__`, so that
the interpreter really exits at its end, with the exit status and traceback of `python -c`. The start of an interpreter
is not covered: for that, `start_script` can start a new one.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings

SERVER = "import script_server; exec(script_server.next_script({descriptor}))"


class Script:
    """A running script, with the part of `subprocess.Popen` that the tests use."""

    def __init__(self, pid, status, stdout, stderr):
        self.pid, self.returncode = pid, None
        self._status = status
        self.stdout, self.stderr = open(stdout), open(stderr)
        self._texts, self._readers = {}, []

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("script", timeout)
            text = os.read(self._status, 100)
            assert text, "the script server has ended"
            os.close(self._status)
            self.returncode = os.waitstatus_to_exitcode(int(text))
        return self.returncode

    def communicate(self, timeout=None):
        """Waits until the script, and every process that shares its outputs, has ended. Returns (stdout, stderr)."""
        end = None if timeout is None else time.monotonic() + timeout

        def left():
            return None if end is None else max(0, end - time.monotonic())

        def read(stream):
            self._texts[stream] = stream.read()

        if not self._readers:
            self._readers = [threading.Thread(target=read, args=(s,)) for s in (self.stdout, self.stderr)]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(left())
            if reader.is_alive():
                raise subprocess.TimeoutExpired("script", timeout)
        self.wait(left())
        self.stdout.close()
        self.stderr.close()
        return self._texts[self.stdout], self._texts[self.stderr]


class Server:
    """The process that forks this process's scripts. It starts with the first script and ends with this process."""

    def __init__(self, python=sys.executable):
        self.python = python
        self.process = self.channel = None

    def start(self, source, environment, file=None, folder=None):
        """Starts a script in `folder` with this environment, like `python -c`, or from a file."""
        if self.process is None:
            self.channel, server_end = socket.socketpair()
            self.process = subprocess.Popen(
                [self.python, "-c", SERVER.format(descriptor=server_end.fileno())],
                env=environment,
                pass_fds=[server_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            server_end.close()
        pipes = [os.pipe() for _ in range(3)]
        request = json.dumps([source, environment, file and str(file), str(folder or os.getcwd())]).encode()
        socket.send_fds(self.channel, [len(request).to_bytes(8)], [writer for _, writer in pipes])
        self.channel.sendall(request)
        for _, writer in pipes:
            os.close(writer)
        pid = int.from_bytes(receive(self.channel, 8))
        return Script(pid, *(reader for reader, _ in pipes))

    def close(self):
        if self.process is not None:
            self.channel.close()
            self.process.wait()
            self.process = self.channel = None


def receive(channel, size):
    data = b""
    while len(data) < size:
        more = channel.recv(size - len(data))
        assert more, "the script server has ended"
        data += more
    return data


def next_script(descriptor):
    """Serves scripts until the channel is closed, which ends the process. In each child it returns the compiled script
    to run."""
    import numpy  # noqa: F401
    import support
    import torch  # noqa: F401

    channel = socket.socket(fileno=descriptor)
    waiting = {}
    gc.freeze()
    while True:
        for ready in select.select([channel, *waiting], [], [])[0]:
            if ready is not channel:
                pid, status = waiting.pop(ready)
                os.close(ready)
                with contextlib.suppress(BrokenPipeError):
                    os.write(status, str(os.waitpid(pid, 0)[1]).encode())
                os.close(status)
                continue
            head, pipes, _, _ = socket.recv_fds(channel, 8, 3)
            if not head:
                os._exit(0)
            source, environment, file, folder = json.loads(receive(channel, int.from_bytes(head)))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a fork with NumPy's threads
                pid = os.fork()
            if pid == 0:
                break
            for pipe in pipes[1:]:
                os.close(pipe)
            waiting[os.pidfd_open(pid)] = pid, pipes[0]
        else:
            continue
        break
    os.setsid()
    channel.sendall(os.getpid().to_bytes(8))
    for descriptor in (*waiting, *(status for _, status in waiting.values()), channel.detach(), pipes[0]):
        os.close(descriptor)
    for number, pipe in enumerate(pipes[1:], 1):
        os.dup2(pipe, number)
        os.close(pipe)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    support.note_pid(os.getpid())
    main = sys.modules["__main__"]
    del main.script_server
    if file is not None:
        main.__file__, sys.argv[0], sys.path[0] = file, file, os.path.dirname(file)
    return compile(source, file or "<string>", "exec")
