"""Names the bottleneck of a loader, and the remedy, if the statistics are clear."""

# No `from __future__ import annotations`: field annotations must be types, not strings.
from dataclasses import dataclass, replace

from rustloader.metrics import advice, bottleneck
from rustloader.metrics.faults import summary
from rustloader.metrics.fields import LargeAttribute, StatsFields
from rustloader.metrics.finding import MIN_GAIN, VerdictKind, waits_text
from rustloader.system.formatting import count_of, duration, size

# Minimum seconds of the loop for a verdict. In a shorter one, what other programs do matters as much as the loader.
_MIN_SECONDS = 0.5
# Minimum number of batches for a verdict. The first batches come from workers that have just started.
MIN_BATCHES = 20
# Maximum number of attributes that a sentence names.
_MAX_NAMED = 3
# Largest gain that a sentence states.
_MAX_STATED = 100.0
# Findings that name no remedy.
_WITHOUT_REMEDY = ("step", "too_few", "unknown")


@dataclass(frozen=True, repr=False)
class Verdict:
    """The bottleneck of a loader, and the remedy.

    Attributes:
        kind: The bottleneck: "step" (the training step), "workers" (too few of them), "dataset" (its own work, which
            more workers cannot speed up enough), "storage" (workers wait for storage or the network), "cores" (used by
            other work), "collate" (``collate_fn``), "head_of_line" (one slow worker, or a few slow batches), "main"
            (the main process: the sampler, or opening batches), "pinning", "device" (the copy to the device),
            "transport" (between the processes), "network" (to workers on other machines) or "starting" (the start of
            each epoch). "too_few" and "unknown" mean that there is no verdict.
        sentence: The verdict in words, with the remedy.
        reason: The measurements on which the verdict is based.
        workers_needed: The ``num_workers`` to try next; None if more workers do not help, or if the loop had no
            training step. It exceeds the number of cores only if workers wait for storage, or run on other machines.
            The sentence does not name it with ``num_workers="auto"``, because the loader decides.
        predicted_gain: The predicted speed with the first remedy in the sentence, as a multiple of the current speed;
            None if there is no prediction.

    Examples:
        >>> loader = rustloader.DataLoader(range(64), batch_size=8, num_workers=2)
        >>> batches = list(loader)
        >>> verdict = rustloader.stats(loader).verdict()
        >>> verdict.kind
        'too_few'
        >>> print(verdict)
        Too few batches to tell; ask again after 20. (8 batches so far)
    """

    kind: VerdictKind
    sentence: str
    reason: str
    workers_needed: int | None = None
    predicted_gain: float | None = None

    def __repr__(self) -> str:
        return f"<rustloader.Verdict {self.kind}: {self.sentence}\n ({self.reason})>"

    def __str__(self) -> str:
        return f"{self.sentence} ({self.reason})"


Verdict.__module__ = "rustloader"


def judge(stats: StatsFields, more_do_not_help: bool = False) -> Verdict:
    """Returns the verdict on the statistics, which depends only on the arguments.

    Args:
        stats: The statistics.
        more_do_not_help: Whether a measurement has shown that more workers do not help.
    """
    verdict = _without_batches(stats) or _judge(stats, more_do_not_help)
    if verdict.kind == "dataset" and (advice_text := advice.cache_text(stats)):
        verdict = replace(verdict, sentence=f"{verdict.sentence} {advice_text}")
    if advice_text := _sharing_advice(stats):
        verdict = replace(verdict, sentence=f"{verdict.sentence} {advice_text}")
    pageable = stats.transfers.pageable
    if pageable and verdict.kind != "unknown" and pageable not in verdict.sentence:
        verdict = replace(verdict, reason=f"{verdict.reason}; {pageable}")
    if faults := summary(stats.faults):
        verdict = replace(verdict, reason=f"{verdict.reason}; {faults}")
    if verdict.kind == "unknown" or not stats.fallbacks:
        return verdict
    left_out = count_of(sum(fallback.count for fallback in stats.fallbacks), "iterator")
    reason = f"{verdict.reason}; not counted: {left_out} on torch's own loop ({_fallback_reasons(stats)})"
    return replace(verdict, reason=reason)


def described_attribute(large: LargeAttribute) -> str:
    """Describes a large attribute of a dataset in words."""
    return f"a {large.kind} of {large.items:,} items, about {size(large.bytes)}"


def _sharing_advice(stats: StatsFields) -> str:
    """Returns advice on large attributes that workers copy; an empty string if none are known."""
    if not stats.large_attributes:
        return ""
    largest = max(worker.private_bytes or 0 for worker in stats.workers)
    named = " and ".join(
        f"{large.path} ({described_attribute(large)})" for large in stats.large_attributes[:_MAX_NAMED]
    )
    first = stats.large_attributes[0].path
    text = (
        f"Workers have up to {size(largest)} of private memory each, including copies of the Python objects of {named}"
    )
    return f"{text}: set {first} = rustloader.share({first}) before creating the loader."


def _fallback_reasons(stats: StatsFields) -> str:
    return "; ".join(fallback.reason for fallback in stats.fallbacks)


def _without_batches(stats: StatsFields) -> Verdict | None:
    """Returns the verdict on a loader with no or few batches of the engine; None if there are enough."""
    if stats.note or (stats.fallbacks and stats.batches == 0):
        why = stats.note or f"torch's own loop made the batches: {_fallback_reasons(stats)}"
        return Verdict("unknown", f"No verdict: {why}.", "the Rust engine has delivered no batch")
    if stats.batches < MIN_BATCHES:
        sentence = f"Too few batches to tell; ask again after {MIN_BATCHES}."
        return Verdict("too_few", sentence, f"{count_of(stats.batches, 'batch')} so far")
    measured = stats.loop_seconds
    if measured < _MIN_SECONDS:
        sentence = f"Too short to tell: ask again after {duration(_MIN_SECONDS - measured)} more of this loop."
        return Verdict("too_few", sentence, f"{count_of(stats.batches, 'batch')} in {duration(measured)} so far")
    return None


def _judge(stats: StatsFields, more_do_not_help: bool) -> Verdict:
    """Names a remedy if it pays, and if both halves of the batches agree."""
    whole = bottleneck.find(stats, more_do_not_help)
    if whole.kind in _WITHOUT_REMEDY:
        return Verdict(whole.kind, whole.sentence, whole.reason)
    if whole.gain < MIN_GAIN:
        sentence = f"Nothing to gain here: {waits_text(stats)}, and no remedy gains more than 5%."
        return Verdict("step", sentence, whole.reason)
    # The waits for copies to the device are known only for all batches.
    halves = [bottleneck.find(half, more_do_not_help) for half in stats.halves if whole.kind != "device"]
    if any(half.kind != whole.kind or half.gain < MIN_GAIN for half in halves):
        sentence = f"Too short to tell: ask again after {duration(stats.loop_seconds)} more of this loop."
        kinds = " and ".join(half.kind for half in halves)
        reason = f"{waits_text(stats)}; the halves of the batches, judged alone, have the verdicts {kinds}"
        return Verdict("too_few", sentence, reason)
    sentence = whole.sentence
    if whole.gain < _MAX_STATED and whole.gain_kind != "unknown":
        label = "Largest possible gain" if whole.gain_kind == "limit" else "Predicted gain"
        sentence += f" {label}: {whole.gain:.{1 if whole.gain < 10 else 0}f} times as fast."
    predicted = whole.gain if whole.gain_kind == "prediction" else None
    return Verdict(whole.kind, sentence, whole.reason, whole.workers_needed, predicted)
