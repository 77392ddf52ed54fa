"""Whether something listens at the address of a Ray cluster."""

import socket


def reach(address: str) -> None:
    """Raises OSError if nothing listens at ``host:port``: Ray would end the process. Ray resolves other forms."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
