"""Describes exceptions briefly: the error, and the innermost frame in user code."""

from __future__ import annotations

import importlib
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from rustloader.system.package import FOLDER

# torch's message for an exception raised in a worker or in the pin memory thread.
_WORKER = re.compile(r"(?:^|: )Caught \S+ in (?:DataLoader (worker) process( \d+)|(pin memory thread).*)\.$")
_FRAME = re.compile(r'  File "(.+)", line (\d+), in (.+)$')
# Folders of libraries, longest first: site-packages may be inside the folder of the standard library.
_LIBRARIES = sorted(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    key=len,
    reverse=True,
)
# Maximum length of the error in the short form, in characters.
_MAX_TEXT = 1000


@dataclass(frozen=True)
class Failure:
    """A description of an exception.

    Attributes:
        text: the type and the message, without notes.
        where: the innermost frame in user code, as "file.py:12 in function", then the worker or the pin memory
            thread if the exception comes from there; "" if there is neither.
        details: the whole traceback.
    """

    text: str
    where: str
    details: str

    def __str__(self) -> str:
        text = self.text if len(self.text) <= _MAX_TEXT else self.text[:_MAX_TEXT] + " ..."
        # Escapes control characters, which would otherwise reach the terminal.
        text = "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text)
        return f"{text} ({self.where})" if self.where else text


def failure(error: BaseException) -> Failure:
    """Describes an exception. If it was first raised in a worker, describes the worker's traceback."""
    described = traceback.TracebackException(type(error), error, None, compact=True)
    # Leaves out notes: rustloader adds one to a worker's error, but torch does not.
    described.__notes__ = None
    text = "".join(described.format_exception_only()).strip()
    lines = text.splitlines()
    if len(lines) > 2 and _WORKER.search(lines[0]) and lines[1].startswith("Original Traceback"):
        return _failure_in_worker(lines)
    trace = error.__traceback__
    while trace is not None and _is_machinery(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    details = "".join(traceback.format_exception(type(error), error, trace)).strip()
    if isinstance(error, SyntaxError) and error.filename:
        text = f"{type(error).__name__}: {error.msg}"
        return Failure(text, f"{short_path(error.filename)}:{error.lineno}", details)
    frames = ((frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(trace))
    return Failure(text, _innermost(frames), details)


def is_user_code(file: str) -> bool:
    """Returns True if a source file belongs neither to a library nor to this package."""
    return not file.startswith(("<", FOLDER + os.sep, *_LIBRARIES))


def short_path(file: str) -> str:
    """Shortens a path that is inside the current directory or a folder of libraries to a relative path."""
    for folder in (os.getcwd() + os.sep, *_LIBRARIES):
        if file.startswith(folder):
            return file.removeprefix(folder)
    return file


def _failure_in_worker(lines: list[str]) -> Failure:
    """Describes an error that was raised in a worker, from the lines of torch's message."""
    frames = {k: match for k, line in enumerate(lines) if (match := _FRAME.match(line))}
    last = max(frames, default=1)
    # The error follows the last frame and its source lines, which are indented.
    begin = next((k for k in range(last + 1, len(lines)) if lines[k][:1].strip()), len(lines) - 1)
    where = _innermost((match[1], int(match[2]), match[3]) for match in frames.values())
    match = _WORKER.search(lines[0])
    place = "".join(filter(None, match.groups())) if match else ""
    text = "\n".join(lines[begin:]).strip()
    return Failure(text, ", ".join(filter(None, (where, place))), "\n".join(lines))


def _innermost(frames: Iterator[tuple[str, int, str]]) -> str:
    """Returns the last frame in user code."""
    own = [f"{short_path(file)}:{number} in {name}" for file, number, name in frames if is_user_code(file)]
    return own[-1] if own else ""


def _is_machinery(file: str) -> bool:
    return file.startswith(("<frozen importlib", FOLDER + os.sep)) or file == importlib.__file__
