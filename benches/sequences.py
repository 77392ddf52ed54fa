"""Measures the batch samplers for sequences: `make compare KIND=sequences`. The row `pack` needs transformers.

waste     percentage of padding in batches of a token budget, and of free room in packs of 8,192 tokens: 1,000,000
          log-normal lengths, sigma 1
plan      seconds to plan an epoch of 10,000,000 such lengths on one core, and bytes of the plan per sample
resume    bytes of a pickled state, and seconds to the first batch from the middle of an epoch, more than from its start
pack      microseconds to concatenate 8 sequences of 1,024 tokens: `pack` and transformers' DataCollatorWithFlattening
places    chi-square per degree of freedom of the places of the samples' batches, in tenths of the epoch, over 10,000
          epochs of 200 samples; beside a plain shuffle in batches of 10
"""

import os
import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from harness.program import Program, main, missed

from rustloader import PackingBatchSampler, TokenBudgetBatchSampler, pack
from rustloader._core import SequencePlan
from rustloader.system.procfs import private
from rustloader.tools.harness.rounds import Failure

TOKENS = 8192
# Goals: percentages of waste, seconds, bytes, factor, chi-square (the 99.9 % band of 200 x 9 degrees of freedom).
PADDING, ROOM, SECONDS, PER_SAMPLE, STATE, LATER, FACTOR, BAND = 2, 2, 1, 16, 1024, 0.1, 5, 1.106

program = Program(__doc__, ["waste", "plan", "resume", "pack", "places"])


def lengths_of(count: int) -> np.ndarray:
    """Returns log-normal lengths with a median of 300 tokens, at most 8,192."""
    drawn = np.random.default_rng(0).lognormal(np.log(300), 1, count)
    return drawn.clip(1, TOKENS).astype(np.uint32)


def seconds(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def show(what: str, value: float, goal: float, unit: str, at_least: bool = False) -> None:
    held = value >= goal if at_least else value <= goal
    sign = ">=" if at_least else "<="
    program.line(what, what, f"{value:,.3g} {unit}", f"{sign} {goal:,g}", missed(held), held=held, value=value)


def waste() -> None:
    lengths = lengths_of(1_000_000)
    shape = [(len(batch), lengths[batch].max()) for batch in TokenBudgetBatchSampler(lengths, 4 * TOKENS)]
    padded = sum(int(samples) * int(longest) for samples, longest in shape)
    show("padding", 100 * (1 - lengths.sum(dtype=np.int64) / padded), PADDING, "%")
    packs = len(PackingBatchSampler(lengths, TOKENS))
    show("free room of packs", 100 * (1 - lengths.sum(dtype=np.int64) / (packs * TOKENS)), ROOM, "%")


def plan() -> None:
    lengths, order = lengths_of(10_000_000), (True, 0, 1, 8192)
    ways = {
        "budget": lambda: SequencePlan.budget(lengths, order, 4 * TOKENS, 1 << 32, 1),
        "packs": lambda: SequencePlan.packs(lengths, order, TOKENS, 1, False),
    }
    for name, way in ways.items():
        show(f"plan, {name}", statistics.median(seconds(way) for _ in range(program.options.rounds)), SECONDS, "s")
        before = private(os.getpid()) or 0
        made = way()
        more = (private(os.getpid()) or 0) - before
        show(f"memory, {name}, {len(made):,} batches", more / len(lengths), PER_SAMPLE, "bytes per sample")
        del made  # its memory would be counted as that of the next plan


def resume() -> None:
    lengths = lengths_of(10_000_000)
    sampler = TokenBudgetBatchSampler(lengths, 4 * TOKENS)
    state = sampler.state_dict()
    show("state", len(pickle.dumps(state)), STATE, "bytes")
    half = state | {"consumed": len(sampler) // 2}

    def first_batch(loaded: dict[str, Any]) -> float:
        fresh = TokenBudgetBatchSampler(lengths, 4 * TOKENS)
        fresh.load_state_dict(loaded)
        return seconds(lambda: next(iter(fresh)))

    more = [first_batch(half) - first_batch(state) for _ in range(program.options.rounds)]
    show("resume at 50 %", statistics.median(more), LATER, "s more than an epoch's start")


def packing() -> None:
    try:
        from transformers import DataCollatorWithFlattening
    except ImportError:
        raise Failure("transformers is not installed") from None
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    for kind, convert in {"tensors": torch.tensor, "lists": list}.items():
        samples = [{"input_ids": convert([*range(k, k + 1024)])} for k in range(8)]
        sides = {"pack": lambda s=samples: pack(s), "theirs": lambda s=samples: theirs(s)}
        times: dict[str, list[float]] = {name: [] for name in sides}
        # Blocks of calls: a single call would measure the caches that the other side leaves.
        for _ in range(program.options.rounds):
            for name, side in sides.items():
                times[name].append(statistics.median(seconds(side) for _ in range(50)))
        own, other = (statistics.median(times[name]) for name in sides)
        show(f"pack of {kind}", 1e6 * own, 1e6 * other / FACTOR, "us")


def places() -> None:
    lengths = np.random.default_rng(1).integers(1, 60, 200)
    sampler, random = TokenBudgetBatchSampler(lengths, 120, window=25), np.random.default_rng(2)
    counts = {"token budget": np.zeros((200, 10)), "plain shuffle": np.zeros((200, 10))}
    for epoch in range(10_000):
        sampler.set_epoch(epoch)
        orders = [*sampler], [*random.permutation(200).reshape(20, 10)]
        for count, batches in zip(counts.values(), orders, strict=True):
            # A random place within a batch's share of the epoch.
            tenths = (np.arange(len(batches)) + random.random(len(batches))) / len(batches) * 10
            for tenth, batch in zip(tenths.astype(int), batches, strict=True):
                count[batch, tenth] += 1
    for name, count in counts.items():
        chi_square = ((count - 1000) ** 2 / 1000).sum() / (200 * 9)
        show(f"places, {name}", chi_square, BAND, "chi-square per degree of freedom")


def measure(row: str) -> None:
    {"waste": waste, "plan": plan, "resume": resume, "pack": packing, "places": places}[row]()


if __name__ == "__main__":
    main(program, measure, "what", "measured", "goal", "")
