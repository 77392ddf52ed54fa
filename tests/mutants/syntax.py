"""Finds a piece of code by the name of its function and a pattern, and replaces it.

A pattern is code with holes: `$name` stands for any one expression, name or statement, `...` for any number of
arguments or statements. Patterns are compared with syntax trees, so line breaks, comments, parentheses and trailing
commas do not matter.
"""

import difflib
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tree_sitter_python
import tree_sitter_rust
from tree_sitter import Language, Node, Parser

ROOT = Path(__file__).resolve().parents[2]

# What the parsers see in the place of `$name` and of `...`.
_HOLE = "hole_"
_REST = "rest_"

FUNCTIONS = ("function_definition", "function_item")
_COMMENTS = ("comment", "line_comment", "block_comment")

Found = dict[str, str]


class NotFound(Exception):
    """A name or a pattern that does not lead to one place; the text says how to mend it."""


@dataclass(frozen=True, eq=False)
class Dialect:
    """What tells one language from the other."""

    folder: str
    suffix: str
    separator: str
    parser: Parser
    # What a pattern can be: the code around it where it is parsed.
    frames: tuple[str, ...]
    # Node types that name a place, with the field that holds the name.
    places: dict[str, str]
    # What stands where a statement was dropped.
    nothing: str


PYTHON = Dialect(
    folder="python/rustloader",
    suffix=".py",
    separator=".",
    parser=Parser(Language(tree_sitter_python.language())),
    frames=("§", "f(§)"),
    places={"class_definition": "name", "function_definition": "name", "assignment": "left"},
    nothing="pass",
)
RUST = Dialect(
    folder="src",
    suffix=".rs",
    separator="::",
    parser=Parser(Language(tree_sitter_rust.language())),
    frames=("fn f() { § }", "fn f() { match x { § } }"),
    places={
        "mod_item": "name",
        "impl_item": "type",
        "trait_item": "name",
        "function_item": "name",
        "const_item": "name",
        "static_item": "name",
    },
    nothing="",
)


@dataclass(frozen=True)
class Source:
    """A file and its syntax tree."""

    path: str
    code: bytes
    root: Node
    # The dotted name of each class, function and constant, and where it stands. A name may come twice.
    places: list[tuple[tuple[str, ...], Node]]


@dataclass(frozen=True)
class Match:
    """A piece of code that a pattern fits."""

    source: Source
    begin: int
    end: int
    found: Found
    node: Node

    @property
    def line(self) -> str:
        return f"{self.source.path}:{self.node.start_point.row + 1}"


@dataclass(frozen=True)
class Change:
    """A file as it is, and as a fault makes it."""

    path: str
    before: str
    after: str

    def diff(self) -> str:
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), self.path, "", "", "", 1, "")
        return "\n".join(line for line in lines if not line.startswith("+++"))


# --- sources --------------------------------------------------------------------------------------------------------


def sources(dialect: Dialect, root: Path = ROOT) -> list[Source]:
    """All product sources of a language."""
    folder = root / dialect.folder
    files = sorted(folder.rglob(f"*{dialect.suffix}"))
    return [_parse(dialect, path.relative_to(root).as_posix(), path.read_bytes()) for path in files]


@functools.lru_cache(maxsize=1000)
def _parse(dialect: Dialect, path: str, code: bytes) -> Source:
    root = dialect.parser.parse(code).root_node
    begin = path.removeprefix("python/").removeprefix("src/").removesuffix(dialect.suffix).split("/")
    module = tuple(name for name in begin if name not in ("mod", "lib", "__init__"))
    return Source(path, code, root, [(module, root), *_places(dialect, root, module)])


def _places(dialect: Dialect, node: Node, outer: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Node]]:
    is_test = False
    for child in node.named_children:
        if child.type == "attribute_item":
            is_test = is_test or text_of(child) == "#[cfg(test)]"
            continue
        field = dialect.places.get(child.type)
        name = child.child_by_field_name(field) if field else None
        if name is None:
            yield from _places(dialect, child, outer)
        elif not is_test and not (child.type == "assignment" and function_around(child)):
            path = (*outer, text_of(name).split("<")[0])
            yield path, child
            yield from _places(dialect, child, path)
        is_test = False


def named(dialect: Dialect, at: str, root: Path = ROOT) -> list[tuple[Source, Node]]:
    """The places whose name ends in ``at``; without ``at`` all files."""
    files = sources(dialect, root)
    if not at:
        return [(source, source.root) for source in files]
    wanted = tuple(at.split(dialect.separator))
    found = [(s, node) for s in files for path, node in s.places if path[-len(wanted) :] == wanted]
    if not found:
        everything = {dialect.separator.join(path[-len(wanted) :]) for s in files for path, _ in s.places}
        near = ", ".join(difflib.get_close_matches(at, everything, 3)) or "none"
        raise NotFound(f"nothing in {dialect.folder} is called {at}; similar names: {near}")
    return found


