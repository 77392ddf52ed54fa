"""Runs a program, and compares each batch with the reference."""

import contextlib
import copy
import dataclasses
import io
import itertools
import json
import os
import pickle
import random
import signal
import threading
import warnings

import torch
from support import same

from . import parts, shadow
from .program import changed
from .reference import ERROR, Reference

# The most batches that `state_dict(back=n)` goes back.
BACK = 9


class Wrong(Exception):
    """The loader does not behave as the model does."""


@dataclasses.dataclass
class Place:
    """How far the chain of loaders has come.

    Attributes:
        epoch: Number of the epoch; -1 before the first one.
        expected: Its batches.
        log: (ordinal, batch) of what was delivered, in the order of delivery.
        first: Length of `log` when the current iterator began.
        following: The index batches of the next epoch, once this one has ended.
        counts: Samples made by the end of the epoch, one number per worker; None if not known.
        generator: State of the reference's generator, after the draws of the next epoch if this one has ended.
        drawn: The same, before those draws.
        is_ordered: Whether the batches come in the order of `expected`.
    """

    epoch: int = -1
    expected: list = dataclasses.field(default_factory=list)
    log: list = dataclasses.field(default_factory=list)
    first: int = 0
    following: list | None = None
    counts: list | None = None
    generator: object = None
    drawn: object = None
    is_ordered: bool = True

    @property
    def finished(self):
        return self.following is not None

    def remaining(self):
        delivered = {ordinal for ordinal, _ in self.log}
        return [(ordinal, batch) for ordinal, batch in enumerate(self.expected) if ordinal not in delivered]

    def copy(self, **changes):
        return dataclasses.replace(self, log=list(self.log), counts=self.counts and list(self.counts), **changes)

    def before(self, back):
        """The place `back` batches ago; None if the iterator has not delivered that many."""
        log = list(self.log)
        while back:
            if len(log) == self.first:
                return None
            back -= not is_error(log.pop()[1])
        return dataclasses.replace(self, log=log, following=None, generator=self.drawn)


def is_error(batch):
    return batch[:1] == [ERROR]


def run(program):
    """Raises Wrong, or whatever the loader raises, if the program does not do what it should."""
    player = Player(program)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        player.caught = caught
        try:
            for number, step in enumerate(program.steps):
                player.number = number
                getattr(player, step[0])(*step[1:])
        except Exception as error:
            error.add_note(f"in step {player.number}: {program.steps[player.number]}")
            raise
        finally:
            player.close()


