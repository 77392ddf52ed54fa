"""``reshard``: converts the states of all ranks with a DistributedSampler to states for another number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rustloader.order.computed import check_shard_start, samples_per_rank
from rustloader.stateful_dataloader import schema
from rustloader.stateful_dataloader.schema import OWN, DatasetState, Own, SamplerState


def reshard(states: Sequence[Mapping[str, Any]], num_replicas: int) -> list[dict[str, Any]]:
    """Converts the states of all ranks for another number of ranks, which share the remaining samples of the epoch.

    A DistributedSampler deals the indices of an epoch to its ranks in turn. So ranks that have delivered the same
    number of batches have together delivered the first part of the order. The remaining samples are dealt to the new
    ranks. Across all old and new ranks, each sample is delivered once. If the remaining samples do not divide evenly
    among the ranks, the sampler repeats the first of them or, with ``drop_last``, leaves out the last of them. torch
    does so in every epoch.

    Each new rank loads the state at its index in the list into a loader with the same batch size and a
    DistributedSampler with the new ``num_replicas``. Batch counts continue from those in the states. A new rank takes
    its seeds from the state of an old rank. States can be resharded again.

    Args:
        states: The states of all ranks, in any order, taken after the same batch.
        num_replicas: New number of ranks.

    Returns:
        The new states, in order of rank.

    Raises:
        ValueError: ``num_replicas`` is not a positive integer; the states are not those of all ranks of one
            DistributedSampler at the same position; or the delivered batches are not the first part of the order:
            batches were delivered out of order, or the dataset has a state.

    Examples:
        >>> def loader(rank, num_replicas):
        ...     sampler = torch.utils.data.DistributedSampler(range(12), num_replicas, rank, shuffle=False)
        ...     return rustloader.StatefulDataLoader(range(12), batch_size=2, sampler=sampler)
        >>> states = []
        >>> for rank in range(3):
        ...     stopped = loader(rank, 3)
        ...     for batch in stopped:
        ...         break
        ...     states.append(stopped.state_dict())
        >>> resumed = loader(1, 2)
        >>> resumed.load_state_dict(rustloader.stateful_dataloader.reshard(states, 2)[1])
        >>> list(resumed)
        [tensor([7, 9]), tensor([11])]
    """
    if type(num_replicas) is not int or num_replicas <= 0:
        raise ValueError(f"num_replicas must be a positive integer, got {num_replicas!r}")
    ranks = _in_order([_Rank(state) for state in states])
    samplers = [_resharded(rank.sampler, rank.position, len(ranks), num_replicas) for rank in ranks]
    new_states = []
    for number in range(num_replicas):
        source = number % len(ranks)
        state: dict[str, Any] = copy.deepcopy(dict(ranks[source].state))
        if num_replicas != len(ranks):
            # This count of failures is that of an old rank.
            state[OWN].pop(Own.FAILURES, None)
            sampler = samplers[source]
            start = sampler.start and sampler.start | {"rank": number}
            state[OWN][Own.SAMPLER] = replace(sampler, start=start).own
        new_states.append(state)
    return new_states


class _Rank:
    """A rank's state, with the entries to convert. Raises ValueError if the state cannot be resharded."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        own = state.get(OWN) if isinstance(state, Mapping) else None
        if not isinstance(own, Mapping) or not isinstance(own.get(Own.SAMPLER), Mapping):
            raise ValueError(
                f"states must be those of a rustloader.StatefulDataLoader, with the key {OWN!r}, got a "
                f"{type(state).__name__} without it"
            )
        self.state = state
        self.sampler = SamplerState.of(own[Own.SAMPLER])
        if self.sampler.kind != "distributed":
            raise ValueError(
                f"the states are of a sampler of kind {self.sampler.kind!r}: only states of torch's DistributedSampler "
                "or of a subclass that changes neither its order nor its state can be resharded"
            )
        if own.get(Own.AHEAD):
            raise ValueError(
                f"batches {list(own[Own.AHEAD])} were delivered before earlier ones, so the remaining samples cannot "
                "be redistributed: take the states with in_order=True, or at the end of an epoch"
            )
        if DatasetState.of(own.get(Own.DATASET) or {}).stateful:
            raise ValueError(
                "the dataset has a state, which cannot be divided among other ranks: resume with the same number of "
                "ranks"
            )
        self.position = _position(state)
        self.start: Mapping[str, Any] | None = self.sampler.start
        if self.start is not None:
            check_shard_start(self.start)

    def common(self) -> dict[str, Any]:
        """Returns the entries that must be equal in the states of all ranks."""
        entries = {name: getattr(self.sampler, name) for name in ("batch_size", "drop_last", "length")}
        entries |= {schema.FINISHED: self.state.get(schema.FINISHED), "number of batches": self.position}
        entries["start of the epoch"] = "not begun" if self.start is None else "begun"
        shared = {} if self.start is None else self.start
        return entries | {f"sampler's {name}": value for name, value in shared.items() if name != "rank"}


def _position(state: Mapping[str, Any]) -> int:
    try:
        if schema.SNAPSHOT in state:
            main = state[schema.SNAPSHOT][schema.MAIN]
            delivered = main[schema.SAMPLER_ITER_YIELDED] + state[schema.STEPS]
        else:
            delivered = state[schema.SAMPLER_ITER_YIELDED]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the number of delivered batches cannot be read from a state: {error!r}") from error
    if type(delivered) is not int or delivered < 0:
        raise ValueError(f"a state's number of delivered batches must be a non-negative integer, got {delivered!r}")
    return delivered


def _in_order(ranks: list[_Rank]) -> list[_Rank]:
    """Returns the states of all ranks, sorted by rank. Raises ValueError if they do not belong together."""
    if not ranks:
        raise ValueError("states must be those of all ranks, got none")
    first = ranks[0].common()
    for rank in ranks[1:]:
        for name, value in rank.common().items():
            if value != first.get(name):
                raise ValueError(
                    f"the states differ in the {name}: {first.get(name)!r} and {value!r}. Take the states of all "
                    "ranks of one run after the same batch"
                )
    if ranks[0].start is None:
        return ranks
    replicas = ranks[0].start["num_replicas"]
    numbered = {rank.start["rank"]: rank for rank in ranks if rank.start is not None}
    if sorted(numbered) != list(range(replicas)) or len(ranks) != replicas:
        present = ", ".join(str(rank.start and rank.start["rank"]) for rank in ranks)
        raise ValueError(f"states must be those of all {replicas} ranks, got those of ranks {present}")
    return [numbered[number] for number in range(replicas)]


def _resharded(sampler: SamplerState, position: int, old: int, new: int) -> SamplerState:
    """Converts the state of a sampler from ``old`` ranks to ``new`` ranks."""
    start = sampler.start
    if start is None:
        # The epoch has not begun. Its order depends on the sampler alone.
        return replace(sampler, length=None)
    size = 1 if sampler.batch_size is None else sampler.batch_size
    length, consumed = start["dataset_length"], start["consumed"]
    samples = min((position - start["first"]) * size, samples_per_rank(length - consumed, old, start["drop_last"]))
    # All ranks together may have delivered more samples than the order has, because its first samples are repeated to
    # give all ranks the same number.
    consumed = min(consumed + samples * old, length)
    return replace(
        sampler,
        length=samples_per_rank(length, new, start["drop_last"]),
        start=dict(start) | {"num_replicas": new, "consumed": consumed, "first": position},
    )
