"""A proxy between a worker elsewhere and the main process, which disturbs the connection as a plan says."""

import contextlib
import selectors
import socket
import struct
import threading
import time
from typing import NamedTuple

# What may happen to a connection: nothing; its end, as a machine closes it, or with a reset; the end of one direction;
# pauses; bytes in small pieces; silence for good, which only a limit on the stall ends.
KINDS = ("none", "close", "reset", "half", "pauses", "pieces", "silence")
# Those that a worker does not outlive.
FATAL = ("close", "reset", "half", "silence")


class Fault(NamedTuple):
    """What happens to a connection.

    Attributes:
        kind: One of KINDS.
        after: Bytes that pass before it happens, both directions together.
        seconds: How long a pause is.
        piece: Bytes of a piece.
    """

    kind: str = "none"
    after: int = 0
    seconds: float = 0.0
    piece: int = 1


class Proxy:
    """Forwards one connection to `target`, in a thread. It listens at `address`."""

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
                    # Faults that kill come at the byte.
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
        """Ends the connection, or what is left of it."""
        match self.fault.kind:
            case "reset":
                for end in (worker, main):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            case "half":
                # The other direction stays open until an end closes it.
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
