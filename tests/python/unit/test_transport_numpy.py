"""NumPy arrays of every kind, buffers, and objects of other libraries (P25)."""

import pickle
import sys

import numpy as np
import pytest
import torch
from sample_data import Array, Given, Record, untouched
from support import DataLoader, outcomes, send

pytestmark = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning", "ignore::DeprecationWarning")


class Informed(np.ndarray):
    """Instances have an attribute, which `__reduce__` includes."""

    def __new__(cls, values, info):
        result = np.asarray(values).view(cls)
        result.info = info
        return result

    def __array_finalize__(self, obj):
        self.info = getattr(obj, "info", "finalized")

    def __reduce__(self):
        rebuild, args, state = super().__reduce__()
        return rebuild, args, (*state, self.info)

    def __setstate__(self, state):
        super().__setstate__(state[:-1])
        self.info = state[-1]


class Finalized(np.ndarray):
    """Instances have an attribute that only `__array_finalize__` sets."""

    def __array_finalize__(self, obj):
        self.info = getattr(obj, "info", "finalized")


PAIR = np.dtype([("a", "i4"), ("b", "f8")])
NESTED = np.dtype([("a", "i1"), ("b", [("c", ">f4"), ("d", "U3")]), ("e", "u2", (2, 2)), ("f", "M8[s]")])
GAPS = np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 10], "itemsize": 20})

