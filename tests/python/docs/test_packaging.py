"""Release artifacts: an extension without debug information, its symbols in a separate file, the package's metadata."""

import csv
import hashlib
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tomllib
import zipfile
from base64 import urlsafe_b64encode

import pytest
from packaging.tags import Tag, cpython_tags
from support import ROOT, TORCH_MODE

if not TORCH_MODE:
    from rustloader import _core

pytestmark = pytest.mark.ours

RELEASE = (ROOT / ".github" / "workflows" / "release.yml").read_text()
INFO = "rustloader-0.1.0.dist-info"


def sections(path):
    """The contents of the sections of a 64-bit ELF file, by name."""
    data = pathlib.Path(path).read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, start + i * size) for i in range(count)]
    text = headers[names][4]
    nobits = 8  # SHT_NOBITS

    def content(header):
        return b"" if header[1] == nobits else data[header[4] : header[4] + header[5]]

    return {data[text + h[0] : data.index(b"\0", text + h[0])].decode(): content(h) for h in headers}


def debug_sections(names):
    return {name for name in names if name.startswith((".debug_", ".zdebug_"))}


def test_the_extension_has_no_debug_lines_but_names():
    path = pathlib.Path(_core.__file__)
    found = sections(path)
    assert not debug_sections(found), "built with another profile than `release` (make build)?"
    assert path.stat().st_size < 3 << 20
    # The names of functions remain, for backtraces.
    assert b"rustloader6engine" in found[".strtab"]


def test_each_build_strips_but_that_of_a_release():
    profiles = tomllib.loads((ROOT / "Cargo.toml").read_text())["profile"]
    assert (profiles["release"]["debug"], profiles["release"]["strip"]) == (False, "debuginfo")
    dist = dict(profiles["dist"])
    assert (dist.pop("inherits"), dist.pop("debug"), dist.pop("strip")) == ("release", "line-tables-only", "none")
    assert dist == {}, "a release must have the same code as `make build`"
    # A build by pip uses maturin's default profile, `release`.
    maturin = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["maturin"]
    assert not {"profile", "strip", "cargo-extra-args"} & maturin.keys()
    makefile = (ROOT / "Makefile").read_text()
    for text, order in (
        (makefile.split("\ndist:")[1], ("--profile dist", "split_symbols.py dist/*.whl", "pure_wheel.py")),
        (RELEASE, ("--profile dist", "split_symbols.py dist/*.whl", "pure_wheel.py")),
    ):
        places = [text.index(step) for step in order]
        assert places == sorted(places)
    assert "maturin build --release" in makefile and "maturin develop --release" in makefile


def test_symbols_are_a_part_of_a_release_and_do_not_go_to_pypi():
    publish, symbols = RELEASE.split("\n  publish:")[1].split("\n  symbols:")
    assert "pattern: dist-*" in publish and "symbols" not in publish
    assert "pattern: symbols-*" in symbols and "gh release upload" in symbols
    assert "name: symbols-linux-" in RELEASE


@pytest.fixture
def wheel(tmp_path):
    """A wheel with a small extension that has debug information."""
    source, extension = tmp_path / "small.c", tmp_path / "small.so"
    source.write_text("int small_function(int x) {\n    return x + 1;\n}\n")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or shutil.which("objcopy") is None:
        pytest.skip("needs a C compiler and objcopy (binutils)")
    options = ["-g", "-shared", "-fPIC", "-Wl,--build-id", "-o", extension, source]
    subprocess.run([compiler, *options], check=True)
    path = tmp_path / "rustloader-0.1.0-cp311-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("rustloader/__init__.py", "")
        archive.write(extension, "rustloader/_core.abi3.so")
        archive.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.4\nName: rustloader\nVersion: 0.1.0\n")
        archive.writestr(f"{INFO}/RECORD", "")
    return path


def split(path):
    command = [sys.executable, ROOT / "scripts" / "split_symbols.py", path]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_symbols_of_a_wheel_are_split_off(wheel, tmp_path):
    done = split(wheel)
    symbols = wheel.parent / "symbols" / f"{wheel.stem}.debug"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{symbols}\n", "")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed")
        assert archive.getinfo("rustloader/_core.abi3.so").external_attr >> 16 == 0o755
        rows = {row[0]: row[1:] for row in csv.reader(archive.read(f"{INFO}/RECORD").decode().splitlines())}
        assert list(rows) == names and rows.pop(f"{INFO}/RECORD") == ["", ""]
        for name, (digest, size) in rows.items():
            content = archive.read(name)
            expected = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={expected}", len(content))
    extension = tmp_path / "installed" / "rustloader" / "_core.abi3.so"
    shipped, kept = sections(extension), sections(symbols)
    assert not debug_sections(shipped) and b"small_function" in shipped[".strtab"]
    assert {".debug_line", ".debug_info"} <= debug_sections(kept)
    assert shipped[".gnu_debuglink"].startswith(symbols.name.encode() + b"\0")
    assert shipped[".note.gnu.build-id"] == kept[".note.gnu.build-id"]

    done = split(wheel)
    assert done.returncode == 1 and "has no debug information to split off: build it with --profile dist" in done.stderr

    if shutil.which("gdb") is None:
        return  # the remaining checks run gdb

    def gdb():
        command = ["gdb", "-batch", "-nx", "-ex", "info line small_function", extension]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        return done.stdout + done.stderr

    assert "small.c" not in gdb()
    shutil.copy(symbols, extension.parent)
    assert re.search(r'Line 1 of ".*small\.c"', gdb())


def test_a_wheel_without_an_extension_has_no_symbols(tmp_path):
    path = tmp_path / "rustloader-0.1.0-py3-none-win_amd64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("rustloader/__init__.py", "")
        archive.writestr(f"{INFO}/RECORD", "")
    done = split(path)
    assert done.returncode == 1 and "has 0 compiled extensions, not 1" in done.stderr


def test_the_classifiers_are_the_pythons_that_are_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    tests = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert named == sorted({*re.findall(r'"(3\.\d+)"', "\n".join(re.findall(r"python: .*", tests)))})


@pytest.mark.parametrize("version", [(3, 14), (3, 15)])
def test_free_threaded_python_takes_no_wheel(version):
    def accepts(abi):
        tags = cpython_tags(version, abis=[abi], platforms=["manylinux_2_28_x86_64"])
        return Tag("cp311", "abi3", "manylinux_2_28_x86_64") in tags

    regular = f"cp{version[0]}{version[1]}"
    assert accepts(regular) and not accepts(f"{regular}t")


# The test reads the source: PyO3 omits the slot from an extension for the stable ABI of 3.11, which no free-threaded
# Python loads. There, pip builds an extension from the sdist without the stable ABI, and that one has the slot.
def test_the_module_says_that_it_needs_the_gil():
    source = (ROOT / "src" / "python" / "mod.rs").read_text()
    assert re.findall(r"#\[pymodule(.*)\]\nmod (\w+)", source) == [("(gil_used = true)", "_core")]
    if hasattr(sys, "_is_gil_enabled"):
        assert sys._is_gil_enabled()
