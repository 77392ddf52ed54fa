"""Values arrive as they do from torch's own loader (P24, P25, T5, T25): through workers, and packed in one process.

Those of `roundtrip/cases.py`, and random trees; `make stress KIND=batches` continues from here, as long as you like.
"""

import mmap
import os
import shlex

import numpy as np
import pytest
import torch
from roundtrip import fuzz
from roundtrip.build import OPERATIONS, NotMade, build
from roundtrip.cases import CASES, SAMPLES, SIDES
from roundtrip.check import PACKER_OPTIONS, Checker, reproducer
from roundtrip.compare import Record, differences
from roundtrip.intended import INTENDED, Case, judge
from roundtrip.memory import check_writes
from roundtrip.reduce import reduced
from roundtrip.trees import random_samples, random_tree
from roundtrip.ways import Error, Loaders
from sample_data import Labelled, untouched
from support import engine_batches
from torch.utils.data import default_collate, default_convert

pytestmark = [pytest.mark.ours, pytest.mark.forks, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def loaders(request):
    both = Loaders(getattr(request, "param", untouched))
    yield both
    both.close()


collating = pytest.mark.parametrize("loaders", [default_collate], indirect=True)
converting = pytest.mark.parametrize("loaders", [default_convert], indirect=True)


def cases(n, *groups):
    """The descriptions of the cases whose names begin with a group."""
    return [(("case", (), name, n),) for name in CASES if name.startswith(groups or "")]


@pytest.mark.parametrize("n", SIDES)
def test_p25_t5_cases_through_workers(loaders, n):
    """Subclasses, parameters, layouts, strides, aliasing, arrays, objects (roundtrip/cases.py) arrive as with torch."""
    checker = Checker()
    checker.through_workers(loaders, cases(n))
    checker.finish()
    assert checker.outcomes["workers", "value"] > 0.9 * len(CASES)


@pytest.mark.parametrize("n", SIDES)
def test_p25_t5_cases_through_packer(n):
    checker = Checker()
    for case in cases(n):
        checker.through_packer(case, PACKER_OPTIONS)


@converting
@pytest.mark.parametrize("n", [8, 136])  # arrays of 128 KiB lie in the arena, and are not copied
def test_p24_cases_through_default_convert(loaders, n):
    checker = Checker()
    checker.through_workers(loaders, cases(n, "samples: ", "array: ", "every "))
    checker.finish()


@collating
@pytest.mark.parametrize("n", SIDES)
def test_p24_t25_cases_through_default_collate(loaders, n):
    """What torch refuses is the same error, with the same text."""
    checker = Checker()
    checker.through_workers(
        loaders,
        [
            [(("case", (), f"samples: {name}", n), ("part", (0,), i)) for i in range(len(make(n)))]
            for name, make in SAMPLES.items()
        ],
    )
    checker.finish()
    assert checker.outcomes["workers", "value"] > 60 and checker.outcomes["workers", "the same error"] > 20


@pytest.mark.random
def test_random_trees(loaders):
    checker, before = Checker(), engine_batches()
    for first in range(0, 240, 8):
        trees = [random_tree(seed) for seed in range(first, first + 8)]
        checker.through_workers(loaders, trees)
        for tree in trees:
            checker.through_packer(tree)
    checker.finish()
    assert checker.outcomes["workers", "value"] > 200
    assert checker.outcomes["workers", "value"] <= engine_batches() - before <= checker.trees
    assert len(checker.steps) > 0.8 * len(OPERATIONS), "the generator uses too few of the operations"


@collating
def test_random_batches(loaders):
    checker = Checker()
    for first in range(0, 90, 6):
        checker.through_workers(loaders, [random_samples(seed) for seed in range(first, first + 6)])
    checker.finish()
    assert checker.outcomes["workers", "value"] > 40 and checker.outcomes["workers", "the same error"] > 0


# Bugs that `make stress KIND=batches` found, and that are fixed.
FIXED = {
    "a conjugate that requires grad": (
        ("tensor", (), "complex64", (3,), 1),
        ("conj", (0,)),
        ("parameter", (1,), True),
        ("list", (2,)),
    ),
    "another order of bytes": (
        ("array", (), ">i4", (7,), 1, "C"),
        ("array", (), ">U2", (5000,), 1, "F"),
        ("list", (0, 1)),
    ),
    "dates in an odd order of dimensions": (
        ("array", (), "M8[ns]", (2, 3, 4), 1, "C"),
        ("array_transpose", (0,), 4),
        ("list", (1,)),
    ),
    "read only, with holes": (("array", (), ">f8", (40,), 1, "C"), ("array_windows", (0,)), ("tuple", (1,))),
}


def test_fixed_bugs_stay_fixed(loaders):
    for name, tree in FIXED.items():
        assert not any(isinstance(value, NotMade) for value in Record(build(tree)).objects.values()), name
        checker = Checker()
        checker.through_workers(loaders, [tree])
        checker.through_packer(tree)
        assert checker.outcomes["workers", "value"] == 1, name


def test_each_intended_difference_is_there(loaders):
    outcomes = loaders.send([intended.example for intended in INTENDED])
    for intended, (actual, expected) in zip(INTENDED, outcomes, strict=True):
        assert not isinstance(actual, Error) and not isinstance(expected, Error)
        names, left = judge(Case(Record(actual), Record(expected), lambda intended=intended: build(intended.example)))
        assert intended.name in names and not left, (intended.name, names, left)


# The checks themselves can fail


def value_of_all_sorts():
    base, array = torch.arange(6.0), np.arange(6.0)
    return {"base": base, "view": base[2:], "again": base, "array": array, "text": "a", "labelled": labelled()}


def labelled():
    tensor = torch.ones(2).as_subclass(Labelled)
    tensor.label = [1]
    return tensor


def nan_of_another_kind(value):
    value["base"].view(torch.int32)[1] = 0x7FC00001
    value["array"][:] = 0


CHANGES = {
    "content": lambda v: v.update(base=v["base"].add_(1)),
    "NaN payload": nan_of_another_kind,
    "array's content": lambda v: v["array"].__setitem__(0, -0.0),
    "dtype": lambda v: v.update(view=v["view"].view(torch.int32)),
    "type": lambda v: v.update(text=b"a"),
    "aliasing lost": lambda v: v.update(view=v["view"].clone()),
    "aliasing of another place": lambda v: v.update(view=v["base"][:4].copy_(torch.arange(6.0)[2:])),
    "storage parted": lambda v: v.update(view=torch.from_numpy(v["base"].numpy()[2:])),
    "identity lost": lambda v: v.update(again=v["base"].view(6)),
    "identity made": lambda v: v.update(view=v["base"]),
    "stride": lambda v: v.update(base=torch.arange(12.0)[::2]),
    "requires grad": lambda v: v.update(labelled=v["labelled"].requires_grad_()),
    "attribute": lambda v: v["labelled"].label.append(2),
    "subclass": lambda v: v.update(labelled=v["labelled"].as_subclass(torch.Tensor)),
    "order of keys": lambda v: dict(reversed(v.items())),
    "a key more": lambda v: v.update(more=None),
    "not writeable": lambda v: v["array"].setflags(write=False),
    "Fortran order": lambda v: v.update(array=np.asfortranarray(v["array"].reshape(2, 3))),
    "order of bytes": lambda v: v.update(array=v["array"].astype(">f8")),
    "array over the tensor": lambda v: v.update(array=v["base"].numpy()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_comparison_sees(change):
    value, changed = value_of_all_sorts(), value_of_all_sorts()
    assert not differences(Record(value), Record(changed))
    changed = CHANGES[change](changed) or changed
    _, left = judge(Case(Record(changed), Record(value), value_of_all_sorts))
    assert left, "no difference was seen"


def test_memory_that_is_mapped_twice_is_seen():
    file = os.memfd_create("twice")
    os.truncate(file, 4096)
    maps = [mmap.mmap(file, 4096) for _ in range(2)]
    os.close(file)
    leaves = Record([np.frombuffer(m, np.uint8) for m in maps]).leaves
    assert check_writes(Record([np.zeros(4), np.zeros(4)]).leaves) is None
    assert "is seen through" in check_writes(leaves)


def test_a_kept_batch_that_changes_is_seen(loaders):
    checker = Checker(keep=1)
    tree = (("tensor", (), "float32", (5000,), 1), ("list", (0,)))
    checker.through_workers(loaders, [tree])
    _, record, _ = checker._kept[0]
    record.leaves[0].view[0] ^= 1
    with pytest.raises(AssertionError, match="has changed since it was delivered"):
        checker.finish()


def test_a_reproducer_sends_its_tree_again(capsys):
    command = reproducer(random_tree(5))
    (arguments,) = [word.removeprefix("ARGS=") for word in shlex.split(command) if word.startswith("ARGS=")]
    fuzz.main(shlex.split(arguments))
    assert "1 trees through workers" in capsys.readouterr().out


def test_a_failing_description_is_made_small():
    tree = random_tree(7)
    assert any(operation == "tensor" for operation, *_ in tree)
    small = reduced(tree, lambda steps: any(step[0] == "tensor" for step in steps))
    assert len(small) == 1 and small[0][:2] == ("tensor", ())
