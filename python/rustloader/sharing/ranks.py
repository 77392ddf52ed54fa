"""Shares one object among all ranks of a machine: the first rank builds the object, and the others receive its
descriptor.

The meeting point is an abstract Unix socket, which the kernel removes when the process that bound it ends. Binding
serves as the lock: the rank that succeeds builds the object, and the others connect, identify themselves, and wait for
the descriptor. If the builder dies or fails, the connections end, and the next rank binds the socket. No file is
involved.

A builder does not wait for the others. Ranks that have already connected receive the descriptor at once. For later
ranks, a thread keeps the socket until all have connected, the timeout has passed, or the process ends.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import logging
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from rustloader.sharing.launchers import Ranks, local_ranks, run_name
from rustloader.system.forks import at_fork

logger = logging.getLogger("rustloader")

# Seconds between two attempts to connect to a rank that has bound its socket but does not listen yet, or that has just
# exited.
_RETRY_SECONDS = 0.02
# Maximum seconds of a single wait, because sockets count milliseconds in 31 bits.
_MAX_WAIT = 1e6
# Maximum number of connections in the backlog of a listening socket, and of accepted connections that have not
# identified themselves.
_MAX_WAITING = 256
_CREDENTIALS = struct.Struct("3i")
# Prefix of the greeting that a rank sends to identify itself, and maximum length of a greeting in bytes.
_HELLO = b"rustloader share "
_MAX_GREETING = 128

# Number of times that this process has used each key. For each key, the n-th call of a rank matches the n-th calls of
# the others.
_uses: dict[str, int] = {}
# Held while a socket is created, so that no fork happens between its creation and its entry in `_own`. Reentrant,
# because a signal handler may fork.
_lock = threading.RLock()
# Sockets that a forked child closes: in a child, they would keep the name bound after this process has died.
_own: set[socket.socket] = set()
_servers: set[_Server] = set()


def _in_child() -> None:
    global _lock
    for sock in _own:
        sock.close()
    _own.clear()
    # The threads of the servers exist only in the parent.
    _servers.clear()
    _lock = threading.RLock()


def _before_fork() -> None:
    _lock.acquire()


def _in_parent() -> None:
    _lock.release()


def _at_exit() -> None:
    for server in list(_servers):
        server.end()


at_fork("ranks", before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
atexit.register(_at_exit)


def _close(sock: socket.socket) -> None:
    # A fork between the two steps would leave the child with an open socket that it cannot find.
    with _lock:
        _own.discard(sock)
        sock.close()


def _address(key: str, run: tuple[str, ...]) -> bytes:
    with _lock:
        use = _uses[key] = _uses.get(key, 0) + 1
    return _socket_name([str(os.geteuid()), *run, key, str(use)])


def _socket_name(parts: list[str]) -> bytes:
    # The lengths ensure that different lists of parts result in different names.
    name = "".join(f"{len(part)}:{part}" for part in parts)
    return b"\0rustloader-share-" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:40].encode()


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Returns the process ID and the user ID at the other end of a socket."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


class _Store(Protocol):
    """An object in a file, which other processes can open through a descriptor."""

    def fileno(self) -> int: ...


_S = TypeVar("_S", bound=_Store)


def meet(key: str, build: Callable[[], _S], timeout: float, open_store: Callable[[int], _S], call: str = "share") -> _S:
    """Returns the store for a key. The first rank of this machine builds it, and the others receive it.

    Args:
        key: The key. Keys of different functions (``call``) do not conflict.
        build: Builds the store.
        timeout: Seconds that a rank waits for the rank that builds the store, and for which the builder serves ranks
            that connect later.
        open_store: Opens the store through a descriptor that was received.
        call: Name of the function that the program called.

    Raises:
        OSError: The descriptor could not be received.
        PermissionError: A process of another user holds the name.
        TimeoutError: The rank that builds the store did not finish within ``timeout`` seconds.
    """
    ranks = local_ranks()
    if ranks is None:
        return build()
    run = run_name()
    label = f"{call}(key={key!r})"
    if run is None:
        text = "%s: nothing in the environment names the run, so each rank has its own copy: set MASTER_PORT"
        logger.warning(text, label)
        return build()
    address = _address(key if call == "share" else f"{call}/{key}", run)
    return _meet_at(address, label, ranks, build, timeout, open_store)


def meet_on_machine(name: str, build: Callable[[], _S], open_store: Callable[[int], _S], call: str) -> _S:
    """Works like `meet`, for an unknown number of processes on this machine. The name must be unique to the store."""
    ranks = Ranks(None, f"pid {os.getpid()}")
    return _meet_at(_socket_name([str(os.geteuid()), call, name]), call, ranks, build, math.inf, open_store)


def _meet_at(
    address: bytes, label: str, ranks: Ranks, build: Callable[[], _S], timeout: float, open_store: Callable[[int], _S]
) -> _S:
    deadline = time.monotonic() + timeout
    while True:
        with _lock:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            _own.add(sock)
        try:
            if _bind(sock, address):
                sock.listen(_MAX_WAITING)
                store = build()
                server = _Server(sock, store, label, ranks, timeout)
                # From now on the server is responsible for closing the socket.
                sock = None  # type: ignore[assignment]
                server.begin()
                return store
            received = _receive_descriptor(sock, address, label, ranks, deadline, timeout)
            if received is not None:
                return open_store(received)
        finally:
            if sock is not None:
                _close(sock)


def _bind(sock: socket.socket, address: bytes) -> bool:
    """Binds a socket. Returns False if another socket has the address."""
    try:
        sock.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def _receive_descriptor(
    sock: socket.socket, address: bytes, label: str, ranks: Ranks, deadline: float, timeout: float
) -> int | None:
    """Waits for the descriptor and returns it. Returns None if the caller must try again: the rank that builds the
    store has exited or does not listen yet."""
    late = TimeoutError(
        f"{label}: the rank of this machine that builds the object did not finish within {timeout:.0f} s; "
        "use a larger timeout, or find out why that rank is slow"
    )
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise late
    pid = 0
    sock.settimeout(min(remaining, _MAX_WAIT))
    try:
        sock.connect(address)
        pid, uid = _peer(sock)
        if uid != os.geteuid():
            raise PermissionError(
                errno.EPERM, f"{label}: the name belongs to process {pid} of user {uid}; use another key"
            )
        sock.sendall(_HELLO + ranks.own.encode()[: _MAX_GREETING - len(_HELLO)])
        reply, fds, flags, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except TimeoutError:
        if remaining > _MAX_WAIT:
            return None
        raise late from None
    except (ConnectionError, BlockingIOError):
        reply, fds, flags = b"", [], 0
    if fds:
        descriptor: int = fds[0]
        return descriptor
    if reply:
        hint = "raise the limit of open files (`ulimit -n`)" if flags & socket.MSG_CTRUNC else "use another key"
        raise OSError(
            errno.EMFILE if flags & socket.MSG_CTRUNC else errno.EPROTO,
            f"{label}: process {pid} sent no usable descriptor: {hint}",
        )
    time.sleep(_RETRY_SECONDS)
    return None


class _Server:
    """A server that sends the store's descriptor to each of the other ranks once."""

    def __init__(self, listener: socket.socket, store: _Store, label: str, ranks: Ranks, timeout: float) -> None:
        self._listener, self._store, self._label, self._ranks = listener, store, label, ranks
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        self._served: set[bytes] = set()
        # Accepted connections that have not identified themselves, by descriptor.
        self._waiting: dict[int, socket.socket] = {}
        self._ended = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Serves the ranks that are waiting, and starts a thread for later ranks."""
        self._listener.setblocking(False)
        try:
            while not self._is_complete() and self._step(0.0):
                pass
            if not self._is_complete():
                self._thread = threading.Thread(target=self._run, name="rustloader-share", daemon=True)
                _servers.add(self)
                self._thread.start()
        except BaseException:
            self._thread = None
            raise
        finally:
            if self._thread is None:
                self._close()

    def end(self) -> None:
        """Ends the thread, and waits for it. Called when the process exits."""
        self._ended = True
        try:
            # Wakes the thread.
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("%s: the thread has already ended", self._label)
        if self._thread is not None:
            self._thread.join()

    def _is_complete(self) -> bool:
        return self._ranks.size is not None and len(self._served) >= self._ranks.size - 1

    def _run(self) -> None:
        try:
            while not (self._ended or self._is_complete()):
                remaining = self._deadline - time.monotonic()
                if remaining <= 0:
                    self._warn_of_missing_ranks()
                    break
                self._step(remaining)
        finally:
            self._close()

    def _warn_of_missing_ranks(self) -> None:
        if self._ranks.size is not None:
            text = "%s: only %d of %d ranks of this machine connected within %.0f s; later ranks build their own copies"
            logger.warning(text, self._label, len(self._served) + 1, self._ranks.size, self._timeout)

    def _close(self) -> None:
        _servers.discard(self)
        for sock in (self._listener, *self._waiting.values()):
            _close(sock)

    def _step(self, seconds: float) -> bool:
        """Waits for connections, and serves those that are ready. Returns True if there were any."""
        poll = select.poll()
        for sock in (self._listener, *self._waiting.values()):
            poll.register(sock, select.POLLIN)
        ready = poll.poll(min(seconds * 1000, 1e9))
        for number, _ in ready:
            if number == self._listener.fileno():
                self._accept()
            else:
                # `_accept` may just have closed this connection in favor of a newer one.
                if number in self._waiting:
                    self._serve(self._waiting.pop(number))
        return bool(ready)

    def _accept(self) -> None:
        try:
            with _lock:
                sock, _ = self._listener.accept()
                _own.add(sock)
        except OSError as error:
            # The rank has already disconnected, or this process has no descriptor left for the connection.
            logger.debug("%s: %s", self._label, error)
            if not self._ended:
                time.sleep(_RETRY_SECONDS)
            return
        if _peer(sock)[1] != os.geteuid():
            _close(sock)
            return
        if len(self._waiting) >= _MAX_WAITING:
            _close(self._waiting.pop(next(iter(self._waiting))))
        sock.setblocking(False)
        self._waiting[sock.fileno()] = sock

    def _serve(self, sock: socket.socket) -> None:
        try:
            greeting = sock.recv(_MAX_GREETING)
            if greeting.startswith(_HELLO):
                socket.send_fds(sock, [b"1"], [self._store.fileno()])
                self._served.add(greeting)
        except OSError as error:
            # The rank has died. If it is restarted, it connects again.
            logger.debug("%s: %s", self._label, error)
        finally:
            _close(sock)
