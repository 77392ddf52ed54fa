"""The handshake on a worker's connection. Both ends prove that they know a secret before either unpickles anything.

The worker gets the secret from its launcher, such as Ray. The secret is never sent over the connection. The two ends
send these messages::

    main process    challenge: magic number, nonce
    worker          hello: magic number, nonce, worker ID, pid, versions as JSON
                    proof: HMAC-SHA256 of "worker", the challenge and the hello, with the secret as the key
    main process    proof: HMAC-SHA256 of "main", the challenge and the hello, with the secret as the key
                    reply: the job, or the reason why the main process refuses the worker
    worker          reply: the acknowledgement that it has read the job and dataset, or the error that prevented this

Each connection has new nonces, so a proof cannot be replayed on another connection. After the handshake, the engine
owns the connection.
"""

from __future__ import annotations

import errno
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
# Increment this with every change to the handshake, to the job, or to the frames that follow (src/transport/frame.rs).
PROTOCOL = 4
_MAGIC = b"rustload"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_CHALLENGE_BYTES = len(_MAGIC) + _NONCE_BYTES
# Magic number, nonce, worker ID, pid, length of the versions in bytes.
_HELLO = struct.Struct(f"<8s{_NONCE_BYTES}sIIH")
# The header of a reply: a flag, which is set if the handshake continues, and the number of bytes that follow.
_REPLY = struct.Struct("<?Q")
_VERSIONS_MAX = 4096
# Maximum size of a reply in bytes. It is large, because a job may contain the state of a dataset.
_REPLY_MAX = 1 << 30
# Seconds within which the other end of a connection must prove that it knows the secret. The limit is generous: an
# overloaded machine may be slow, and a few strangers that stay silent do not block other connections.
_HELLO_SECONDS = 30.0


class HandshakeError(RuntimeError):
    """Raised if the handshake fails: the other end refuses it or is not the expected one, or a message is too long."""


def new_token() -> bytes:
    """Returns a new secret for one worker."""
    return secrets.token_bytes(TOKEN_BYTES)


def versions() -> dict[str, str]:
    """Returns the versions that must be the same at both ends: rustloader's, because it encodes batches, and those of
    Python, torch and NumPy, because they pickle objects."""
    return {
        "rustloader": __version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        # A machine without a GPU may have another build of the same version.
        "torch": str(torch.__version__).partition("+")[0],
        "NumPy": np.__version__.partition(".")[0],
        "protocol": str(PROTOCOL),
    }


def version_mismatch(other: dict[str, Any]) -> str | None:
    """Describes how the other end's versions differ from those of this process. Returns None if they are the same."""
    own = versions()
    differing = [name for name, version in own.items() if other.get(name) != version]
    if not differing:
        return None
    pairs = ", ".join(f"{name} {other.get(name, 'unknown')} there and {own[name]} here" for name in differing)
    return f"the versions differ: {pairs}; install the same versions on both machines"


