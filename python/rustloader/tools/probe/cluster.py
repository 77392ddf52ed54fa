"""Checks that a Ray cluster is reachable."""

import socket


def reach(address: str) -> None:
    """Raises OSError if nothing listens at ``host:port``. Ray would terminate this process in that case.

    Other forms of an address, such as "auto" or "ray://host:port", are not checked: Ray resolves them itself.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
