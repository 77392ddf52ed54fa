"""`_core.call_into` and the rules in its documentation: an error from a signal handler loses no value."""

import ast
import dis
import itertools
import sys
from pathlib import Path

import pytest
import torch
from support import run_script, rustloader
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, dataloader
from torch.utils.data import sampler as sampler_of_torch

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader._core import call_into
    from rustloader.order.drawn import Random
    from rustloader.order.stream import stream
    from rustloader.stateful_dataloader.sampling import sampling

    PACKAGE = Path(rustloader.__path__[0])


def test_it_appends_what_the_call_returns():
    kept = [1]
    assert call_into(kept, next, iter([2])) is None
    call_into(kept, dict)
    call_into(kept, divmod, 7, 4)
    assert kept == [1, 2, {}, (1, 3)]


def test_errors_pass_and_append_nothing():
    kept = []
    with pytest.raises(StopIteration):
        call_into(kept, next, iter(()))
    with pytest.raises(ZeroDivisionError) as caught:
        call_into(kept, lambda: 1 / 0)
    assert caught.traceback[-1].name == "<lambda>"
    with pytest.raises(TypeError, match="not callable"):
        call_into(kept, 5)
    with pytest.raises(TypeError):
        call_into((), dict)
    assert kept == []


def runs_handlers(name):
    """True if Python runs signal handlers after a bytecode of this name. The next test compares this with Python."""
    return "CALL" in name or name == "RESUME" or "JUMP_BACKWARD" in name


def test_where_python_runs_handlers():
    # This needs its own process: pytest-timeout uses the alarm of this one.
    status, out, err = run_script("""
        import collections, dis
        found = collections.Counter()
        def handler(signum, frame):
            if frame.f_code is work.__code__:
                found[dis.opname[frame.f_code.co_code[frame.f_lasti]]] += 1
        class Holder: pass
        def work(holder, items):
            for number in range(1000):
                holder.kept, holder.count = [number], number
                first, second = holder.kept[0], items[1]
                holder.count += first + second
                items[0] = holder.count if first is not None else second
                del holder.kept[0]
                items += (first,)
                del items[-1]
                dict(a=first)
            return holder.count
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
        while found.total() < 500:
            work(Holder(), [0, 1])
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(*found)
    """)
    assert (status, err) == (0, ""), err
    assert out.split() and all(map(runs_handlers, out.split())), out


class Interrupts:
    """Raises KeyboardInterrupt at the n-th point in some modules at which Python would run a signal handler."""

    def __init__(self, at, files):
        self.at, self.files, self.points, self.where, self.last = at, files, 0, None, {}

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(self.files):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            before = self.last.get(frame)
            self.last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if before is not None and runs_handlers(before):
                self.points += 1
                if self.points == self.at:
                    self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                    raise KeyboardInterrupt
        return self

    def next(self, iterator):
        self.last, tracer = {}, sys.gettrace()
        sys.settrace(self)
        try:
            return next(iterator)
        finally:
            sys.settrace(tracer)


def with_interrupts(make, at, files):
    """The items of an iterator, and the point of the interrupt, or None if there are fewer points."""
    iterator, interrupts, items = make(), Interrupts(at, files), []
    while True:
        try:
            items.append(interrupts.next(iterator))
        except KeyboardInterrupt:
            continue
        except StopIteration:
            return items, interrupts.where


def losses(make, files=None, least=3):
    """The points at which an interrupt changes what an iterator yields."""
    expected, result = list(make()), []
    for at in itertools.count(1):
        items, where = with_interrupts(make, at, files or str(PACKAGE))
        if where is None:
            assert at > least
            return result
        if items != expected:
            result.append(where)


class Safe:
    """Passes items on, by the rules of the documentation."""

    def __init__(self, items):
        self.items, self.kept, self.count = iter(items), [], 0

    def __iter__(self):
        return self

    def take(self):
        call_into(self.kept, next, self.items)

    def __next__(self):
        if not self.kept:
            self.take()
        value, count = self.kept[0], max(self.count, 0) + 1
        # Atomic for signal handlers.
        self.kept, self.count = [], count
        return value, count


class TwoCalls(Safe):
    def take(self):
        self.kept.append(next(self.items))


class CallBeforeTheReturn(Safe):
    def __next__(self):
        value, _ = super().__next__()
        return value, max(self.count, 0)


def test_a_value_is_lost_only_without_the_rules():
    assert losses(lambda: Safe("abc"), __file__) == []
    assert losses(lambda: TwoCalls("abc"), __file__)
    assert losses(lambda: CallBeforeTheReturn("abc"), __file__)


class Counted:
    """A sampler that has a state."""

    def __init__(self, size):
        self.size, self.at = size, 0

    def __iter__(self):
        return map(self.draw, range(self.size))

    def draw(self, _):
        self.at += 1
        return self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def recorded():
    # Without torch's BatchSampler, because an error ends its generator.
    index_sampler = Counted(3)
    return sampling(index_sampler, iter(index_sampler), None, 0, (), 1, map_style=True).iterator


def permutations():
    torch.manual_seed(3)
    draw = Random(RandomSampler(range(3), num_samples=7)).arrays()
    return iter(lambda: None if (array := draw()) is None else [*array], None)


@pytest.mark.parametrize("make", [recorded, permutations], ids=["recorder", "index stream"])
def test_no_index_is_lost(make):
    assert losses(make) == []


def constant_batches(wrap=lambda batches, iterator: iterator):
    """The first index batches of a loader over an iterable dataset."""
    batches = BatchSampler(dataloader._InfiniteConstantSampler(), 2, False)
    return itertools.islice(wrap(batches, iter(batches)), 5)


# The interrupt may come while torch's generator is closed.
@pytest.mark.filterwarnings("ignore:Exception ignored while closing generator")
def test_no_error_ends_the_index_batches_of_an_iterable_dataset():
    assert losses(constant_batches, dataloader.__file__), "torch's generators end"
    assert losses(lambda: constant_batches(stream), least=0) == []


def test_no_error_ends_the_index_batches_in_order():
    batches = BatchSampler(SequentialSampler(range(5)), 2, False)
    files = (str(PACKAGE), sampler_of_torch.__file__)
    assert losses(lambda: iter(batches), files), "torch's generator ends"
    assert losses(lambda: stream(batches, iter(batches)), files) == []


MARK = "# Atomic for signal handlers"
MARKED = [path for path in PACKAGE.rglob("*.py") if MARK in path.read_text()] if rustloader is not None else []
NOT_ATOMIC = (
    ast.Call,
    ast.For,
    ast.While,
    ast.With,
    ast.comprehension,
    ast.Yield,
    ast.YieldFrom,
    ast.Import,
    ast.Assert,
)


@pytest.mark.parametrize("path", MARKED, ids=lambda path: path.stem)
def test_steps_have_no_call(path):
    text = path.read_text()
    fields = [value for node in ast.walk(ast.parse(text)) for _, value in ast.iter_fields(node)]
    blocks = [it for it in fields if isinstance(it, list) and it and isinstance(it[0], ast.stmt)]
    for number, line in enumerate(text.splitlines(), 1):
        if MARK in line:
            # The rest of each block below the mark. The rest that starts first is the step.
            rests = [block[at:] for block in blocks for at, it in enumerate(block) if it.lineno > number]
            step = min(rests, key=lambda rest: rest[0].lineno)
            calls = [node for it in step for node in ast.walk(it) if isinstance(node, NOT_ATOMIC)]
            assert not calls, f"line {calls[0].lineno}"


def test_there_are_steps():
    assert len(MARKED) > 4
