"""Finds a piece of code by the name of its function and a pattern, and replaces it.

A pattern is code with holes: `$name` stands for any one expression, name or statement, and `...` for any number of
adjacent items. Patterns are compared with syntax trees, so line breaks, comments, parentheses and trailing commas do
not matter.
"""

import difflib
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sources import ROOT, Dialect, NotFound, Source, function_around, identifiers, locals_of, named, text_of, walk
from tree_sitter import Node

# What the parsers see instead of `$name` and `...`.
_HOLE = "hole_"
_REST = "rest_"

_COMMENTS = ("comment", "line_comment", "block_comment")

Holes = dict[str, str]


@dataclass(frozen=True)
class Match:
    """A piece of code that matches a pattern."""

    source: Source
    begin: int
    end: int
    holes: Holes
    node: Node

    @property
    def line(self) -> str:
        return f"{self.source.path}:{self.node.start_point.row + 1}"


@dataclass(frozen=True)
class Change:
    """A file before and after a fault is put into it."""

    path: str
    before: str
    after: str

    def diff(self) -> str:
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), self.path, "", "", "", 1, "")
        return "\n".join(line for line in lines if not line.startswith("+++"))


# --- patterns ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2000)
def _patterns(dialect: Dialect, text: str) -> list[list[Node]]:
    """Returns each way to parse a pattern: as statements or an expression, as an argument, as an arm of a match."""
    text = _without_holes(text)
    forms = []
    for frame in dialect.frames:
        begin = len(frame.split("§")[0].encode())
        end = begin + len(text.encode())
        node = dialect.parser.parse(frame.replace("§", text).encode()).root_node
        if node.has_error:
            continue
        node = node.descendant_for_byte_range(begin, end) or node
        if (node.start_byte, node.end_byte) == (begin, end) and node.parent:
            forms.append([node])
        else:
            forms.append([n for n in _parts(node) if n.start_byte >= begin and n.end_byte <= end])
    return forms


def _without_holes(text: str) -> str:
    """Returns a pattern as code, with names instead of holes. Each `...` has a number."""
    first, *others = text.strip().split("...")
    text = first + "".join(f"{_REST}{number}{other}" for number, other in enumerate(others))
    return re.sub(r"\$(\w+)", rf"{_HOLE}\1", text)


def _parts(node: Node) -> list[Node]:
    """Returns the significant children: no comments, and no separators."""
    return [n for n in node.children if n.type not in (*_COMMENTS, ",", ";")]


def _bare(node: Node) -> Node:
    """Returns the node without parentheses around it."""
    while node.type == "parenthesized_expression":
        node = node.named_children[-1]
    return node


def _span(nodes: Sequence[Node]) -> str:
    """Returns the code from the first to the last of adjacent nodes."""
    if not nodes or (parent := nodes[0].parent) is None:
        return ""
    code = parent.text or b""
    return code[nodes[0].start_byte - parent.start_byte : nodes[-1].end_byte - parent.start_byte].decode()


def _hole(node: Node) -> str:
    """Returns the name of a hole, which may be a statement, or an empty string if the node is not a hole."""
    if node.child_count > 2:
        return ""
    text = text_of(node).removesuffix(";")
    return text if re.fullmatch(rf"({_HOLE}|{_REST})\w+", text) else ""


def _fits_all(pattern: Sequence[Node], nodes: Sequence[Node], holes: Holes) -> Holes | None:
    if not pattern:
        return None if nodes else holes
    if (hole := _hole(pattern[0])).startswith(_REST):
        for count in range(len(nodes) + 1):
            result = _fits_all(pattern[1:], nodes[count:], {**holes, hole: _span(nodes[:count])})
            if result is not None:
                return result
        return None
    if not nodes:
        return None
    result = _fits(pattern[0], nodes[0], holes)
    return None if result is None else _fits_all(pattern[1:], nodes[1:], result)


def _fits(pattern: Node, node: Node, holes: Holes) -> Holes | None:
    """Returns the code of the holes if the pattern matches, else None."""
    if hole := _hole(pattern):
        if not node.is_named or holes.get(hole, text_of(node)) != text_of(node):
            return None
        return {**holes, hole: text_of(node)}
    pattern, node = _bare(pattern), _bare(node)
    if pattern.type != node.type:
        return None
    inner = _parts(pattern)
    if not inner:
        return holes if text_of(pattern) == text_of(node) else None
    return _fits_all(inner, _parts(node), holes)


