"""An HTTP server in one thread. Clients that are silent or slow take few descriptors, and only for a limited time."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("rustloader")

# Maximum number of open connections. Prometheus needs one. Further connections get status 503.
MAX_CONNECTIONS = 8
# Seconds within which a client must have sent its request and read the response. Prometheus waits for 10 seconds.
CONNECTION_SECONDS = 10.0
# Seconds without new connections after the system has refused one, for example because the process has too many open
# files.
_PAUSE_SECONDS = 1.0
# Maximum size of a request in bytes, without a body.
_MAX_REQUEST = 1 << 14
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"


class HttpServer:
    """A server that closes each connection after one response.

    Args:
        address: The address to listen on.
        port: The port; 0 for a free one.
        respond: Returns the response to a request, both as bytes. The request ends with an empty line.

    Attributes:
        port: The port on which the server listens.

    Raises:
        OSError: The address cannot be used.
    """

    def __init__(self, address: str, port: int, respond: Callable[[bytes], bytes]) -> None:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._listener = socket.create_server(where[:2], family=family)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._respond = respond
        # By descriptor, oldest first.
        self._connections: dict[int, _Connection] = {}
        # No connection is accepted before this time.
        self._accepts_from = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rustloader-metrics", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._listener.close()
            raise

    def close(self) -> None:
        """Closes the port and all connections, and waits for the end of the thread."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()

    def drop(self) -> None:
        """Closes the descriptors in a forked child, which has no thread. The parent's connections stay open."""
        for connection in self._connections.values():
            connection.socket.close()
        self._listener.close()

    @property
    def descriptors(self) -> list[int]:
        """The open descriptors."""
        listening = [] if self._listener.fileno() < 0 else [self._listener.fileno()]
        return [*listening, *self._connections]

    def _run(self) -> None:
        try:
            while not self._closing:
                self._step()
        finally:
            for connection in [*self._connections.values()]:
                self._end(connection)
            self._listener.close()

    def _step(self) -> None:
        """Waits until there is something to do, and does it."""
        now = time.monotonic()
        poll = select.poll()
        wake_at = [connection.deadline for connection in self._connections.values()]
        if now >= self._accepts_from:
            poll.register(self._listener, select.POLLIN)
        else:
            wake_at.append(self._accepts_from)
        for number, connection in self._connections.items():
            poll.register(number, connection.awaits())
        ready = poll.poll(max(0.0, min(wake_at) - now) * 1000 + 1 if wake_at else None)
        for number, _ in ready:
            if number not in self._connections:
                self._accept()
            elif self._connections[number].advance(self._respond):
                self._end(self._connections[number])
        now = time.monotonic()
        for connection in [*self._connections.values()]:
            if now >= connection.deadline:
                self._end(connection)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if not self._closing:
                logger.debug("serve_metrics: no connection for %g s: %s", _PAUSE_SECONDS, error)
                self._accepts_from = time.monotonic() + _PAUSE_SECONDS
            return
        accepted.setblocking(False)
        connection = _Connection(accepted)
        if len(self._connections) >= MAX_CONNECTIONS:
            connection.refuse()
        else:
            self._connections[accepted.fileno()] = connection

    def _end(self, connection: _Connection) -> None:
        del self._connections[connection.socket.fileno()]
        connection.end()


class _Connection:
    """A connection: first it awaits the request, then it sends the response."""

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.deadline = time.monotonic() + CONNECTION_SECONDS
        self._request = b""
        self._unsent: memoryview | None = None

    def awaits(self) -> int:
        """Returns the event of `poll` for which the connection waits."""
        return select.POLLIN if self._unsent is None else select.POLLOUT

    def advance(self, respond: Callable[[bytes], bytes]) -> bool:
        """Receives or sends what is possible without waiting. Returns True if the connection has to be closed."""
        try:
            if self._unsent is None:
                piece = self.socket.recv(_MAX_REQUEST)
                self._request += piece
                if b"\r\n\r\n" not in self._request:
                    return not piece or len(self._request) > _MAX_REQUEST
                self._unsent = memoryview(respond(self._request))
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            return False
        except OSError:
            return True
        return not self._unsent

    def refuse(self) -> None:
        """Closes the connection with status 503."""
        with contextlib.suppress(OSError):
            self.socket.send(_BUSY)
        with contextlib.suppress(OSError):
            # If unread data remained, the system would reset the connection, and the client might miss the status.
            self.socket.recv(_MAX_REQUEST)
        self.end()

    def end(self) -> None:
        """Closes the connection, even if a forked child has a copy of the descriptor."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
