"""A proxy between a remote worker and the main process, which injects a fault into the connection."""

import contextlib
import selectors
import socket
import struct
import threading
import time
from typing import NamedTuple

# What may happen to a connection: nothing; it is closed normally; it is reset; one direction is closed; it pauses;
# bytes arrive in small pieces; it falls silent forever, which only `stall_timeout` ends.
KINDS = ("none", "close", "reset", "half", "pauses", "pieces", "silence")
# Faults that end the worker.
FATAL = ("close", "reset", "half", "silence")


class Fault(NamedTuple):
    """What happens to a connection.

    Attributes:
        kind: One of KINDS.
        after: Bytes that pass before the fault, in both directions together.
        seconds: Length of a pause.
        piece: Bytes per piece.
    """

    kind: str = "none"
    after: int = 0
    seconds: float = 0.0
    piece: int = 1


class Proxy:
    """Listens at `address`, and forwards one connection to `target` in a thread."""

    def __init__(self, address, target, fault):
        self.listener = socket.create_server((address, 0))
        self.port = self.listener.getsockname()[1]
        self.target, self.fault = target, fault
        # Whether the fault has happened.
        self.happened = False
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def close(self):
        """Ends the connection."""
        self.ended.set()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.listener.close()

    def _run(self):
        try:
            worker, _ = self.listener.accept()
        except OSError:
            return
        with worker, socket.socket() as main, contextlib.suppress(OSError):
            main.connect(self.target)
            for end in (worker, main):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._forward(worker, main)

    def _forward(self, worker, main):
        passed, last = 0, time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(worker, selectors.EVENT_READ, main)
            selector.register(main, selectors.EVENT_READ, worker)
            while selector.get_map() and not self.ended.is_set():
                for key, _ in selector.select(0.05):
                    due = passed >= self.fault.after
                    if due and self.fault.kind in FATAL:
                        self.happened = True
                        return self._end(worker, main, key)
                    kind = self.fault.kind if due else "none"
                    if kind == "pauses" and time.monotonic() - last > self.fault.seconds:
                        self.happened = True
                        time.sleep(self.fault.seconds)
                        last = time.monotonic()
                    # Fatal faults happen exactly at their byte.
                    left = self.fault.after - passed if self.fault.kind in FATAL else 1 << 16
                    data = key.fileobj.recv(min(self.fault.piece if kind == "pieces" else 1 << 16, left))
                    passed += len(data)
                    if kind == "pieces":
                        self.happened = True
                    if data:
                        key.data.sendall(data)
                    else:
                        selector.unregister(key.fileobj)
                        key.data.shutdown(socket.SHUT_WR)

    def _end(self, worker, main, key):
        """Applies a fatal fault. The caller closes both sockets afterwards."""
        match self.fault.kind:
            case "reset":
                for end in (worker, main):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            case "half":
                # The other direction stays open until one end closes it.
                with contextlib.suppress(OSError):
                    key.data.shutdown(socket.SHUT_WR)
                other = key.data
                while not self.ended.is_set():
                    other.settimeout(0.05)
                    with contextlib.suppress(TimeoutError):
                        data = other.recv(1 << 16)
                        if not data:
                            return
                        key.fileobj.sendall(data)
            case "silence":
                self.ended.wait()
