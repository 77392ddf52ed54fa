"""Every kind of batch arrives as it was made (P24, P25)."""

import numpy as np
import pytest
import torch
from sample_data import Given
from support import DataLoader, epoch, raw, raw_storage, send

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def clonable_dtypes():
    dtypes = []
    for d in {v for v in vars(torch).values() if isinstance(v, torch.dtype)}:
        try:
            torch.empty(4, dtype=d).clone()
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        dtypes.append(d)
    return sorted(dtypes, key=str)


def random_tensor(shape, dtype):
    tensor = torch.empty(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(
        0,
        2 if dtype is torch.bool else 256,
        (tensor.untyped_storage().nbytes(),),
        dtype=torch.uint8,
        generator=generator,
    )
    tensor.untyped_storage().copy_(noise.untyped_storage())
    return tensor


def test_p25_every_dtype():
    dtypes = clonable_dtypes()
    assert len(dtypes) >= 14
    for shape in [(4,), (3, 2, 5), (100, 100), (), (0,), (2, 0, 3)]:
        tensors = [random_tensor(shape, d) for d in dtypes]
        for sent, received in zip(tensors, send(*tensors), strict=True):
            assert (received.dtype, received.shape, received.stride(), received.device) == (
                sent.dtype,
                sent.shape,
                sent.stride(),
                sent.device,
            )
            assert raw_storage(received.untyped_storage()) == raw_storage(sent.untyped_storage())


def test_p25_every_dtype_through_default_collate():
    tensors = []
    for d in clonable_dtypes():
        try:
            torch.stack([torch.zeros(6, dtype=d)] * 2)
            torch._utils._element_size(d)  # default_collate calls it in a worker, and it does not know every dtype
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        tensors.append(random_tensor((6, 1000), d))
    for n, inner in ((6, 1000), (2, 5)):
        samples = [{str(t.dtype): t[i, :inner] for t in tensors} for i in range(n)]
        (batch,) = epoch(DataLoader(Given(samples), batch_size=n, num_workers=1))
        for t in tensors:
            # Cloned, then compared as bytes: not every dtype can be compared or made contiguous.
            assert raw(batch[str(t.dtype)]) == b"".join(raw(t[i, :inner].clone()) for i in range(n)), t.dtype


def test_p25_numpy_identity_within_a_batch():
    array = np.arange(100_000)
    (batch,) = send({"a": array, "b": array, "c": [array]})
    assert batch["a"] is batch["b"] is batch["c"][0]


def test_p25_a_large_batch_among_small_ones():
    tensors = [torch.full((n,), n, dtype=torch.int32) for n in (1, 3_000_000, 2, 10_000_000, 5, 1_000_000)]
    for sent, received in zip(tensors, send(*tensors, workers=2), strict=True):
        assert torch.equal(sent, received)
