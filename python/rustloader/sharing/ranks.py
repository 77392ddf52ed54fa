"""One shared object for all ranks of a machine: the first one builds it, the others receive its descriptor.

The meeting point is an abstract Unix socket, which the kernel removes with the process that has bound it. Binding is
the lock: the rank that succeeds builds, and the others connect, say who they are, and wait for the descriptor. If the
builder dies or fails, they see the end of their connection, and the next one binds. There is no file.

A builder does not wait for the others. Those that have connected get the descriptor at once; for those that are still
to come, a thread keeps the name, until all have come, the timeout is over, or the process ends.
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

# Seconds between two attempts to connect to a rank that is between binding and listening, or has just left.
_RETRY_SECONDS = 0.02
# Seconds of the longest single wait: sockets count milliseconds in 31 bits.
_MAX_WAIT = 1e6
# Number of connections that wait at a listening socket, and of those that have not identified themselves yet.
_MAX_WAITING = 256
_CREDENTIALS = struct.Struct("3i")
# The prefix of a rank's name in its greeting, and the longest such greeting in bytes.
_HELLO = b"rustloader share "
_LONGEST = 128

# Number of times that this process has used a key: the n-th call of each rank belongs to the n-th of the others.
_uses: dict[str, int] = {}
# Held while a socket comes into being, so that no fork falls between the call and `_own`. A signal handler may fork.
_lock = threading.RLock()
# Sockets that only this process may keep open: a forked child would hold the name after this process's death.
_own: set[socket.socket] = set()
_servers: set[_Server] = set()


def _in_child() -> None:
    global _lock
    for sock in _own:
        sock.close()
    _own.clear()
    # Their threads are the parent's.
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
    # A fork in between would give the child a socket that it does not know.
    with _lock:
        _own.discard(sock)
        sock.close()


def _address(key: str, run: tuple[str, ...]) -> bytes:
    with _lock:
        use = _uses[key] = _uses.get(key, 0) + 1
    return _hashed([str(os.geteuid()), *run, key, str(use)])


def _hashed(parts: list[str]) -> bytes:
    # Lengths, so that no two lists of parts are the same bytes.
    name = "".join(f"{len(part)}:{part}" for part in parts)
    return b"\0rustloader-share-" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:40].encode()


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Returns the process and the user at the other end."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


class _Store(Protocol):
    """An object in a file that other processes can open by a descriptor."""

    def fileno(self) -> int: ...


_S = TypeVar("_S", bound=_Store)


def meet(key: str, build: Callable[[], _S], timeout: float, opened: Callable[[int], _S], call: str = "share") -> _S:
    """Returns the store of a key: built by the first rank of this machine, received by the others.

    Args:
        key: The key, which each function has for itself.
        build: Makes the store.
        timeout: Seconds that a rank waits for the one that builds.
        opened: Makes the store of a descriptor that was received.
        call: The function that the program has called.

    Raises:
        OSError: The descriptor could not be received.
        PermissionError: A process of another user holds the name.
        TimeoutError: The rank that builds has not finished within ``timeout`` seconds.
    """
    ranks = local_ranks()
    if ranks is None:
        return build()
    run = run_name()
    named = f"{call}(key={key!r})"
    if run is None:
        text = "%s: nothing in the environment names the run, so each rank has its own copy: set MASTER_PORT"
        logger.warning(text, named)
        return build()
    return _meet_at(_address(key if call == "share" else f"{call}/{key}", run), named, ranks, build, timeout, opened)


def meet_on_machine(name: str, build: Callable[[], _S], opened: Callable[[int], _S], call: str) -> _S:
    """Does the same as `meet` for processes of this machine whose number is unknown. No other store has the name."""
    ranks = Ranks(None, f"pid {os.getpid()}")
    return _meet_at(_hashed([str(os.geteuid()), call, name]), call, ranks, build, math.inf, opened)


def _meet_at(
    address: bytes, named: str, ranks: Ranks, build: Callable[[], _S], timeout: float, opened: Callable[[int], _S]
) -> _S:
    deadline = time.monotonic() + timeout
    while True:
        with _lock:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            _own.add(sock)
        try:
            if _is_bound(sock, address):
                sock.listen(_MAX_WAITING)
                store = build()
                server = _Server(sock, store, named, ranks, timeout)
                # It closes the socket from now on.
                sock = None  # type: ignore[assignment]
                server.begin()
                return store
            received = _received(sock, address, named, ranks, deadline, timeout)
            if received is not None:
                return opened(received)
        finally:
            if sock is not None:
                _close(sock)


def _is_bound(sock: socket.socket, address: bytes) -> bool:
    try:
        sock.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def _received(
    sock: socket.socket, address: bytes, named: str, ranks: Ranks, deadline: float, timeout: float
) -> int | None:
    """Waits for the descriptor; None if the rank that builds has gone, or does not listen yet."""
    late = TimeoutError(
        f"{named}: the rank of this machine that builds the object has not finished within {timeout:.0f} s; "
        "give a larger timeout, or look at what that rank does"
    )
    left = deadline - time.monotonic()
    if left <= 0:
        raise late
    pid = 0
    sock.settimeout(min(left, _MAX_WAIT))
    try:
        sock.connect(address)
        pid, uid = _peer(sock)
        if uid != os.geteuid():
            raise PermissionError(
                errno.EPERM, f"{named}: the name belongs to process {pid} of user {uid}; use another key"
            )
        sock.sendall(_HELLO + ranks.own.encode()[: _LONGEST - len(_HELLO)])
        word, fds, flags, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except TimeoutError:
        if left > _MAX_WAIT:
            return None
        raise late from None
    except (ConnectionError, BlockingIOError):
        word, fds, flags = b"", [], 0
    if fds:
        descriptor: int = fds[0]
        return descriptor
    if word:
        hint = "raise the limit of open files (`ulimit -n`)" if flags & socket.MSG_CTRUNC else "use another key"
        raise OSError(
            errno.EMFILE if flags & socket.MSG_CTRUNC else errno.EPROTO,
            f"{named}: process {pid} has sent no descriptor that could be opened: {hint}",
        )
    time.sleep(_RETRY_SECONDS)
    return None


class _Server:
    """Hands a descriptor to each other rank once."""

    def __init__(self, listener: socket.socket, store: _Store, named: str, ranks: Ranks, timeout: float) -> None:
        self._listener, self._store, self._named, self._ranks = listener, store, named, ranks
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        self._served: set[bytes] = set()
        # Connections that have not identified themselves yet.
        self._waiting: dict[int, socket.socket] = {}
        self._ended = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Serves the ranks that wait, and the later ones in a thread."""
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
        """Ends the thread, at the end of the process."""
        self._ended = True
        try:
            # Wakes it.
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("%s: the thread has ended already", self._named)
        if self._thread is not None:
            self._thread.join()

    def _is_complete(self) -> bool:
        return self._ranks.size is not None and len(self._served) >= self._ranks.size - 1

    def _run(self) -> None:
        try:
            while not (self._ended or self._is_complete()):
                left = self._deadline - time.monotonic()
                if left <= 0:
                    self._warn_of_missing_ranks()
                    break
                self._step(left)
        finally:
            self._close()

    def _warn_of_missing_ranks(self) -> None:
        if self._ranks.size is not None:
            text = "%s: %d of %d ranks of this machine have come within %.0f s; later ones build a copy"
            logger.warning(text, self._named, len(self._served) + 1, self._ranks.size, self._timeout)

    def _close(self) -> None:
        _servers.discard(self)
        for sock in (self._listener, *self._waiting.values()):
            _close(sock)

    def _step(self, seconds: float) -> bool:
        """Waits for a rank, and serves those that have come. Returns whether there was one."""
        poll = select.poll()
        for sock in (self._listener, *self._waiting.values()):
            poll.register(sock, select.POLLIN)
        ready = poll.poll(min(seconds * 1000, 1e9))
        for number, _ in ready:
            if number == self._listener.fileno():
                self._accept()
            else:
                # `_accept` may just have closed it for a newer one.
                if number in self._waiting:
                    self._answer(self._waiting.pop(number))
        return bool(ready)

    def _accept(self) -> None:
        try:
            with _lock:
                sock, _ = self._listener.accept()
                _own.add(sock)
        except OSError as error:
            # It has gone again, or there is no descriptor for it yet.
            logger.debug("%s: %s", self._named, error)
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

    def _answer(self, sock: socket.socket) -> None:
        try:
            word = sock.recv(_LONGEST)
            if word.startswith(_HELLO):
                socket.send_fds(sock, [b"1"], [self._store.fileno()])
                self._served.add(word)
        except OSError as error:
            # It has died, and comes back or not.
            logger.debug("%s: %s", self._named, error)
        finally:
            _close(sock)