# --- patterns -------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2000)
def _patterns(dialect: Dialect, text: str) -> list[list[Node]]:
    """What a pattern can be: statements or an expression, an argument of a call, an arm of a match."""
    text = _without_holes(text)
    found = []
    for frame in dialect.frames:
        begin = len(frame.split("§")[0].encode())
        end = begin + len(text.encode())
        node = dialect.parser.parse(frame.replace("§", text).encode()).root_node
        if node.has_error:
            continue
        node = node.descendant_for_byte_range(begin, end) or node
        if (node.start_byte, node.end_byte) == (begin, end) and node.parent:
            found.append([node])
        else:
            found.append([n for n in _parts(node) if n.start_byte >= begin and n.end_byte <= end])
    return found


def _without_holes(text: str) -> str:
    """A pattern as code: names for the holes, and numbers for each `...`."""
    first, *others = text.strip().split("...")
    text = first + "".join(f"{_REST}{number}{other}" for number, other in enumerate(others))
    return re.sub(r"\$(\w+)", rf"{_HOLE}\1", text)


def _parts(node: Node) -> list[Node]:
    """The children that mean something: no comments, and no separators."""
    return [n for n in node.children if n.type not in (*_COMMENTS, ",", ";")]


def _bare(node: Node) -> Node:
    """Without the parentheses around it."""
    while node.type == "parenthesized_expression":
        node = node.named_children[-1]
    return node


def text_of(node: Node) -> str:
    return (node.text or b"").decode()


def _span(nodes: Sequence[Node]) -> str:
    """The code from the first of some neighbours to the last."""
    if not nodes or (parent := nodes[0].parent) is None:
        return ""
    code = parent.text or b""
    return code[nodes[0].start_byte - parent.start_byte : nodes[-1].end_byte - parent.start_byte].decode()


def _hole(node: Node) -> str:
    """The name of a hole, alone or as a statement."""
    if node.child_count > 2:
        return ""
    text = text_of(node).removesuffix(";")
    return text if re.fullmatch(rf"({_HOLE}|{_REST})\w+", text) else ""


def _fits_all(pattern: Sequence[Node], nodes: Sequence[Node], found: Found) -> Found | None:
    if not pattern:
        return None if nodes else found
    if (hole := _hole(pattern[0])).startswith(_REST):
        for count in range(len(nodes) + 1):
            result = _fits_all(pattern[1:], nodes[count:], {**found, hole: _span(nodes[:count])})
            if result is not None:
                return result
        return None
    if not nodes:
        return None
    result = _fits(pattern[0], nodes[0], found)
    return None if result is None else _fits_all(pattern[1:], nodes[1:], result)


def _fits(pattern: Node, node: Node, found: Found) -> Found | None:
    """What the holes stand for, if the pattern fits."""
    if hole := _hole(pattern):
        if not node.is_named or found.get(hole, text_of(node)) != text_of(node):
            return None
        return {**found, hole: text_of(node)}
    pattern, node = _bare(pattern), _bare(node)
    if pattern.type != node.type:
        return None
    inner = _parts(pattern)
    if not inner:
        return found if text_of(pattern) == text_of(node) else None
    return _fits_all(inner, _parts(node), found)


def _end(node: Node) -> int:
    """Where it ends, without the comma that belongs to an arm of a match."""
    return node.children[-1].start_byte if node.children and node.children[-1].type == "," else node.end_byte


def walk(node: Node) -> Iterator[Node]:
    left = [node]
    while left:
        node = left.pop()
        yield node
        left += reversed(node.children)


def _matches(pattern: list[Node], source: Source, scope: Node) -> Iterator[Match]:
    """Each piece of code in ``scope`` that a pattern fits: one node, or some neighbours."""
    kind = _bare(pattern[0]).type
    for node in walk(scope):
        if len(pattern) == 1:
            windows = [[node]] if node.type == kind else []
        else:
            parts = _parts(node)
            windows = [parts[first : first + len(pattern)] for first in range(len(parts) - len(pattern) + 1)]
        for window in windows:
            found = _fits_all(pattern, window, {})
            if found is not None:
                yield Match(source, window[0].start_byte, _end(window[-1]), found, window[0])


def find(dialect: Dialect, at: str, pattern: str, root: Path = ROOT) -> Match:
    """The one piece of code that fits a pattern in a place."""
    forms = _patterns(dialect, pattern)
    if not forms:
        raise NotFound(f"{pattern!r} is no code, not even with its holes filled")
    found: dict[tuple[str, int, int], Match] = {}
    for source, scope in named(dialect, at, root):
        for form in forms:
            for match in _matches(form, source, scope):
                found.setdefault((source.path, match.begin, match.end), match)
    where = at or dialect.folder
    if not found:
        raise NotFound(f"nothing in {where} fits {pattern!r}")
    if len(found) > 1:
        lines = ", ".join(match.line for match in found.values())
        raise NotFound(
            f"{len(found)} places in {where} fit {pattern!r} ({lines}): let it cover more code, or give `at` more of "
            f"its name (module{dialect.separator}Class{dialect.separator}function)"
        )
    (match,) = found.values()
    return match