class Player:
    def __init__(self, program):
        self.settings, self.seed = program.settings, program.seed
        self.random = random.Random(f"moments {program.seed}")
        self.reference = Reference(program.settings)
        self.place = Place()
        self.saved = self.shadow_state = None
        self.iterator = None
        self.dead = self.in_next = False
        self.caught = []
        # torchdata's loader, which does the same; None if the states cannot be compared.
        self.shadow = None
        # The state at each number of answers of the current epoch.
        self.states = {}
        self.make()
        self.shadow = shadow.make(self.settings)

    def close(self):
        self.iterator = self.loader = self.shadow = None

    def make(self):
        """Creates a loader, with other states of the generators, as in another process."""
        self.close()
        torch.manual_seed(self.random.getrandbits(40))
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(40))
        self.loader = parts.make_loader(self.settings, self.generator)

    # Epochs

    def reseed(self, epoch):
        """Seeds the generators, as a program does for an epoch that does not follow a complete one."""
        torch.manual_seed(1000 * self.seed + epoch)
        self.generator.manual_seed(2000 * self.seed + epoch)
        self.reference.generator.manual_seed(2000 * self.seed + epoch)

    def set_epoch(self, epoch):
        parts.set_epoch(self.loader, epoch)

    def draw_indices(self, epoch, keeps_workers):
        """Draws the reference's index batches; torch's generator keeps its state."""
        state = torch.get_rng_state()
        self.reference.set_epoch(epoch)
        indices = self.reference.indices(keeps_workers)
        torch.set_rng_state(state)
        return indices

    def keeps_workers(self):
        return self.settings.persistent and self.iterator is not None

    def iter(self):
        """Begins an epoch."""
        place = self.place
        if self.dead and self.settings.persistent:
            return
        epoch = place.epoch + 1
        if place.finished:
            indices = place.following
        else:
            self.reseed(epoch)
            indices = self.draw_indices(epoch, self.keeps_workers())
        self.begin(epoch, indices, not place.finished and place.epoch >= 0)

    def begin(self, epoch, indices, after_abandoned):
        """Calls iter() for a whole epoch."""
        settings = self.settings
        number = max(settings.num_workers, 1)
        if settings.num_workers and not self.settings.persistent:
            counts = [0] * number
        elif after_abandoned or (self.place.epoch >= 0 and self.place.counts is None):
            counts = None
        else:
            counts = list(self.place.counts or [0] * number)
        known = counts is not None and settings.keeps_order
        after = counts if known else [0] * number
        expected = self.reference.batches(epoch, indices, after)
        self.place = Place(epoch, expected, counts=after if known else None)
        self.place.generator = self.place.drawn = self.reference.generator.get_state()
        self.set_epoch(epoch)
        self.states.clear()
        self.iterator = self.iterator if settings.persistent else None
        if self.shadow is not None:
            self.shadow.iter(epoch)
        self.caught.clear()
        self.iterator = iter(self.loader)
        self.dead = False

    # Batches

    def next(self, number):
        for _ in range(number):
            if not self.take():
                return

    def end(self):
        while self.take():
            pass

    def take(self, call=None):
        """Takes one answer; returns False if there is none."""
        if self.iterator is None or self.dead:
            return False
        if self.place.finished:
            return False
        try:
            batch = (call or next)(self.iterator)
        except StopIteration:
            if self.shadow is not None:
                self.shadow.next()
            self.note_end()
            return False
        except parts.SampleError as error:
            batch = [ERROR, int(str(error).split()[-1])]
        if self.shadow is not None:
            self.shadow.next()
        self.note(batch)
        return True

    def note(self, batch):
        place = self.place
        remaining = place.remaining()
        candidates = remaining[:1] if self.settings.keeps_order and place.is_ordered else remaining
        for ordinal, expected in candidates:
            if self.comparable(expected) == self.comparable(batch):
                place.log.append((ordinal, expected))
                return
        raise Wrong(f"epoch {place.epoch}: got {batch}, expected one of {[batch for _, batch in candidates[:8]]}")

    def comparable(self, batch):
        """The batch, without the counts of samples if those are not known."""
        if self.place.counts is not None or self.settings.dataset != "stateful map" or is_error(batch):
            return batch
        if self.settings.batch_size is None and not self.settings.sampler.startswith("batch sampler"):
            return [batch[0], None, batch[2]]
        return [[i, None, noise] for i, _, noise in batch]

    def note_end(self):
        place = self.place
        if place.remaining():
            raise Wrong(f"epoch {place.epoch} ended without {[b for _, b in place.remaining()[:8]]}")
        texts = [str(warning.message) for warning in self.caught]
        empty = any("an epoch of 0 batches" in text for text in texts)
        if place.expected and empty != (place.first == len(place.log)):
            raise Wrong(f"{len(place.log)} delivered, {place.first} of them before this loader; warnings: {texts}")
        following = place.epoch + 1
        torch.manual_seed(1000 * self.seed + following)
        place.following = self.draw_indices(following, self.keeps_workers())
        place.generator = self.reference.generator.get_state()
        self.set_epoch(following)

    # States

    def save(self, way, back):
        if way == "now" or self.iterator is None or self.place.finished or self.dead:
            self.save_now(back)
        elif way == "thread":
            self.save_while(self.take_with_thread)
        else:
            self.save_while(self.take_with_handler)

    def save_now(self, back):
        if self.iterator is None and self.place.epoch < 0 and not self.place.finished:
            # The state determines the first epoch, as that of a finished epoch determines the next one.
            self.reseed(0)
            self.place.following = self.draw_indices(0, False)
            self.place.generator = self.reference.generator.get_state()
        place = self.place if back == 0 else self.place.before(back)
        if self.iterator is None and back:
            place = None
        if place is None or back > BACK:
            try:
                self.loader.state_dict(back=back)
            except ValueError:
                return
            raise Wrong(f"state_dict(back={back}) succeeded after {len(self.place.log) - self.place.first} answers")
        state, other = (self.loader.state_dict(back=back) if back else self.loader.state_dict() for _ in range(2))
        spoil(other)
        self.compare(state if not back else None)
        self.compare_with_earlier(state, place)
        if self.place.finished and self.settings.is_drawing:
            # The state made the draws of the next epoch, which torchdata's loader makes in iter().
            self.shadow = None
        self.keep(state, place.copy())

    def compare(self, state):
        """Compares a state with the shadow's, which it keeps. Without a state, forgets the shadow's."""
        self.shadow_state = None
        if state is None or self.shadow is None:
            return
        # torchdata's loader makes its iterator for a state.
        beside = shadow.make(self.settings) if self.iterator is None else self.shadow
        difference = beside.difference(state)
        if difference is not None:
            raise Wrong("the state's {} is {}, and torchdata's is {}".format(*difference))
        if self.place.epoch >= 0:
            self.shadow_state = self.shadow.state()

    def compare_with_earlier(self, state, place):
        """Requires one state of a position, whether it was reached by a resume or not."""
        if place.epoch < 0 or place.finished or not (self.settings.keeps_order and place.is_ordered):
            return
        if self.settings.dispatch == "shared_queue":
            return  # any worker may have made the last batch
        if not self.settings.num_workers and any(worker["replay"] for worker in state["_rustloader"]["workers"]):
            return  # of an earlier position; that of the current one needs no replay
        if not same(self.states.setdefault(len(place.log), state), state):
            raise Wrong(f"the state after {len(place.log)} answers was another one: {self.states[len(place.log)]}")

    def keep(self, state, place):
        if place.generator is None:
            place.generator = self.reference.generator.get_state()
        if not self.settings.keeps_order and not self.settings.dataset.endswith("map"):
            # Some workers have delivered more than others: torch has no order for the rest.
            place.is_ordered = False
        self.saved = state, copy.deepcopy(state), place

    def save_while(self, take):
        """Takes a state while `next` runs: it may or may not count the batch that arrives."""
        before = self.place.copy()
        self.compare(None)
        # The program's generator is torchdata's while that runs, and the state may be taken then.
        self.shadow = None
        states = []
        take(states)
        if not states:
            return
        ((state, error),) = states[:1]
        if error is not None:
            raise error
        after = self.place
        number = state["_num_yielded"] if "_num_yielded" in state else state["_snapshot"]["_snapshot_step"]
        if not before.log and self.settings.sampler == "torchdata random":
            return  # if its iterator is still being created, the state does not contain its order
        numbers = [sum(not is_error(batch) for _, batch in place.log) for place in (before, after)]
        if number not in numbers:
            raise Wrong(f"the state counts {number} batches, but {numbers} were delivered before and after the call")
        if numbers[0] == numbers[1] and (len(before.log) != len(after.log) or after.finished):
            return  # an error or the end: the number does not tell which of the two places it is
        self.keep(state, (before if number == numbers[0] else after).copy())

    def state(self, states):
        try:
            states.append((self.loader.state_dict(), None))
        except BaseException as error:
            states.append((None, error))

    def take_with_thread(self, states):
        thread = threading.Thread(target=self.state, args=(states,))
        thread.start()
        try:
            self.take()
        finally:
            thread.join(60)
        if thread.is_alive():
            raise Wrong("state_dict() in another thread did not return")

    def take_with_handler(self, states):
        def answer(iterator):
            with self.alarm(lambda *_: states or self.state(states)):
                return next(iterator)

        self.take(answer)

    @contextlib.contextmanager
    def alarm(self, handler):
        """Calls the handler within the next few milliseconds."""
        old = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, self.random.choice([1e-5, 1e-4, 5e-4, 1e-3, 3e-3]))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)

    def resume(self, way, changes, same_loader):
        if self.saved is None:
            self.save_now(0)
        state, untouched, place = self.saved
        if not same(state, untouched):
            raise Wrong("a state changed after it was taken")
        number = self.settings.num_workers
        if not same_loader:
            self.settings = changed(self.settings, changes)
            self.make()
        self.shadow = None
        if changes and not same_loader:
            self.states.clear()
        if self.settings.num_workers != number:
            self.shadow_state = None
        if self.shadow_state is not None and not place.finished:
            self.shadow = shadow.make(self.settings, resumed=True)
        self.place = place = place.copy(first=len(place.log))
        if not self.settings.keeps_order:
            place.counts = None
        self.reference.generator.set_state(place.generator)
        loaded = transport(state, way)
        self.loader.load_state_dict(loaded)
        if not same(self.loader.state_dict(), loaded):
            raise Wrong("state_dict() after load_state_dict() returns another state")
        self.iterator = None
        self.dead = False
        self.caught.clear()
        if place.finished:
            self.begin(place.epoch + 1, place.following, False)
        else:
            self.set_epoch(place.epoch)
            if self.shadow is not None:
                self.shadow.load(copy.deepcopy(self.shadow_state))
                self.shadow.iter(place.epoch)
            self.iterator = iter(self.loader)

    # Faults

    def kill(self, worker):
        workers = getattr(self.iterator, "_workers", None)
        if not workers or self.dead or self.place.finished:
            return
        self.shadow = None
        self.states.clear()
        os.kill(workers[worker % len(workers)].pid, signal.SIGKILL)
        try:
            self.end()
        except RuntimeError as error:
            if "exited unexpectedly" not in str(error) and "killed by signal" not in str(error):
                raise
            self.dead = True
        self.dead = self.dead or self.settings.persistent

    def interrupt(self, number):
        self.shadow = None
        box = []

        def press(*_):
            if self.in_next:
                raise KeyboardInterrupt

        def answer(iterator):
            self.in_next = True
            box.extend(itertools.islice(iterator, 1))
            self.in_next = False
            if not box:
                raise StopIteration
            return box.pop()

        for _ in range(number):
            try:
                with self.alarm(press):
                    taken = self.take(answer)
            except KeyboardInterrupt:
                taken = True
                if box:
                    self.note(box.pop())
                elif not self.place.remaining():
                    # The end was reached, or comes now.
                    taken = self.take()
            finally:
                self.in_next = False
            if not taken:
                return


def spoil(state):
    """Writes into all parts of a state, which must not change any other state."""
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, torch.Tensor):
            value.zero_()
        elif isinstance(value, (dict, list)):
            spoil(value)
    state.clear()


def transport(state, way):
    if way == "json":
        try:
            return json.loads(json.dumps(state))
        except TypeError:  # a generator's tensor
            way = "pickle"
    if way == "pickle":
        return pickle.loads(pickle.dumps(state))
    if way == "torch":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)
    return copy.deepcopy(state)
