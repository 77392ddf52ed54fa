"""``rustloader.serve_metrics()``: serves the metrics of all loaders in a process over HTTP."""

from __future__ import annotations

import errno
import http.client
import io
import logging
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import rustloader.system.local_ranks as local_ranks
from rustloader.metrics.accounts import Accounts
from rustloader.metrics.http_server import HttpServer
from rustloader.metrics.report import global_rank
from rustloader.system.forks import at_fork

logger = logging.getLogger("rustloader")

# The open servers of this process. The set keeps them alive even if the program drops its references to them. A forked
# child drops the servers.
_servers: set[MetricsServer] = set()


class MetricsServer:
    """An HTTP server for the metrics of this process, started by ``rustloader.serve_metrics()``.

    Used as a context manager, it closes at the end of the body.

    Attributes:
        port: The port on which the server listens.
        address: The address on which the server listens.

    Examples:
        >>> with rustloader.serve_metrics(port=0) as server:
        ...     print(server.address, server.port > 0)
        127.0.0.1 True
    """

    def __init__(self, port: int, address: str) -> None:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        from rustloader.metrics.collector import LoaderCollector

        registry = CollectorRegistry(auto_describe=False)
        accounts = Accounts()
        try:
            registry.register(LoaderCollector(accounts, str(global_rank())))
            self._server = HttpServer(address, port, responder(make_wsgi_app(registry)))
        except BaseException:
            accounts.close()
            raise
        self._accounts: Accounts | None = accounts
        self.port: int = self._server.port
        self.address = address
        _servers.add(self)

    def close(self) -> None:
        """Stops the server and closes its port. Safe to call more than once.

        Examples:
            >>> server = rustloader.serve_metrics(port=0)
            >>> server.close()
        """
        accounts, self._accounts = self._accounts, None
        if accounts is None:
            return
        _servers.discard(self)
        accounts.close()
        self._server.close()

    def _drop(self) -> None:
        """Drops the server in a forked child, which has no server thread, and leaves the port to the parent."""
        accounts, self._accounts = self._accounts, None
        if accounts is not None:
            accounts.close()
            self._server.drop()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._accounts is None else f"at http://{self.address}:{self.port}/metrics"
        return f"<rustloader.MetricsServer {state}>"


def responder(app: Callable[..., Iterable[bytes]]) -> Callable[[bytes], bytes]:
    """Returns a function that answers an HTTP request with a WSGI application's response."""

    def respond(request: bytes) -> bytes:
        status, headers, body = "400 Bad Request", [], b""

        def start_response(new_status: str, new_headers: list[tuple[str, str]]) -> None:
            nonlocal status, headers
            status, headers = new_status, new_headers

        try:
            environ = _environ(request)
            if environ is not None:
                body = b"".join(app(environ, start_response))
        except Exception:
            logger.exception("serve_metrics: the metrics could not be read")
            status, headers, body = "500 Internal Server Error", [], b""
        lines = [f"{name}: {value}" for name, value in (*headers, ("Content-Length", str(len(body))))]
        return "\r\n".join([f"HTTP/1.0 {status}", *lines, "\r\n"]).encode("latin-1") + body

    return respond


def _environ(request: bytes) -> dict[str, Any] | None:
    """Returns those variables of WSGI that prometheus_client's application reads; None for a malformed request."""
    file = io.BytesIO(request)
    words = file.readline().decode("latin-1").split()
    try:
        headers = http.client.parse_headers(file)
    except http.client.HTTPException:
        return None
    if len(words) != 3 or not words[2].startswith("HTTP/"):
        return None
    path, _, query = words[1].partition("?")
    environ = {"REQUEST_METHOD": words[0], "PATH_INFO": path, "QUERY_STRING": query}
    return environ | {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items()}


# Messages show the name of the package that users import.
MetricsServer.__module__ = "rustloader"


def serve_metrics(port: int, address: str = "127.0.0.1") -> MetricsServer:
    """Serves the metrics of all loaders in this process over HTTP, for Prometheus and compatible systems.

    This needs prometheus_client: ``pip install 'rustloader[metrics]'``. One thread answers ``/metrics`` from the
    counters that ``rustloader.stats()`` reads. The fetches of loaders without workers are counted from their first
    ``iter()`` after this call; those of torch's class are not. At most 8 connections are open, each for
    at most 10 seconds; others get status 503. Loaders are identified by their names (``name=``). A loader's counts are
    kept after the program drops it, so counters never decrease. The page on metrics lists all metrics.

    Each rank has its own server, on ``port`` plus its local rank, which the launcher (torchrun, Slurm, MPI) sets: with
    ``port=9400``, local rank 3 has port 9403. Forked children, including workers, do not serve.

    The server has no authentication and no encryption. By default, only programs on this machine can connect. With any
    other ``address``, anyone who can reach it sees the names of loaders, their source files and their rates.

    Args:
        port: Port of local rank 0; 0 means a free port for each rank.
        address: Address to listen on (default: "127.0.0.1"). "0.0.0.0" means all interfaces.

    Returns:
        The server, with ``port`` and ``close()``.

    Raises:
        ImportError: prometheus_client is not installed.
        OSError: The port is in use, or the address does not belong to this machine.
        ValueError: ``port``, or ``port`` plus the local rank, is not between 0 and 65535.

    Examples:
        >>> server = rustloader.serve_metrics(port=0)
        >>> loader = rustloader.DataLoader(range(8), batch_size=4, num_workers=1, name="train")
        >>> batches = list(loader)
        >>> from urllib.request import urlopen
        >>> text = urlopen(f"http://127.0.0.1:{server.port}/metrics").read().decode()
        >>> print(next(line for line in text.splitlines() if line.startswith("rustloader_batches_total")))
        rustloader_batches_total{loader="train",rank="0"} 2.0
        >>> server.close()
    """
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "rustloader.serve_metrics() needs prometheus_client: pip install 'rustloader[metrics]'"
        ) from error
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ValueError(f"port must be an integer between 0 and 65535, got {port!r}")
    own_port = port + (local_ranks.rank() or 0) if port else 0
    if own_port > 65535:
        raise ValueError(f"port must leave room for the local ranks: {port} plus {own_port - port} is above 65535")
    try:
        return MetricsServer(own_port, address)
    except OSError as error:
        note = f"serve_metrics() could not listen on {address}, port {own_port} (the given port plus the local rank). "
        if error.errno == errno.EADDRINUSE and any(server.port == own_port for server in [*_servers]):
            note += "A server of this process already listens there and serves all its loaders; close() it first"
        else:
            note += "If the processes on this machine have no LOCAL_RANK, give each a different port, or port=0"
        error.add_note(note)
        raise


def _drop_all() -> None:
    for server in [*_servers]:
        server._drop()
    _servers.clear()


at_fork("metrics", after_in_child=_drop_all)
