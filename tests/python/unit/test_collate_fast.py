"""The fast paths of default_collate: what they take. `parity/test_roundtrip.py` compares their batches with torch's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from roundtrip.build_tensors import DTYPES, tensor
from support import raw_storage, run_script
from torch.utils.data import default_collate

from rustloader._core import _collate


def stack(batch: Any) -> Any:
    return _collate(batch)[0]


def numbers(batch: Any) -> Any:
    return _collate(batch)[1]


@pytest.mark.filterwarnings("ignore")
def test_stacks() -> None:
    shapes = [(), (1,), (3,), (2, 3), (0,), (3, 0), (1, 5, 1), (64, 65), (300, 400)]
    batches = [tuple(tensor("float32", shape, i) for i in range(count)) for shape in shapes for count in (1, 2, 7)]
    batches += [[tensor(name, (5,), i) for i in range(3)] for name in DTYPES]
    stacked = [(batch, stack(batch)) for batch in batches]
    taken = [(batch, got) for batch, got in stacked if got is not None]  # torch takes the others, or raises an error
    assert len(taken) >= 3 * len(shapes) + 13
    for batch, got in taken:
        want = torch.stack(batch)
        assert (got.dtype, got.shape, got.stride(), got._base) == (want.dtype, want.shape, want.stride(), None)
        assert raw_storage(got.untyped_storage()) == raw_storage(want.untyped_storage())


def test_what_torch_does_itself() -> None:
    x = torch.ones(2, 3)
    for batch in (
        [],
        [x, torch.ones(2)],
        [x, torch.ones(2, 3, requires_grad=True)],
        [x, x.tolist()],
        [x, x.to_sparse()],
        [x, x.to("meta")],
        [x, x + 1j],
        [x, torch.nn.Parameter(x)],
        iter([x]),
        x,
        [x.to_sparse()],
        [torch.ones(2, dtype=torch.complex64).conj()],
        None,
        "ab",
    ):
        assert stack(batch) is None
    with torch.device("meta"):
        assert stack([x, x]) is None and numbers([1, 2]) is None
    assert torch.equal(stack([x, x]), default_collate([x, x]))


@pytest.mark.parametrize("size", [3, 1000])  # torch.stack checks a small batch, rustloader a large one
def test_stack_of_items_that_are_not_alike(size: int) -> None:
    """In a worker, torch's collate stacks into a tensor of the first item's dtype, and so does rustloader's."""
    x = torch.rand(size, size)
    for batch in ([x, x.double()], [x, x.int()], [x.double(), x], [x, x.t()], [x, torch._neg_view(x)]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = stack(batch)
        want = torch.stack(batch, 0, out=torch.empty(len(batch), size, size, dtype=batch[0].dtype))
        if size == 1000:
            assert got is None
        else:
            assert (got.dtype, got.stride()) == (want.dtype, want.stride()) and torch.equal(got, want)
    with torch.no_grad():
        leaf = torch.ones(2, requires_grad=True)
        got = stack([leaf.detach(), leaf])
        assert not got.requires_grad and torch.equal(got, torch.ones(2, 2))


@pytest.mark.parametrize("batch", [[1.5], [1.0, 2.0, float("inf")], (1, 2), [2**63 - 1, -(2**63)], [0.5] * 5000])
def test_numbers(batch: Any) -> None:
    want = default_collate(list(batch))
    got = numbers(batch)
    assert got.dtype == want.dtype and torch.equal(got, want) and got._base is None


@pytest.mark.parametrize(
    "batch", [[], [True], [1, True], [1, 2.0], [2**63], ["a"], [1.5, None], iter([1]), {1: 2}, [1.0, 2]]
)
def test_numbers_that_torch_does(batch: Any) -> None:
    assert numbers(batch) is None


def test_a_stack_that_was_replaced_before_the_import_is_called_as_by_torch() -> None:
    status, out, err = run_script(
        """
        import torch
        torchs = torch.stack
        def stack(tensors, dim=0, *, out=None):  # ignores `out`
            return torchs(tensors, dim) + 1
        torch.stack = stack
        import rustloader
        data = [torch.full((8,), float(i)) for i in range(4)]
        for loader in (torch.utils.data.DataLoader, rustloader.DataLoader):
            print([batch.tolist() for batch in loader(data, batch_size=2, num_workers=1)])
        """,
        head="",
    )
    assert status == 0, err
    first, second = out.splitlines()
    assert first == second
