"""Workers as actors of a Ray cluster: ``DataLoader(..., multiprocessing_context=rustloader.ray.RayContext())``.

Importing this module does not import Ray; making a context does. ``pip install rustloader[ray]`` brings it.
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
    "Ray was shut down while a DataLoader had workers on its cluster: they cannot be started again; make a new "
    "DataLoader"
)


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError(_MISSING) from error
    return ray


def _session(ray: Any) -> Any:
    """Returns an identity that distinguishes the connection to a cluster from earlier ones; None without a connection.
    Unlike most calls of Ray, this starts none."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


@functools.cache
def _actor_class() -> Any:
    """Returns the class of all actors: Ray exports each new one to the cluster. A new actor replaces one that has
    ended: Ray's own restarts and retries may repeat what was delivered.
    """
    return _ray().remote(max_restarts=0, max_task_retries=0)(_Actor)


class _Actor:
    """A worker. It has no arguments and no state: what it needs comes with the call, and a new one replaces it."""

    def begin(self) -> None:
        """Does nothing: its answer shows that the actor runs."""

    def serve(self, references: list[Any], call: Call, seconds: float) -> None:
        """Serves until the main process ends it. A reference in a list is not resolved by Ray, which would keep the
        dataset's pickle until the end of this call."""
        remote.serve(lambda: _ray().get(references.pop()), call, seconds)


class _StartedActor:
    """An actor whose ``serve`` was called."""

    def __init__(
        self, ray: Any, actor: Any, begun: Any, result: Any, call: Call, requested: Mapping[str, float]
    ) -> None:
        self._ray, self._actor, self._begun, self._result, self._requested = ray, actor, begun, result, requested
        self._place = f"{call.address}, port {call.port}"
        self._session = _session(ray)

    def failure(self) -> str | None:
        """Returns the reason why ``serve`` or the actor has ended; None while both run."""
        try:
            if _session(self._ray) != self._session:
                return "Ray was shut down"
            ready, _ = self._ray.wait([self._result], timeout=0, fetch_local=False)
            if not ready:
                return None
            self._ray.get(self._result, timeout=0)
        except Exception as error:
            # Ray raises a variable of its own frame.
            forget_frames(error)
            return f"{type(error).__name__}: {error}"
        return "the actor has ended its call"

    def waits_for(self) -> str:
        """Describes the resources that the actor asked for and those of the cluster, or the address that it cannot
        reach."""
        with contextlib.suppress(Exception):
            if self._ray.wait([self._begun], timeout=0, fetch_local=False)[0]:
                return (
                    f"its actor runs, and has not reached this process at {self._place}: the machines of the cluster "
                    "must reach each other at all ports, through firewalls, too"
                )
            if not self._requested:
                return "Ray has not started its actor: `ray status` says what the cluster waits for"
            total, free = self._ray.cluster_resources(), self._ray.available_resources()
            wanted = ", ".join(
                f"{name} {amount:g} (in the cluster {total.get(name, 0):g}, free {free.get(name, 0):g})"
                for name, amount in self._requested.items()
            )
            return f"its actor asks for {wanted}: add nodes, or ask for less by RayContext(num_cpus=..., resources=...)"
        return "Ray does not answer"

    def kill(self) -> None:
        """Ends the actor."""
        with contextlib.suppress(Exception):
            if _session(self._ray) == self._session:
                self._ray.kill(self._actor, no_restart=True)


class RayContext(RemoteContext):
    """A multiprocessing context whose workers are Ray actors, on any node of the cluster.

    Worker i is an actor with the id and the seeds of worker i, so batches are bit-identical to those of local workers.
    They come over a TCP connection of each actor to this process, not through Ray's object store. Ray starts an actor
    and reports its end; order, restarts (``max_restarts``) and exactly-once delivery are the loader's. The dataset is
    pickled by cloudpickle and put into the object store once.

    Args:
        num_cpus: CPUs that Ray reserves for each worker.
        num_gpus: GPUs that Ray reserves for each worker.
        resources: Further resources by name, as ``ray.remote`` takes them.
        placement_group: A placement group for all workers.
        scheduling_strategy: How Ray places workers outside a placement group (default: "SPREAD", over the nodes).
        runtime_env: The runtime environment of the workers, as ``ray.remote`` takes it.

    Raises:
        ImportError: Ray is not installed.

    Example:
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
        """This node's address in the cluster."""
        ray = _ray()
        if not ray.is_initialized():
            raise RuntimeError(_SHUT_DOWN)
        address: str = ray.util.get_node_ip_address()
        return address

    def dumps(self, value: Any) -> bytes:
        """Pickles by value the definitions of the main script."""
        from ray import cloudpickle

        blob: bytes = cloudpickle.dumps(value)
        return blob

    def put(self, blob: bytes) -> Any:
        """Puts bytes into the object store. Joins or starts a cluster if the program has not. Only this method does,
        because objects of one session do not exist in the next one."""
        ray = _ray()
        reference = ray.put(blob)
        return _session(ray), reference

    def launch(self, blob: Any, call: Call) -> _StartedActor:
        """Creates an actor, and calls it."""
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