def listen(address: str) -> socket.socket:
    """Opens a listening socket on a free port of an IPv4 or IPv6 address. If this machine does not have the address
    (because it is behind NAT, or in a container), the socket listens on all interfaces.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", 0), family=family)


def _seconds_left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _send(connection: socket.socket, data: bytes, deadline: float) -> None:
    connection.settimeout(_seconds_left(deadline))
    connection.sendall(data)


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    received = bytearray()
    while len(received) < count:
        connection.settimeout(_seconds_left(deadline))
        piece = connection.recv(min(count - len(received), 1 << 20))
        if not piece:
            raise ConnectionResetError("the connection was closed during the handshake")
        received += piece
    return bytes(received)


def _proof(token: bytes, role: bytes, transcript: bytes) -> bytes:
    """Returns the proof that one end knows the secret. It is valid only for this role and this transcript."""
    return hmac.digest(token, role + transcript, "sha256")


def send_reply(connection: socket.socket, continues: bool, text: bytes, deadline: float) -> None:
    """Sends a reply. If ``continues`` is set, ``text`` is the content that the other end needs to continue; otherwise
    it is the reason why the handshake ends.

    Raises:
        HandshakeError: The reply is too long.
    """
    if len(text) > _REPLY_MAX:
        raise HandshakeError(
            f"its job has {len(text)} bytes, and at most {_REPLY_MAX} can be sent: "
            "reduce what the dataset's state_dict() and worker_init_fn contain"
        )
    _send(connection, _REPLY.pack(continues, len(text)) + text, deadline)


def receive_reply(connection: socket.socket, deadline: float) -> bytes:
    """Receives a reply and returns its content.

    Raises:
        HandshakeError: The other end refuses to continue (the error's message is its reason), or its reply is too long.
    """
    continues, length = _REPLY.unpack(_receive(connection, _REPLY.size, deadline))
    if length > _REPLY_MAX:
        raise HandshakeError(f"the other end announces a reply of {length} bytes, and at most {_REPLY_MAX} are allowed")
    text = _receive(connection, length, deadline)
    if not continues:
        raise HandshakeError(text.decode(errors="replace"))
    return text


def connect(address: str, port: int, token: bytes, worker_id: int, pid: int, deadline: float) -> socket.socket:
    """Connects to the main process. When this function returns, each end has proved to the other that it knows the
    secret.

    Raises:
        HandshakeError: The process that listens there is not the main process, or does not know the secret.
        OSError: No process listens there, or the process closes the connection, or does not answer by the deadline.
    """
    connection = socket.create_connection((address, port), timeout=_seconds_left(deadline))
    try:
        introduce(connection, token, worker_id, pid, deadline)
    except BaseException:
        connection.close()
        raise
    return connection


def introduce(connection: socket.socket, token: bytes, worker_id: int, pid: int, deadline: float) -> None:
    """Proves to the main process that this worker knows the secret, and checks that the main process knows it, too.
    Raises the same errors as `connect`."""
    challenge = _receive(connection, _CHALLENGE_BYTES, deadline)
    if not challenge.startswith(_MAGIC):
        raise HandshakeError("the process that listens there is not the main process of a DataLoader")
    own_versions = json.dumps(versions()).encode()
    hello = _HELLO.pack(_MAGIC, secrets.token_bytes(_NONCE_BYTES), worker_id, pid, len(own_versions)) + own_versions
    transcript = challenge + hello
    _send(connection, hello + _proof(token, b"worker", transcript), deadline)
    if not hmac.compare_digest(_receive(connection, _PROOF_BYTES, deadline), _proof(token, b"main", transcript)):
        raise HandshakeError("the process that listens there does not know the secret of this worker")


def authenticate_worker(connection: socket.socket, token: bytes, worker_id: int, deadline: float) -> int | None:
    """Checks that the other end is the expected worker, and proves to it that this process knows the secret.

    Returns:
        The worker's pid; None if the other end is not the worker. Such an end receives only the challenge.

    Raises:
        HandshakeError: The worker's versions differ from those of this process. The worker has been sent the reason.
    """
    limit = min(deadline, time.monotonic() + _HELLO_SECONDS)
    challenge = _MAGIC + secrets.token_bytes(_NONCE_BYTES)
    try:
        _send(connection, challenge, limit)
        head = _receive(connection, _HELLO.size, limit)
        magic, _, number, pid, length = _HELLO.unpack(head)
        if magic != _MAGIC or number != worker_id or length > _VERSIONS_MAX:
            return None
        worker_versions = _receive(connection, length, limit)
        transcript = challenge + head + worker_versions
        if not hmac.compare_digest(_receive(connection, _PROOF_BYTES, limit), _proof(token, b"worker", transcript)):
            return None
    except (OSError, HandshakeError):
        return None
    _send(connection, _proof(token, b"main", transcript), limit)
    reason = _mismatch_in(worker_versions)
    if reason is not None:
        send_reply(connection, False, reason.encode(), limit)
        raise HandshakeError(reason)
    return int(pid)


def _mismatch_in(text: bytes) -> str | None:
    try:
        other = json.loads(text)
    except ValueError:
        other = None
    return version_mismatch(other if isinstance(other, dict) else {})
