"""The documentation: its Python runs, its commands and options exist, and its links resolve.

Every block of code names its language. `python` runs, each page in its own process, with the names of docs_given.py.
`sh` is checked command by command. `text` is not code (output, a drawing). A block that cannot be tested begins with
`# Needs ...`, so that readers see the reason, and is skipped here with that reason.
"""

import functools
import re
import shlex
import subprocess
import sys
import tomllib
from typing import NamedTuple

import pytest
from support import ROOT, run_script

from rustloader.tools.cli import parser

pytestmark = pytest.mark.ours

FOLDERS = (
    "*.md",
    "docs/**/*.md",
    "examples/*.md",
    ".github/**/*.md",
    "benches/*.md",
    "src/**/*.md",
    "python/**/*.md",
    "tests/README.md",
)
PAGES = {str(path.relative_to(ROOT)): path for folder in FOLDERS for path in sorted(ROOT.glob(folder))}
LANGUAGES = {"python", "sh", "text"}
NOT_RUN = "# Needs "
# Torch's warning on a page that starts more workers than this machine has cores.
MANY_WORKERS = "'ignore', 'This DataLoader will create', UserWarning"
# Python's warning about a fork while another thread runs, such as the metrics thread.
THREADS = "'ignore', '.*multi-threaded', DeprecationWarning"
# Commands of other packages, which are not checked.
OTHER_COMMANDS = {"git", "cd", "conda"}
# Variables of the C library.
LIBC_VARIABLES = {"MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"}
# Placeholders for the reader's own files and modules.
PLACEHOLDERS = {"train.py", "mypackage.train", "mypackage.data:train_loader", "train.py:make_loader"}


class Block(NamedTuple):
    page: str
    line: int  # of its first line, from 1
    language: str
    text: str

    @property
    def not_run(self):
        first = self.text.partition("\n")[0]
        return first.removeprefix(NOT_RUN) if first.startswith(NOT_RUN) else None


def blocks(page):
    """The fenced blocks of a page. The remaining lines are not code, whatever they look like."""
    result, opening = [], None
    for number, line in enumerate(PAGES[page].read_text().splitlines(), 1):
        fence = re.fullmatch(r"( *)(`{3,}|~{3,})\s*(.*)", line)
        if opening is None and fence:
            opening, body = (number, *fence.groups()), []
        elif opening and fence and fence[2].startswith(opening[2]) and not fence[3]:
            result.append(Block(page, opening[0] + 1, opening[3].split(" ")[0], "".join(body)))
            opening = None
        elif opening:
            body.append(line.removeprefix(opening[1]) + "\n")
    assert opening is None, f"{page}:{opening[0]}: an unclosed fence"
    return result


BLOCKS = [block for page in PAGES for block in blocks(page)]


def place(block):
    return f"{block.page}:{block.line}"


def test_every_block_says_what_it_is():
    unknown = [f"{place(b)}: {b.language!r}" for b in BLOCKS if b.language not in LANGUAGES]
    assert not unknown, f"{unknown}; a block is one of {sorted(LANGUAGES)}"
    assert {block.language for block in BLOCKS} == LANGUAGES
    assert not [b for b in BLOCKS if b.language == "text" and b.not_run is not None]


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.not_run is not None], ids=place)
def test_a_block_that_is_not_run_says_why(block):
    assert block.not_run.endswith("."), "a reason is a sentence"
    pytest.skip(f"needs {block.not_run}")


# Python


def page_script(page):
    """The Python of a page as one script that keeps the line numbers of the page."""
    lines = [""] * len(PAGES[page].read_text().splitlines())
    lines[0] = (
        f"import warnings; warnings.simplefilter('error'); warnings.filterwarnings({MANY_WORKERS}); "
        f"warnings.filterwarnings({THREADS}); "
        "import multiprocessing; multiprocessing.set_start_method('fork', force=True); "  # pages have no main guard
        "from docs_given import *"
    )
    for block in (b for b in blocks(page) if b.language == "python" and b.not_run is None):
        body = block.text.splitlines()
        lines[block.line - 1 : block.line - 1 + len(body)] = body
    return "\n".join(lines) + "\n"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if any(b.language == "python" for b in blocks(page))])
def test_the_python_of_a_page_runs(page, tmp_path):
    script = tmp_path / (page.replace("/", "_").replace(".", "_") + ".py")
    status, out, err = run_script(page_script(page), 550, file=script, head="", fresh=False, cwd=tmp_path)
    # The loader does not log anything either.
    assert (status, err) == (0, ""), f"{page}\n{out}{err}"


# Commands


