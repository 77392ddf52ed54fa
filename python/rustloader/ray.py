"""Workers as actors of a Ray cluster: ``DataLoader(..., multiprocessing_context=rustloader.ray.RayContext())``.

Importing this module does not import Ray; creating a context does. ``pip install rustloader[ray]`` installs Ray.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

from rustloader.remote.context import Call, RemoteContext
from rustloader.system.cleanup import forget_frames
from rustloader.workers import remote

__all__ = ["RayContext"]

_MISSING = "workers on a Ray cluster need Ray: install it with `pip install rustloader[ray]`"
_SHUT_DOWN = (
    "Ray was shut down while a DataLoader had workers on its cluster: they cannot be restarted; make a new DataLoader"
)


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError(_MISSING) from error
    return ray


def _session(ray: Any) -> Any:
    """Returns a value that distinguishes the current connection to a cluster from earlier ones; None if there is no
    connection. Unlike most of Ray's functions, this one does not start a cluster."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


@functools.cache
def _actor_class() -> Any:
    """Returns the class of all actors. It is created only once, because Ray exports every new class to the cluster.

    Ray must neither restart the actors nor retry their calls, because this could repeat batches that were already
    delivered. Instead, the engine starts a new actor in place of one that has ended.
    """
    return _ray().remote(max_restarts=0, max_task_retries=0)(_Actor)


class _Actor:
    """A worker. The actor has no arguments and no state: the call of ``serve`` passes all that it needs."""

    def begin(self) -> None:
        """Does nothing. The result of this call shows that the actor is running."""

    def serve(self, references: list[Any], call: Call, seconds: float) -> None:
        """Runs the worker until the main process ends it.

        Args:
            references: A list that contains only the reference to the dataset's pickle. Ray would resolve a reference
                that is passed without a list, and keep the pickle in memory until the end of this call.
            call: The parameters that the worker needs to connect back.
            seconds: Time limit of the handshake, in seconds.
        """
        remote.serve(lambda: _ray().get(references.pop()), call, seconds)


class _StartedActor:
    """The main process's handle to an actor on which ``serve`` has been called."""

    def __init__(
        self, ray: Any, actor: Any, begun: Any, result: Any, call: Call, requested: Mapping[str, float]
    ) -> None:
        self._ray, self._actor, self._begun, self._result, self._requested = ray, actor, begun, result, requested
        self._place = f"{call.address}, port {call.port}"
        self._session = _session(ray)

    def failure(self) -> str | None:
        """Returns the reason why ``serve`` or the actor has ended; None as long as neither has."""
        try:
            if _session(self._ray) != self._session:
                return "Ray was shut down"
            ready, _ = self._ray.wait([self._result], timeout=0, fetch_local=False)
            if not ready:
                return None
            self._ray.get(self._result, timeout=0)
        except Exception as error:
            # In Ray, a local variable holds the error that is raised: see `forget_frames`.
            forget_frames(error)
            return f"{type(error).__name__}: {error}"
        return "the actor's call of serve() has returned"

    def waits_for(self) -> str:
        """Describes what the actor may be waiting for: the resources that it requests, compared with those of the
        cluster, or the address that it has not reached yet."""
        with contextlib.suppress(Exception):
            if self._ray.wait([self._begun], timeout=0, fetch_local=False)[0]:
                return (
                    f"its actor runs, but has not reached this process at {self._place}: the machines of the cluster "
                    "must be able to reach each other on all ports, so no firewall may block them"
                )
            if not self._requested:
                return "Ray has not started its actor: `ray status` shows what the cluster is waiting for"
            total, free = self._ray.cluster_resources(), self._ray.available_resources()
            requested = ", ".join(
                f"{name} {amount:g} (in the cluster {total.get(name, 0):g}, free {free.get(name, 0):g})"
                for name, amount in self._requested.items()
            )
            return (
                f"its actor requests {requested}: add nodes, or request less with "
                "RayContext(num_cpus=..., resources=...)"
            )
        return "Ray does not answer"

    def kill(self) -> None:
        """Ends the actor. Does nothing if Ray was shut down."""
        with contextlib.suppress(Exception):
            if _session(self._ray) == self._session:
                self._ray.kill(self._actor, no_restart=True)


