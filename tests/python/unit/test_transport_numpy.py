"""Buffers, and objects of NumPy, pandas, Arrow and Pillow (P25)."""

import pickle
import sys

import numpy as np
import pytest
import torch
from sample_data import Record
from support import send

pytestmark = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning", "ignore::DeprecationWarning")


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="NumPy before 2.0")
@pytest.mark.parametrize("n", [3, 60])
def test_p25_strings_of_variable_width(n):
    sent = np.array([str(i) * (i % 40) for i in range(n * n)], np.dtypes.StringDType())
    for got in send(sent, Record("r", sent)):
        got = got.data if isinstance(got, Record) else got
        assert got.dtype == sent.dtype and got.tolist() == sent.tolist() and got.flags.writeable


def test_p25_random_generators_go_on_where_they_were():
    generator = np.random.default_rng(3)
    generator.random(5)
    (got,) = send(generator)
    assert got.random(4).tolist() == generator.random(4).tolist()


class Buffered:
    """Passes its memory out of band if the protocol supports that."""

    def __init__(self, data):
        self.data = data

    def __reduce_ex__(self, protocol):
        return Buffered, (pickle.PickleBuffer(self.data) if protocol >= 5 else type(self.data)(self.data),)


@pytest.mark.parametrize("n", [10, 100_000])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_p25_objects_with_buffers(kind, n):
    data = kind(b"abcdefghij" * (n // 10))
    (got,) = send([Buffered(data), 1])
    buffer = got[0].data
    assert buffer and buffer == data and bytes(buffer[3:5]) == b"de" and len(buffer) == n and buffer[1] == ord("b")
    with memoryview(buffer) as view:
        assert view.readonly == (kind is bytes)
    if kind is bytearray:
        buffer[0] = 0
        assert data[0] == ord("a") and buffer[0] == 0
        buffer[0] = ord("a")
    kept = np.frombuffer(buffer, np.uint8)
    del got, buffer
    assert kept[-10:].tobytes() == b"abcdefghij"


# Other libraries


def sizes(value):
    """The sizes of a batch's pickle, and of the objects that are sent outside of it."""
    from rustloader.workers import serialize

    payload, objects, _ = serialize.dumps(value)
    return len(payload), sum(obj[0].nbytes if isinstance(obj, list) else obj.nbytes for obj in objects)


@pytest.mark.ours
def test_large_buffers_lie_beside_the_pickle():
    times = np.arange(50_000).astype("M8[s]")
    for data in (np.ones(50_000), np.ones(50_000, "i4, f8"), np.ones(50_000, ">f8"), np.ones((300, 400)).T, times):
        pickled, outside = sizes(Record("r", data))
        assert pickled < 1000 and outside == data.nbytes, data.dtype
    for data in (bytearray(100_000), b"x" * 100_000):
        pickled, outside = sizes(Buffered(data))
        assert pickled < 1000 and outside == 100_000
    tensors = [torch.ones(50_000), torch.nn.Parameter(torch.ones(50_000)), torch.eye(3000).to_sparse()]
    for tensor in tensors:
        pickled, outside = sizes(Record("r", tensor))
        assert pickled < 1500 and outside > 50_000


@pytest.fixture(scope="module")
def frame():
    pandas = pytest.importorskip("pandas", reason="pandas comes with the dev extra")
    n = 20_000
    return pandas.DataFrame(
        {
            "ints": np.arange(n),
            "floats": np.arange(n) / 7,
            "more floats": np.arange(n) / 9,
            "kinds": pandas.Categorical(["x", "y"] * (n // 2)),
            "dates": pandas.date_range("2020", periods=n, freq="s"),
            "missing": pandas.array([1, None] * (n // 2), "Int64"),
            "objects": [(i, "o") for i in range(n)],
            "strings": [str(i) for i in range(n)],
        }
    )


def test_p25_pandas_frames(frame):
    few = frame.iloc[5:8]
    sent = [frame, few, frame["floats"], frame["ints"].iloc[::3], frame.index, frame["kinds"].cat.categories]
    for got, value in zip(send(*sent), sent, strict=True):
        assert type(got) is type(value) and got.equals(value)
    (got,) = send({"frame": frame, "again": frame, "values": np.arange(5)})
    assert got["frame"] is got["again"]
    got["frame"].loc[0, "ints"] = -5
    got["frame"]["floats"] *= 2
    assert got["frame"]["ints"].iloc[:2].tolist() == [-5, 1] and got["frame"]["floats"].iloc[7] == 2.0
    assert frame["ints"].iloc[0] == 0 and frame["floats"].iloc[7] == 1.0


@pytest.mark.ours
def test_pandas_frames_lie_beside_the_pickle(frame):
    pickled, outside = sizes(frame[["ints", "floats", "more floats", "dates", "missing"]])
    assert pickled < 3000 and outside == (5 * 8 + 1) * len(frame)


def test_p25_arrow_tables():
    arrow = pytest.importorskip("pyarrow", reason="pyarrow comes with the dev extra")
    n = 20_000
    table = arrow.table({"ints": np.arange(n), "strings": ["text"] * n, "lists": [[1, 2]] * n})
    sent = [table, table.slice(5, 10), table.to_batches()[0], table["ints"], table["lists"].chunk(0), table.schema]
    got = send(*sent)
    for one, value in zip(got, sent, strict=True):
        assert type(one) is type(value) and one.equals(value)
    assert got[0].to_pandas(use_threads=False)["ints"].sum() == n * (n - 1) // 2
    (buffer,) = send(arrow.py_buffer(b"x" * n))
    assert buffer.to_pybytes() == b"x" * n
    if "rustloader" in sys.modules:
        pickled, outside = sizes(table)
        assert pickled < 1000 and outside > 8 * n + 4 * n


def test_p25_pil_images():
    image = pytest.importorskip("PIL.Image", reason="pillow comes with the dev extra")
    pixels = np.arange(300 * 200 * 3).astype(np.uint8).reshape(200, 300, 3)
    sent = [image.fromarray(pixels), image.new("L", (3, 4), 7), image.fromarray(pixels).convert("P")]
    for got, value in zip(send(*sent), sent, strict=True):
        assert type(got) is type(value) and (got.mode, got.size) == (value.mode, value.size)
        assert got.tobytes() == value.tobytes() and got.getpalette() == value.getpalette()
    (got,) = send({"image": sent[0], "again": sent[0], "tensor": torch.from_numpy(pixels)})
    assert got["image"] is got["again"] and np.array_equal(np.asarray(got["image"]), got["tensor"].numpy())