def _end(node: Node) -> int:
    """Returns where a node ends, without the comma of a match arm."""
    return node.children[-1].start_byte if node.children and node.children[-1].type == "," else node.end_byte


def _matches(pattern: list[Node], source: Source, scope: Node) -> Iterator[Match]:
    """Yields each piece of code in ``scope`` that matches a pattern: one node, or adjacent nodes."""
    kind = _bare(pattern[0]).type
    for node in walk(scope):
        if len(pattern) == 1:
            windows = [[node]] if node.type == kind else []
        else:
            parts = _parts(node)
            windows = [parts[first : first + len(pattern)] for first in range(len(parts) - len(pattern) + 1)]
        for window in windows:
            holes = _fits_all(pattern, window, {})
            if holes is not None:
                yield Match(source, window[0].start_byte, _end(window[-1]), holes, window[0])


def find(dialect: Dialect, at: str, pattern: str, root: Path = ROOT) -> Match:
    """Returns the only piece of code in a place that matches a pattern."""
    forms = _patterns(dialect, pattern)
    if not forms:
        raise NotFound(f"{pattern!r} is no code, even with its holes filled")
    matches: dict[tuple[str, int, int], Match] = {}
    for source, scope in named(dialect, at, root):
        for form in forms:
            for match in _matches(form, source, scope):
                matches.setdefault((source.path, match.begin, match.end), match)
    where = at or dialect.folder
    if not matches:
        raise NotFound(f"nothing in {where} fits {pattern!r}")
    if len(matches) > 1:
        lines = ", ".join(match.line for match in matches.values())
        raise NotFound(
            f"{len(matches)} places in {where} fit {pattern!r} ({lines}): let it cover more code, or give `at` more of "
            f"its name (module{dialect.separator}Class{dialect.separator}function)"
        )
    (match,) = matches.values()
    return match


# --- changes ----------------------------------------------------------------------------------------------------------


def replace(dialect: Dialect, at: str, pattern: str, put: str, root: Path = ROOT) -> Change:
    """Replaces the only piece of code that matches. The holes of ``put`` are those of the pattern."""
    match = find(dialect, at, pattern, root)
    _check_names(dialect, match, pattern, put)
    code = match.source.code
    margin = re.match(rb"\s*", code[code.rfind(b"\n", 0, match.begin) + 1 :])
    indent = "\n" + (margin.group().decode() if margin else "")

    def filled(hole: re.Match[str]) -> str:
        name = hole.group().removesuffix(";")
        if name not in match.holes:
            raise NotFound(f"{put!r} has a hole that {pattern!r} does not have")
        # The code of a statement has its own semicolon.
        end = ";" if hole.group().endswith(";") and not match.holes[name].endswith((";", "}")) else ""
        return match.holes[name] + end

    text = re.sub(rf"\b({_HOLE}|{_REST})\w+;?", filled, _without_holes(put).replace("\n", indent))
    return _changed(match.source, match.begin, match.end, text)


def drop(dialect: Dialect, at: str, pattern: str, root: Path = ROOT) -> Change:
    """Removes the only statements that match."""
    match = find(dialect, at, pattern, root)
    _check_names(dialect, match, pattern, "")
    begin, end, node = match.begin, match.end, match.node
    while node.parent and node.parent.type == "expression_statement":
        node = node.parent
        begin, end = min(begin, node.start_byte), max(end, node.end_byte)
    return _changed(match.source, begin, end, dialect.nothing)


def _changed(source: Source, begin: int, end: int, text: str) -> Change:
    code = source.code
    after = code[:begin] + text.encode() + code[end:]
    # Remove a line that is now blank.
    line, stop = after.rfind(b"\n", 0, begin) + 1, after.find(b"\n", begin)
    if not after[line:stop].strip():
        after = after[:line] + after[stop + 1 :]
    return Change(source.path, code.decode(), after.decode())


def _check_names(dialect: Dialect, match: Match, *texts: str) -> None:
    around = function_around(match.node)
    known = locals_of(around) if around else set()
    for text in filter(None, texts):
        for form in _patterns(dialect, text):
            used = {text_of(name) for node in form for name in identifiers(node)} & known
            if used:
                raise NotFound(f"{text!r} names a local: put a hole in its place (${min(used)})")