# Arrays of n x n elements.
ARRAYS = {
    "structured": lambda n: np.ones((n, n), PAIR),
    "nested fields": lambda n: np.ones((n, n), NESTED),
    "aligned": lambda n: np.ones((n, n), np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "gaps": lambda n: np.ones((n, n), GAPS),
    "titles": lambda n: np.ones((n, n), np.dtype({"names": ["a"], "formats": ["i4"], "titles": ["t"]})),
    "a field": lambda n: np.ones((n, n), NESTED)["b"],
    "a plain field": lambda n: np.ones((n, n), NESTED)["a"],
    "objects": lambda n: np.array([[i, str(j)][j % 2] for i in range(n) for j in range(n)], object).reshape(n, n),
    "objects in F order": lambda n: np.array([[(i, j) for i in range(n)] + [None] for j in range(n)], object).T,
    "dates": lambda n: np.arange(n * n).astype("M8[h]").reshape(n, n),
    "dates of 25 seconds": lambda n: np.arange(n * n).astype("M8[25s]").reshape(n, n),
    "not a time": lambda n: np.full((n, n), "NaT", "M8[ns]"),
    "time spans": lambda n: np.arange(n * n).astype("m8[ns]").reshape(n, n),
    "strings": lambda n: np.arange(n * n).astype(str).reshape(n, n),
    "bytes": lambda n: np.arange(n * n).astype("S7").reshape(n, n),
    "empty strings": lambda n: np.full((n, n), ""),
    "void": lambda n: np.arange(n * n * 5, dtype=np.uint8).view("V5").reshape(n, n),
    "long double": lambda n: np.arange(n * n).astype("g").reshape(n, n),
    "complex long double": lambda n: np.arange(n * n).astype("G").reshape(n, n),
    "half": lambda n: np.arange(n * n).astype("e").reshape(n, n),
    "strings of variable width": lambda n: np.array([str(i) * (i % 40) for i in range(n * n)], np.dtypes.StringDType()),
    "with metadata": lambda n: np.ones((n, n), np.dtype("f8", metadata={"unit": "m"})),
    "big endian": lambda n: np.arange(n * n, dtype=">i4").reshape(n, n),
    "big endian F order": lambda n: np.arange(n * n, dtype=">f8").reshape(n, n).T,
    "big endian strings": lambda n: np.arange(n * n).astype(">U4").reshape(n, n),
    "big endian dates": lambda n: np.arange(n * n).astype(">M8[s]").reshape(n, n),
    "40 dimensions": lambda n: np.arange(n * n).reshape((1,) * 38 + (n, n)),
    "matrix": lambda n: np.asmatrix(np.arange(n * n).reshape(n, n)),
    "recarray": lambda n: np.rec.array(np.ones((n, n), PAIR)),
    "chararray": lambda n: np.char.array(np.arange(n * n).astype(str).reshape(n, n)),
    "masked": lambda n: np.ma.masked_greater(np.arange(n * n).reshape(n, n), 3),
    "masked with a fill value": lambda n: np.ma.masked_array(np.ones((n, n)), mask=np.eye(n), fill_value=7),
    "masked records": lambda n: np.ma.array([(1, 2.0)] * n, PAIR, mask=[(0, 1)] * n),
    "subclass": lambda n: np.arange(n * n).reshape(n, n).view(Array),
    "subclass with __reduce__": lambda n: Informed(np.arange(n * n).reshape(n, n), ["info", n]),
    "its slice": lambda n: Informed(np.arange(n * n).reshape(n, n), ["info", n])[1:],
    "subclass with __array_finalize__": lambda n: np.arange(n * n).reshape(n, n).view(Finalized),
    "no rows": lambda n: np.zeros((0, n)),
    "no columns, F order": lambda n: np.asfortranarray(np.zeros((n, 0, 2), "f4")),
    "no strings": lambda n: np.zeros((0, n), "U3"),
    "no records": lambda n: np.zeros((0, n), PAIR),
    "0-d string": lambda n: np.array("x" * n),
    "0-d date": lambda n: np.array("2020", "M8[D]"),
    "0-d object": lambda n: np.array({"a": n}, object),
    "0-d record": lambda n: np.array((n, 2.5), PAIR),
    "0-d subclass": lambda n: np.array(float(n)).view(Array),
    "0-d big endian": lambda n: np.array(n, ">u2"),
}
if not hasattr(np.dtypes, "StringDType"):  # NumPy before 2.0
    del ARRAYS["strings of variable width"]
# Also in F order, read-only, and both.
ORDERS = "structured", "objects", "dates", "strings", "half", "subclass", "big endian"


def read_only(array):
    array.flags.writeable = False
    return array


def variants(n):
    arrays = {kind: make(n) for kind, make in ARRAYS.items()}
    for kind in ORDERS:
        arrays[f"{kind}, F order"] = np.asanyarray(arrays[kind]).copy(order="F")
        arrays[f"{kind}, read-only"] = read_only(arrays[kind].copy())
        arrays[f"{kind}, F order, read-only"] = read_only(arrays[kind].copy(order="F"))
    arrays["plain, read-only"] = read_only(np.arange(n * n).reshape(n, n))
    arrays["plain, F order, read-only"] = read_only(np.arange(n * n).reshape(n, n).T)
    return arrays


def check(kind, got, sent):
    assert type(got) is type(sent) and got.shape == sent.shape, kind
    # torch's loader converts some kinds to native byte order, and leaves others as they are.
    assert got.dtype == sent.dtype or got.dtype.newbyteorder("=") == sent.dtype.newbyteorder("="), kind
    if isinstance(sent, (Informed, Finalized)):
        assert got.info == (sent.info if isinstance(sent, Informed) else "finalized"), kind
    if sent.dtype.hasobject or sent.dtype.kind == "T":
        assert got.tolist() == sent.tolist(), kind
    elif sent.dtype.names:  # there may be padding between the fields
        assert np.all(got == sent), kind
    else:
        assert got.astype(sent.dtype).tobytes() == sent.tobytes(), kind
    if sent.size and (sent.flags.c_contiguous or sent.flags.f_contiguous):
        assert got.flags.f_contiguous == sent.flags.f_contiguous, kind
        assert got.flags.c_contiguous == sent.flags.c_contiguous, kind
    assert got.flags.writeable, kind
    if got.size:
        got[...] = np.roll(got, 1)


@pytest.mark.parametrize("n", [3, 60])
def test_p25_arrays_of_each_kind(n):
    arrays = variants(n)
    before = {kind: array.tobytes() for kind, array in arrays.items() if not array.dtype.hasobject}
    for kind, got in zip(arrays, send(*arrays.values()), strict=True):
        check(kind, got, arrays[kind])
    (got,) = send(Record("r", list(arrays.values()), list(arrays.values())[::-1]))
    for kind, array, again in zip(arrays, got.data, got.more[::-1], strict=True):
        assert array is again, kind
        check(kind, array, arrays[kind])
    assert before == {kind: array.tobytes() for kind, array in arrays.items() if not array.dtype.hasobject}


def test_p25_masked_arrays_keep_mask_and_fill_value():
    masked = np.ma.masked_array(np.asfortranarray(np.arange(12.0).reshape(3, 4)), mask=np.eye(3, 4), fill_value=-1)
    records = np.ma.array([(1, 2.0), (3, 4.0)], PAIR, mask=[(0, 1), (1, 0)])
    got = send(masked, records, masked[0, 0])
    assert got[0].mask.tolist() == masked.mask.tolist() and got[0].fill_value == -1
    assert got[0].filled().tolist() == masked.filled().tolist() and got[0].sum() == masked.sum()
    assert got[1].mask.tolist() == records.mask.tolist()
    assert got[2] is np.ma.masked


def test_p25_memory_maps(tmp_path):
    whole = np.memmap(tmp_path / "m", np.float32, "w+", shape=(200, 100))
    whole[:] = np.arange(20_000).reshape(200, 100)
    whole.flush()
    reading = np.memmap(tmp_path / "m", np.float32, "r", shape=(200, 100))
    sent = [whole, whole[3:5], whole.T, reading, reading[7], reading.view(np.ndarray)]
    for got, array in zip(send(*sent), sent, strict=True):
        assert type(got) is type(array) and np.array_equal(got, array) and got.flags.writeable
        assert got.flags.f_contiguous == array.flags.f_contiguous
        got[...] = -1
    assert whole[0, 1] == 1 and reading[7, 0] == 700


def test_p25_tensors_within_arrays_of_objects():
    shared = torch.arange(10_000)
    array = np.empty(3, object)
    array[:] = [shared, shared[1:], np.arange(5000)]
    (got,) = send({"array": array, "tensor": shared})
    assert got["array"][0] is got["tensor"] and got["array"][2].tolist() == list(range(5000))
    got["tensor"].fill_(-1)
    assert got["array"][1].unique().tolist() == [-1]


SCALARS = [
    np.float32(1.5),
    np.longdouble(3),
    np.str_("abc"),
    np.bytes_(b"ab"),
    np.timedelta64(3, "s"),
    np.ones(2, PAIR)[0],
    np.rec.array(np.ones(2, PAIR))[1],
    np.dtype(NESTED),
    np.add,
]


def test_p25_scalars_dtypes_and_functions():
    for got, sent in zip(send(*SCALARS), SCALARS, strict=True):
        assert type(got) is type(sent) and got == sent


def test_p25_random_generators_go_on_where_they_were():
    generator = np.random.default_rng(3)
    generator.random(5)
    (got,) = send(generator)
    assert got.random(4).tolist() == generator.random(4).tolist()


@pytest.mark.parametrize("n", [4, 5000])
def test_arrays_arrive_in_the_machines_byte_order(n):
    sent = [ARRAYS[kind](n) for kind in ARRAYS if "endian" in kind]
    assert sent
    for array, got in zip(sent, send(*sent), strict=True):
        assert got.dtype.isnative and got.dtype == array.dtype.newbyteorder("=")
        assert np.array_equal(got, array)


# Buffers


@pytest.mark.parametrize("n", [10, 100_000])
def test_p25_bytes_and_bytearrays(n):
    text = bytes(range(10)) * (n // 10)
    changeable = bytearray(text)
    sent = {"bytes": text, "array": changeable, "again": changeable, "record": Record("r", text, changeable)}
    (got,) = send(sent)
    assert (got["bytes"], got["array"], got["record"].data) == (text, changeable, text)
    assert type(got["bytes"]) is bytes and type(got["array"]) is bytearray
    assert got["array"] is got["again"] is got["record"].more
    got["array"][0] = 255
    assert changeable[0] == 0


@pytest.mark.ours
@pytest.mark.forks
def test_p25_a_memoryview_is_an_error_as_in_pickle():
    loader = DataLoader(Given([memoryview(b"abc"), 1]), num_workers=1, batch_size=None, collate_fn=untouched)
    iterator = iter(loader)
    with pytest.raises(TypeError, match=r"cannot pickle.*memoryview") as caught:
        next(iterator)
    assert "worker process 0" in str(caught.value)
    assert outcomes(iterator, 2) == [("value", 1), ("end",)]


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


@pytest.mark.ours
@pytest.mark.parametrize("n", [10, 100_000])
@pytest.mark.forks
def test_a_bare_buffer(n):
    (got,) = send(pickle.PickleBuffer(bytearray(b"abcdefghij" * (n // 10))))
    assert bytes(got) == b"abcdefghij" * (n // 10)


# Other libraries


def sizes(value):
    """The sizes of a batch's pickle, and of the objects that are sent outside of it."""
    from rustloader.workers import serialize

    payload, objects, _ = serialize.dumps(value)
    return len(payload), sum(obj[0].nbytes if isinstance(obj, list) else obj.nbytes for obj in objects)


@pytest.mark.ours
def test_large_buffers_lie_beside_the_pickle():
    times = np.arange(50_000).astype("M8[s]")
    for data in (np.ones(50_000), np.ones(50_000, PAIR), np.ones(50_000, ">f8"), np.ones((300, 400)).T, times):
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
