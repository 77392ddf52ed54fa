"""Where the elements of tensors, storages and arrays lie, and which of them share memory."""

import dataclasses
import hashlib
import math

import numpy as np
import torch

__all__ = ["Leaf", "alone", "check_writes", "digest", "leaf_of", "overlap", "sharing"]


def digest(content):
    """A short text that distinguishes contents."""
    if len(content) <= 32:
        return content.hex()
    return f"{len(content)} bytes, {hashlib.blake2b(content, digest_size=8).hexdigest()}"


@dataclasses.dataclass(eq=False)
class Leaf:
    """An object with memory, as bytes: the last dimension of `view` runs over the bytes of an element."""

    path: str
    kind: str  # "tensor" or "array"
    owner: object
    view: np.ndarray

    @property
    def content(self):
        return self.view.tobytes()

    @property
    def start(self):
        return self.view.__array_interface__["data"][0]

    @property
    def bounds(self):
        return np.lib.array_utils.byte_bounds(self.view)

    @property
    def can_be_written(self):
        """Whether the bytes may be overwritten: not if they are references to objects."""
        if self.kind == "tensor":
            return True
        return self.owner.flags.writeable and not self.owner.dtype.hasobject

    @property
    def is_nested(self):
        """Whether each stride steps over all that the smaller ones reach: then no two elements share memory."""
        reach = 0
        for stride, size in sorted(
            (abs(s), n) for n, s in zip(self.view.shape, self.view.strides, strict=True) if n > 1
        ):
            if stride <= reach:
                return False
            reach += (size - 1) * stride
        return True

    def units(self, width):
        """Addresses of the pieces of `width` bytes, in the order of the elements."""
        addresses = np.zeros((), np.int64)
        for size, stride in zip(self.view.shape, self.view.strides, strict=True):
            if stride == 1:  # the bytes of an element
                size, stride = size // width, width
            addresses = addresses[..., None] + np.arange(size) * stride
        return addresses.reshape(-1) + self.start


def bytes_of(storage):
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def leaf_of(path, value):
    """The memory of a tensor, storage or array; None where it has none."""
    if isinstance(value, np.ndarray):
        if value.size == 0 or value.itemsize == 0:
            return None
        strides = (*value.strides, 1)
        shape = (*value.shape, value.itemsize)
        plain = value.view(np.ndarray)
        view = np.lib.stride_tricks.as_strided(as_bytes(plain), shape, strides)
        return Leaf(path, "array", value, view)
    if isinstance(value, torch.UntypedStorage):
        flat = bytes_of(value)
        return Leaf(path, "tensor", value, flat) if len(flat) else None
    if value.numel() == 0:
        return None
    item = value.element_size()
    flat = bytes_of(value.untyped_storage())
    strides = (*(stride * item for stride in value.stride()), 1)
    view = np.ndarray((*value.shape, item), np.uint8, flat, value.storage_offset() * item, strides)
    return Leaf(path, "tensor", value, view)


def as_bytes(array):
    """An array of uint8 whose first element is the first byte of this array."""
    interface = dict(array.__array_interface__)
    interface.update(typestr="|u1", descr=[("", "|u1")], shape=(1,), strides=None)
    return np.asarray(type("Memory", (), {"__array_interface__": interface, "array": array})())


def clusters(leaves):
    """Groups the indices of leaves whose bounds overlap; in each group, they ascend."""
    order = sorted(range(len(leaves)), key=lambda i: leaves[i].bounds)
    end, groups = 0, []
    for i in order:
        low, high = leaves[i].bounds
        if low >= end:
            groups.append([])
        groups[-1].append(i)
        end = max(end, high)
    return [sorted(group) for group in groups]


def sharing(leaves):
    """For each leaf, "own" if its bytes have not been seen before, or a digest of where each was seen first."""
    result = ["own"] * len(leaves)
    for cluster in clusters(leaves):
        together = [leaves[i] for i in cluster]
        low, high = min(leaf.bounds[0] for leaf in together), max(leaf.bounds[1] for leaf in together)
        if len(cluster) == 1 and together[0].is_nested:
            continue
        width = common_width(together, low)
        # For each place, the leaf that shows it first, and the position in that leaf.
        table = np.full((high - low) // width, -1)
        for i, leaf in zip(cluster, together, strict=True):
            at = (leaf.units(width) - low) // width
            names = np.arange(len(at)) * width + (i << 40)
            new = table[at] < 0
            # The last of several assignments to one place is kept, so the first position is assigned last.
            table[at[new][::-1]] = names[new][::-1]
            places = table[at]
            if not np.array_equal(places, names):
                result[i] = digest(runs(places, width))
    return result


def overlap(one, other):
    """Whether two leaves show the same byte."""
    low, high = min(one.bounds[0], other.bounds[0]), max(one.bounds[1], other.bounds[1])
    if one.bounds[1] <= other.bounds[0] or other.bounds[1] <= one.bounds[0]:
        return False
    width = common_width([one, other], low)
    shown = np.zeros((high - low) // width, bool)
    shown[(one.units(width) - low) // width] = True
    return bool(shown[(other.units(width) - low) // width].any())


def common_width(leaves, low):
    """The size of the largest pieces, counted from the address `low`, of which all elements consist."""
    return math.gcd(*[n for leaf in leaves for n in (leaf.start - low, leaf.view.shape[-1], *leaf.view.strides[:-1])])


def alone(leaves):
    """For each leaf, whether no other leaf lies between its first and its last byte."""
    result = [False] * len(leaves)
    for cluster in clusters(leaves):
        if len(cluster) == 1:
            result[cluster[0]] = True
    return result


def runs(places, width):
    """Where runs of consecutive places begin, and how many bytes each has."""
    breaks = np.flatnonzero(np.diff(places) != width) + 1
    begins = np.concatenate([[0], breaks])
    lengths = np.diff(np.concatenate([begins, [len(places)]])) * width
    return np.stack([places[begins], lengths]).tobytes()


def check_writes(leaves, most=3, room=1 << 18):
    """Writes to some leaves. Each write must be seen through all leaves that cover it, and no others. Returns an error
    message, or None."""
    leaves = [leaf for leaf in leaves if leaf.can_be_written]
    if sum(leaf.view.size for leaf in leaves) > room:
        leaves = [leaf for leaf in leaves if leaf.view.size < room // 8]
    contents = [leaf.content for leaf in leaves]
    for leaf in leaves[:: max(1, len(leaves) // most)]:
        last = tuple(n - 1 for n in leaf.view.shape)
        leaf.view[last] ^= 1
        address = leaf.start + sum(n * s for n, s in zip(last, leaf.view.strides, strict=True))
        for i, other in enumerate(leaves):
            now = other.content
            if (now != contents[i]) != shows(other, address):
                seen = "not seen" if now == contents[i] else "seen"
                return f"a write to {leaf.path or 'the root'} is {seen} through {other.path or 'the root'}"
            contents[i] = now
    return None


def shows(leaf, address):
    low, high = leaf.bounds
    return low <= address < high and address in leaf.units(1)
