"""The handshake of a connection. The main process unpickles nothing before the worker has shown the token.

The worker sends a magic number, the token, its worker number, pid and its versions as JSON. The main process answers
with the job, or with the reason why it refuses. The worker says that it has read everything, or what error prevents
it. After that the connection belongs to the engine.
"""

from __future__ import annotations

import hmac
import json
import platform
import secrets
import socket
import struct
import time
from typing import Any

import numpy as np
import torch

from rustloader._core import __version__

TOKEN_BYTES = 32
_MAGIC = b"rustload"
# Magic, token, worker number, pid, bytes of the versions.
_HELLO = struct.Struct(f"<8s{TOKEN_BYTES}sIIH")
# Whether the sender goes on, and bytes of what follows.
_ANSWER = struct.Struct("<?Q")
_VERSIONS_MAX = 4096
_ANSWER_MAX = 1 << 34
# Seconds that a connection may take to show its token: a stranger does not hold the start up for longer.
_HELLO_SECONDS = 5.0


class HandshakeError(RuntimeError):
    """The other end refuses, or what it sends is no handshake."""


def new_token() -> bytes:
    """A secret for one connection."""
    return secrets.token_bytes(TOKEN_BYTES)


def versions() -> dict[str, str]:
    """What must be equal at both ends: batches are encoded by rustloader, and pickled by torch and NumPy."""
    return {
        "rustloader": __version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        # A machine without a GPU may have another build of the same version.
        "torch": str(torch.__version__).partition("+")[0],
        "NumPy": np.__version__.partition(".")[0],
    }


def skew(theirs: dict[str, Any]) -> str | None:
    """How the versions of a worker differ from these, or None."""
    ours = versions()
    differing = [name for name, version in ours.items() if theirs.get(name) != version]
    if not differing:
        return None
    pairs = ", ".join(f"{name} {theirs.get(name, 'unknown')} there and {ours[name]} here" for name in differing)
    return f"the versions differ: {pairs}; install the same ones on both machines"


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    received = bytearray()
    while len(received) < count:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        piece = connection.recv(min(count - len(received), 1 << 20))
        if not piece:
            raise HandshakeError("the connection was closed in the handshake")
        received += piece
    return bytes(received)


def send_answer(connection: socket.socket, goes_on: bool, text: bytes, deadline: float) -> None:
    """Sends the next part of a handshake: the job, or a reason to end it."""
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    connection.sendall(_ANSWER.pack(goes_on, len(text)) + text)


def receive_answer(connection: socket.socket, deadline: float) -> bytes:
    """Receives the next part of a handshake. Raises HandshakeError with the reason of the other end."""
    goes_on, length = _ANSWER.unpack(_receive(connection, _ANSWER.size, deadline))
    if length > _ANSWER_MAX:
        raise HandshakeError(f"a handshake of {length} bytes")
    text = _receive(connection, length, deadline)
    if not goes_on:
        raise HandshakeError(text.decode(errors="replace"))
    return text


def connect(address: str, port: int, token: bytes, worker_id: int, pid: int, deadline: float) -> socket.socket:
    """Connects to the main process and shows the token."""
    connection = socket.create_connection((address, port), timeout=max(deadline - time.monotonic(), 0.001))
    try:
        told = json.dumps(versions()).encode()
        connection.sendall(_HELLO.pack(_MAGIC, token, worker_id, pid, len(told)) + told)
    except BaseException:
        connection.close()
        raise
    return connection


def is_expected(connection: socket.socket, token: bytes, worker_id: int, deadline: float) -> int | None:
    """Reads how a connection begins. Returns the worker's pid; None for a stranger, who is told nothing.

    Raises:
        HandshakeError: It is the worker, and its versions differ. It has been told.
    """
    limit = min(deadline, time.monotonic() + _HELLO_SECONDS)
    try:
        magic, shown, number, pid, length = _HELLO.unpack(_receive(connection, _HELLO.size, limit))
        known = hmac.compare_digest(shown, token)
        if not known or magic != _MAGIC or number != worker_id or length > _VERSIONS_MAX:
            return None
        told = _receive(connection, length, limit)
    except (OSError, HandshakeError):
        return None
    reason = _skew_of(told)
    if reason is not None:
        send_answer(connection, False, reason.encode(), limit)
        raise HandshakeError(reason)
    return int(pid)


def _skew_of(told: bytes) -> str | None:
    try:
        theirs = json.loads(told)
    except ValueError:
        theirs = None
    return skew(theirs if isinstance(theirs, dict) else {})