def is_code(dialect: Dialect, text: str) -> bool:
    """Whether a file parses."""
    return not dialect.parser.parse(text.encode()).root_node.has_error


# --- changes --------------------------------------------------------------------------------------------------------


def replace(dialect: Dialect, at: str, pattern: str, put: str, root: Path = ROOT) -> Change:
    """Puts other code into the place of the one piece that fits; the holes of ``put`` are those of the pattern."""
    match = find(dialect, at, pattern, root)
    _check_names(dialect, match, pattern, put)
    code = match.source.code
    margin = re.match(rb"\s*", code[code.rfind(b"\n", 0, match.begin) + 1 :])
    indent = "\n" + (margin.group().decode() if margin else "")

    def filled(hole: re.Match[str]) -> str:
        name = hole.group().removesuffix(";")
        if name not in match.found:
            raise NotFound(f"{put!r} has a hole that {pattern!r} has not")
        # What stands for a statement brings its own semicolon.
        end = ";" if hole.group().endswith(";") and not match.found[name].endswith((";", "}")) else ""
        return match.found[name] + end

    text = re.sub(rf"\b({_HOLE}|{_REST})\w+;?", filled, _without_holes(put).replace("\n", indent))
    return _changed(match.source, match.begin, match.end, text)


def drop(dialect: Dialect, at: str, pattern: str, root: Path = ROOT) -> Change:
    """Takes out the one statement, or the statements, that fit."""
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
    # No line of blanks stays.
    line, stop = after.rfind(b"\n", 0, begin) + 1, after.find(b"\n", begin)
    if not after[line:stop].strip():
        after = after[:line] + after[stop + 1 :]
    return Change(source.path, code.decode(), after.decode())


# --- names of locals ------------------------------------------------------------------------------------------------

_BINDERS = {
    "let_declaration": ("pattern",),
    "let_condition": ("pattern",),
    "for_expression": ("pattern",),
    "parameter": ("pattern",),
    "match_arm": ("pattern",),
    "assignment": ("left",),
    "for_statement": ("left",),
    "for_in_clause": ("left",),
    "named_expression": ("name",),
    "function_definition": ("parameters",),
    "lambda": ("parameters",),
    "closure_expression": ("parameters",),
    "as_pattern": ("alias",),
}
# What stands beside a name that is no local: a field, a type, a default, a method.
_NOT_BOUND = ("attribute", "subscript", "type", "scoped_identifier", "call")


def identifiers(node: Node) -> Iterator[Node]:
    """The names in a piece of code, but for those of fields, arguments and functions."""
    if node.type in ("identifier", "shorthand_field_identifier"):
        yield node
    fields = {"attribute": "attribute", "keyword_argument": "name", **dict.fromkeys(FUNCTIONS, "name")}
    skipped = node.child_by_field_name(fields[node.type]) if node.type in fields else None
    before = ""
    for child in node.children:
        # In the arguments of a macro of Rust a field is an identifier after a point.
        if child != skipped and child.type != "scoped_identifier" and before != ".":
            yield from identifiers(child)
        before = child.type


def locals_of(function: Node) -> set[str]:
    """The names that a function binds, its parameters among them."""
    found: set[str] = set()
    for node in walk(function):
        for field in _BINDERS.get(node.type, ()):
            for target in node.children_by_field_name(field):
                found.update(_bound(target))
    return {name for name in found if name not in ("self", "cls") and name[0].islower()}


def _bound(node: Node) -> Iterator[str]:
    if node.type in ("identifier", "shorthand_field_identifier"):
        yield text_of(node)
    elif node.type not in _NOT_BOUND:
        skipped = [*node.children_by_field_name("value"), *node.children_by_field_name("condition")]
        for child in node.named_children:
            if child not in skipped:
                yield from _bound(child)


def function_around(node: Node) -> Node | None:
    """The outermost function that a piece of code is in."""
    found = None
    while node.parent:
        node = node.parent
        found = node if node.type in FUNCTIONS else found
    return found


def _check_names(dialect: Dialect, match: Match, *texts: str) -> None:
    around = function_around(match.node)
    known = locals_of(around) if around else set()
    for text in filter(None, texts):
        for form in _patterns(dialect, text):
            used = {text_of(name) for node in form for name in identifiers(node)} & known
            if used:
                raise NotFound(f"{text!r} names a local: put a hole in its place (${min(used)})")
