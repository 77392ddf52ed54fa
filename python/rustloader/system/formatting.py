"""Functions that format counts, times, sizes, index batches and type names for messages."""

_PLURALS = {
    "batch": "batches",
    "copy": "copies",
    "entry": "entries",
    "miss": "misses",
    "tensor or array": "tensors and arrays",
}


def count_of(count: int, what: str) -> str:
    """Formats a count and its noun, which is given in the singular: "1 worker", "2,500 batches"."""
    if count != 1:
        what = _PLURALS.get(what, f"{what}s")
    return f"{count:,} {what}"


def duration(seconds: float) -> str:
    """Formats a number of seconds with three significant digits and a suitable unit: "17.2 us", "123 ms", "4.56 s"."""
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if 0 < seconds * scale < 999.5:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def size(count: float) -> str:
    """Formats a number of bytes with two or three significant digits and a suitable unit: "1.2 MB", "123 kB"."""
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= bytes_:
            value = count / bytes_
            return f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"
    return f"{count:.0f} B"


def short_index(index: str, limit: int = 40) -> str:
    """Shortens the string for a long index batch to its start, followed by the total count if the string has it."""
    if len(index) <= limit:
        return index
    head, _, total = index.partition(", ... ")
    shown = head[:limit].rpartition(", ")[0]
    if not shown:
        return f"{index[:limit]}..."
    return f"{shown}, ... {total}" if total else f"{shown}, ...{index[-1] if index[-1] in '])' else ''}"


def printable(text: str) -> str:
    """Returns a string in which a question mark replaces each character that is not printable."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def type_name(value: object) -> str:
    """Returns the name of a value's type, including the module unless this is ``builtins``."""
    return name_of(type(value))


def name_of(kind: type) -> str:
    """Returns the name of a type, including the module unless this is ``builtins``."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
