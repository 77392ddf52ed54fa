"""The product's sources as syntax trees: where each function, class and constant is, and which names are local."""

import difflib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tree_sitter_python
import tree_sitter_rust
from tree_sitter import Language, Node, Parser

ROOT = Path(__file__).resolve().parents[2]

FUNCTIONS = ("function_definition", "function_item")


class NotFound(Exception):
    """A name or pattern does not match exactly one place. The text says how to fix it."""


@dataclass(frozen=True, eq=False)
class Dialect:
    """The differences between the languages."""

    folder: str
    suffix: str
    separator: str
    parser: Parser
    # Contexts in which a pattern is parsed; it takes the place of §.
    frames: tuple[str, ...]
    # Node types that name a place, with the field that holds the name.
    places: dict[str, str]
    # The replacement of a dropped statement.
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
    # The path of each class, function and constant, and its node. A path may occur twice.
    places: list[tuple[tuple[str, ...], Node]]


def walk(node: Node) -> Iterator[Node]:
    left = [node]
    while left:
        node = left.pop()
        yield node
        left += reversed(node.children)


def text_of(node: Node) -> str:
    return (node.text or b"").decode()


def is_code(dialect: Dialect, text: str) -> bool:
    """Whether a file parses."""
    return not dialect.parser.parse(text.encode()).root_node.has_error


# --- places -----------------------------------------------------------------------------------------------------------


@functools.cache
def sources(dialect: Dialect, root: Path = ROOT) -> list[Source]:
    """Returns all product sources of a language as of the first call, without Rust's test modules."""
    folder = root / dialect.folder
    files = sorted(path for path in folder.rglob(f"*{dialect.suffix}") if path.stem != "tests")
    return [_parse(dialect, path.relative_to(root).as_posix(), path.read_bytes()) for path in files]


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
    """Returns the places whose path ends with ``at``, or all files if ``at`` is empty."""
    files = sources(dialect, root)
    if not at:
        return [(source, source.root) for source in files]
    wanted = tuple(at.split(dialect.separator))
    places = [(s, node) for s in files for path, node in s.places if path[-len(wanted) :] == wanted]
    if not places:
        known = {path[-1]: dialect.separator.join(path) for s in files for path, _ in s.places if path}
        near = ", ".join(known[name] for name in difflib.get_close_matches(wanted[-1], known, 3)) or "none"
        raise NotFound(f"nothing in {dialect.folder} is called {at}; similar names: {near}")
    return places


# --- names of locals --------------------------------------------------------------------------------------------------

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
# Nodes whose names are not bound: a field, a type, a default, a method.
_NOT_BOUND = ("attribute", "subscript", "type", "scoped_identifier", "call")


def identifiers(node: Node) -> Iterator[Node]:
    """Yields the names in a piece of code, except those of fields, arguments and functions."""
    if node.type in ("identifier", "shorthand_field_identifier"):
        yield node
    fields = {"attribute": "attribute", "keyword_argument": "name", **dict.fromkeys(FUNCTIONS, "name")}
    skipped = node.child_by_field_name(fields[node.type]) if node.type in fields else None
    before = ""
    for child in node.children:
        # In the arguments of a Rust macro, a field is an identifier after a dot.
        if child != skipped and child.type != "scoped_identifier" and before != ".":
            yield from identifiers(child)
        before = child.type


def locals_of(function: Node) -> set[str]:
    """Returns the names that a function binds, including its parameters."""
    bound: set[str] = set()
    for node in walk(function):
        for field in _BINDERS.get(node.type, ()):
            for target in node.children_by_field_name(field):
                bound.update(_bound(target))
    return {name for name in bound if name not in ("self", "cls") and name[0].islower()}


def _bound(node: Node) -> Iterator[str]:
    if node.type in ("identifier", "shorthand_field_identifier"):
        yield text_of(node)
    elif node.type not in _NOT_BOUND:
        skipped = [*node.children_by_field_name("value"), *node.children_by_field_name("condition")]
        for child in node.named_children:
            if child not in skipped:
                yield from _bound(child)


def function_around(node: Node) -> Node | None:
    """Returns the outermost function that contains a piece of code."""
    function = None
    while node.parent:
        node = node.parent
        function = node if node.type in FUNCTIONS else function
    return function