class RayContext(RemoteContext):
    """A multiprocessing context whose workers are Ray actors, on any nodes of the cluster.

    Each actor has the worker ID and the seeds that a local worker would have, so its batches are bit-identical to those
    of a local worker. It sends them over its own TCP connection to this process, not through Ray's object store. Ray
    starts the actors and reports when they end; the loader is responsible for order, restarts (``max_restarts``) and
    exactly-once delivery. The dataset is pickled with cloudpickle and put into the object store once.

    Args:
        num_cpus: Number of CPUs that Ray reserves for each worker.
        num_gpus: Number of GPUs that Ray reserves for each worker.
        resources: Amounts of other resources for each worker, by name, in the form that ``ray.remote`` accepts.
        placement_group: A placement group for all workers; None for no placement group.
        scheduling_strategy: Ray's scheduling strategy for the workers, used only if there is no placement group
            (default: "SPREAD", which distributes them over the nodes).
        runtime_env: The runtime environment of the workers, in the form that ``ray.remote`` accepts.

    Raises:
        ImportError: Ray is not installed.

    Examples:
        >>> context = rustloader.ray.RayContext(num_cpus=1)  # doctest: +SKIP
        >>> loader = rustloader.DataLoader(dataset, num_workers=8, multiprocessing_context=context)  # doctest: +SKIP
    """

    _name = "ray"

    def __init__(
        self,
        num_cpus: float = 1,
        *,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        placement_group: Any = None,
        scheduling_strategy: Any = "SPREAD",
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        self._options: dict[str, Any] = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "resources": None if resources is None else dict(resources),
            "placement_group": placement_group,
            "scheduling_strategy": scheduling_strategy,
            "runtime_env": None if runtime_env is None else dict(runtime_env),
        }
        _ray()

    def __reduce__(self) -> Any:
        return functools.partial(RayContext, **self._options), ()

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._options.items() if value not in (None, 0))
        return f"RayContext({given})"

    def address(self) -> str:
        """Returns this node's address in the cluster. Raises RuntimeError if Ray was shut down."""
        ray = _ray()
        if not ray.is_initialized():
            raise RuntimeError(_SHUT_DOWN)
        address: str = ray.util.get_node_ip_address()
        return address

    def dumps(self, value: Any) -> bytes:
        """Pickles a value with cloudpickle, which pickles definitions of the main script by value."""
        from ray import cloudpickle

        blob: bytes = cloudpickle.dumps(value)
        return blob

    def put(self, blob: bytes) -> Any:
        """Puts bytes into the object store. If the program has not joined or started a cluster, this method does; the
        other methods do not, because the objects of one session do not exist in the next."""
        ray = _ray()
        reference = ray.put(blob)
        return _session(ray), reference

    def launch(self, blob: Any, call: Call) -> _StartedActor:
        """Creates an actor and calls its ``serve``. Raises RuntimeError if Ray was shut down since ``put``."""
        ray, (session, reference) = _ray(), blob
        if _session(ray) != session:
            raise RuntimeError(_SHUT_DOWN)
        options = {name: value for name, value in self._options.items() if value is not None}
        group = options.pop("placement_group", None)
        if group is not None:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group)
        actor = _actor_class().options(**options).remote()
        begun, result = actor.begin.remote(), actor.serve.remote([reference], call, self.start_seconds)
        requested = {
            "CPU": self._options["num_cpus"],
            "GPU": self._options["num_gpus"],
            **(self._options["resources"] or {}),
        }
        return _StartedActor(
            ray, actor, begun, result, call, {name: amount for name, amount in requested.items() if amount}
        )