def commands(block):
    """The commands of a shell block, as lists of words."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        command = []
        for word in [*words, ";"]:
            if word in ("&&", "||", "|", ";"):
                if command:
                    yield command
                command = []
            else:
                command.append(word)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "sh" and b.not_run is None], ids=place)
def test_the_commands_of_a_block_exist(block):
    parsed = list(commands(block))
    assert parsed
    for words in parsed:
        check_command(words)


def check_command(words):
    while (variable := re.match(r"([A-Za-z_]+)=", words[0])) is not None:
        assert variable[1] in known_variables() | LIBC_VARIABLES, variable[1]
        words = words[1:]
    name, *rest = words
    if name in OTHER_COMMANDS:
        return
    if name == "make":
        check_make(rest)
    elif name == "pip":
        check_pip(rest)
    elif name == "uv":
        assert rest[0] == "pip", words
        check_pip(rest[1:])
    elif name == "rustloader":
        check_rustloader(rest)
    elif name in ("python", "torchrun", "accelerate"):
        starts = [k for k in range(len(rest)) if rest[k : k + 2] == ["-m", "rustloader"]]
        if starts:
            check_launcher(name, rest[: starts[0]])
            check_rustloader(rest[starts[0] + 2 :])
        else:
            assert name == "python" and is_file(rest[0]), words
            check_script(rest)
    else:
        raise AssertionError(f"no check for {words}")


# The changelog names targets of earlier versions.
@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_the_make_targets_in_the_text_exist(page):
    for command in re.findall(r"`(make [^`\n]+)`", PAGES[page].read_text()):
        words = [word for word in shlex.split(command)[1:] if word != "..." and not word.startswith("ARGS=")]
        check_make(words)


MAKEFILE = (ROOT / "Makefile").read_text()
KINDS = {name.lower(): re.findall(rf"^{name}\.([a-z-]+) :=", MAKEFILE, re.MULTILINE) for name in ("STRESS", "COMPARE")}


def check_make(words):
    targets = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
    for word in words:
        variable, equals, value = word.partition("=")
        if variable == "KIND":
            assert value in ["help", *KINDS[words[0]]], words
        else:
            variables = ("JOBS", "LANE", "PYTHON", "SINCE", "START_METHOD", "TORCH")
            assert variable in variables if equals else word in targets, word


def check_pip(words):
    assert words[0] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words[1:]:
        match = re.fullmatch(r"(\.|rustloader)(?:\[(.*)\])?", word)
        assert match and set((match[2] or "").split(",")) <= {"", *extras}, word


def check_launcher(name, words):
    if name == "torchrun":
        options = known_options("torch.distributed.run")
        assert {word.partition("=")[0] for word in words if word.startswith("-")} <= options, words
    else:
        assert words == {"python": [], "accelerate": ["launch"]}[name]


def check_rustloader(words):
    """Checks the words after `python -m rustloader`."""
    if words[0].startswith("-"):
        assert words[0] in ("--help", "--version"), words
        return
    command, *rest = words
    own, script_words = parser.script_arguments(words) if command in ("run", "trace") else (words, [])
    options = {word.partition("=")[0] for word in own[1:] if word.startswith("-")}
    assert options <= known_options("rustloader", command) | {"-m"}, words
    if command in ("doctor", "top") or "--help" in words or own[-1] == "merge":
        return
    # The other words are values of options.
    assert any(map(is_file, rest)), f"{words}: name a file, or one of {sorted(PLACEHOLDERS)}"
    if command in ("run", "trace"):
        check_script([own[-1], *script_words])


def is_file(name):
    return name in PLACEHOLDERS or (ROOT / name).is_file()


def check_script(words):
    """Checks that a script of the repository accepts its options."""
    script, *rest = words
    if script not in PLACEHOLDERS:
        source = (ROOT / script).read_text()
        # Options that scripts share are defined in modules next to them, and in the harness.
        siblings = (ROOT / script).parent.glob("*.py")
        files = [path for path in siblings if re.search(rf"^(from|import) {path.stem}\b", source, re.M)]
        files += (ROOT / "benches/harness").glob("*.py") if "from harness" in source else []
        source += "".join(path.read_text() for path in files)
        assert all(word.partition("=")[0] in source for word in rest if word.startswith("-")), words


@functools.cache
def known_options(module, *command):
    done = subprocess.run([sys.executable, "-m", module, *command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", done.stdout))


@functools.cache
def known_variables():
    """The environment variables that the sources name."""
    sources = [*ROOT.glob("python/**/*.py"), *ROOT.glob("src/**/*.rs")]
    return {name for path in sources for name in re.findall(r"RUSTLOADER_[A-Z_]+", path.read_text())}


# Links


def without_code(text):
    text = re.sub(r"^( *)(```|~~~).*?^\1\2 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(path):
    """The anchors of a page's headings, as GitHub builds them in the root, and mkdocs in docs/."""
    result = set()
    text = re.sub(r"^( *)(```|~~~).*?^\1\2 *$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for title in re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower()
        result.add(re.sub(r"[-\s]+", "-", slug) if path.parent == ROOT / "docs" else slug.replace(" ", "-"))
    return result | set(re.findall(r"^::: (\S+)", text, re.MULTILINE))  # mkdocstrings gives each object an anchor


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    source = PAGES[page]
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(source.read_text())):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        path = (source.parent / file).resolve() if file else source
        assert path.exists() and path.is_relative_to(ROOT), f"{page}: {target}"
        assert not anchor or anchor in anchors(path), f"{page}: {target}: no such heading"


def test_the_site_has_every_page():
    """mkdocs checks this too (`make docs`), but it is not always installed."""
    nav = re.search(r"^nav:\n((?: +- .*\n)+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)[1]
    assert sorted(re.findall(r": (\S+\.md)$", nav, re.MULTILINE)) == sorted(
        str(path.relative_to(ROOT / "docs")) for path in PAGES.values() if path.parent == ROOT / "docs"
    )
