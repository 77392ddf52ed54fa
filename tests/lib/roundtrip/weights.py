"""The parts of random trees, and their weights."""

LIMIT = 16 * 1024


def weights(text):
    """Parses "name weight, ..." into {name: weight}."""
    return {name: int(weight) for name, weight in (pair.rsplit(" ", 1) for pair in text.split(", "))}


# Families of steps.
FAMILIES = weights(
    "atom 14, tensor 16, view 22, container 22, array 8, array_view 7, batch 6, odd_tensor 12, odd_array 5, tie 3, "
    "nasty 1"
)
# The same for plain trees, which the codec takes as they are.
PLAIN_FAMILIES = weights("key 16, tensor 18, view 30, container 22, array 6, array_view 6, batch 8")

VIEWS = weights(
    "cut 14, narrow 8, select 6, transpose 8, permute 4, piece 6, flat 3, alias 3, expand 4, expand_ones 3, "
    "windows 5, as_strided 6, unsqueeze 2, squeeze 1, diagonal 2, flip 1, view_dtype 6, clone 2, channels_last 4, "
    "channels_last_3d 2, imag 1"
)
ODD_TENSORS = weights(
    "parameter 6, leaf 4, with_grad 1, labelled 5, tagged 2, attributed 2, conj 2, neg 2, sparse 5, nested 4, "
    "meta 2, quantized 3, inference 2, shared 4, storage 4, typed_storage 2, return_type 1"
)
ARRAY_VIEWS = weights(
    "array_cut 10, array_transpose 5, array_fortran 2, array_broadcast 3, array_windows 2, array_overlap 2, "
    "array_field 2, array_frozen 3, array_view 4, array_item 2, array_flat 2, array_swapped 2, numpy 8, "
    "from_numpy 8, from_buffer 3"
)
PLAIN_ARRAY_VIEWS = weights(
    "array_cut 10, array_transpose 8, array_broadcast 2, array_windows 2, array_frozen 2, array_view 4, numpy 6, "
    "from_numpy 6"
)
ODD_ARRAYS = weights(
    "of_objects 6, record_of_objects 3, masked 4, noted 3, subclass 3, matrix 1, recarray 2, chararray 1, "
    "unaligned 3, memmap 2, array_bytes 3"
)
# Leaves of the samples for default_collate.
LEAVES = weights("tensor 8, array 3, transposed 2, ragged 1, int 3, float 3, np.float32 1, str 2, none 1")

# Operations on arrays of certain dtypes only.
FIELDS = {
    "array_field": ["record", "aligned", "titled"],
    "recarray": ["record", "aligned", "titled"],
    "chararray": ["S5", "U3", ">U2"],
}
COMMON = ["float32", "uint8", "int64", "bool", "float64", "int32", "complex64", "float16", "bfloat16"]
SAMPLE_SHAPES = [(3,), (3, 4), (), (0,), (3, 40, 40), (LIMIT // 2,), (70, 90), (3, 300, 300)]
LARGE = [(600, 500), (1 << 18,), ((1 << 18) + 5,), (3, 300, 301)]
PLAIN_KEYS = (
    "None;True;False;inf;-0.0;nan payload;complex;i64 min;i64 max;empty str;str;long str;bytes;long bytes;empty tuple"
)
KEYS = "None;True;big int;surrogate;bytes;long str;enum;np.int8;date;Path;torch.dtype;type;complex;str subclass"
LIKE_LISTS = "tuple list namedtuple deque bounded_deque frozen_dataclass slotted_dataclass dataclass list_subclass"
OBJECTS = "sequence plain slotted reduced stateful namespace exception module"
LIKE_DICTS = "dict OrderedDict defaultdict UserDict mapping dict_subclass"
