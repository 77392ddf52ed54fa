"""Moves the debug information of a wheel's extension into a separate file.

    python scripts/split_symbols.py dist/rustloader-*-linux_x86_64.whl

The wheel must have been built with `--profile dist`. It is rewritten in place: function names stay in the wheel, and
line numbers move to `symbols/WHEEL.debug` next to it. gdb finds that file if it is next to the installed
`_core.abi3.so`; `symbol-file PATH` loads it from elsewhere. Uses Rust's objcopy, which knows all architectures, or that
of binutils.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

from pure_wheel import write_wheel


def split(wheel: pathlib.Path) -> pathlib.Path:
    """Rewrites the wheel, writes the debug file, and returns the path of that file.

    Raises:
        ValueError: the wheel does not have exactly one extension, or the extension has no debug information.
    """
    with zipfile.ZipFile(wheel) as archive:
        contents = {item: archive.read(item) for item in archive.namelist() if not item.endswith("/")}
    extensions = [item for item in contents if re.search(r"/_core\.[^/]*so$", item)]
    if len(extensions) != 1:
        raise ValueError(f"{wheel} has {len(extensions)} compiled extensions, not 1")
    if b".debug_line" not in contents[extensions[0]]:
        raise ValueError(f"{wheel} has no debug information to split off: build it with --profile dist")
    symbols = wheel.parent / "symbols" / f"{wheel.stem}.debug"
    symbols.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        extension = pathlib.Path(folder, "extension.so")
        extension.write_bytes(contents[extensions[0]])
        _objcopy("--only-keep-debug", "--compress-debug-sections=zlib", extension, symbols)
        # The debug link contains the debug file's name and checksum.
        _objcopy("--strip-debug", f"--add-gnu-debuglink={symbols}", extension)
        contents[extensions[0]] = extension.read_bytes()
    symbols.chmod(0o644)
    write_wheel(wheel, contents)
    return symbols


def _objcopy(*arguments: str | pathlib.Path) -> None:
    subprocess.run([_program(), *arguments], check=True)


def _program() -> str | pathlib.Path:
    if shutil.which("rustc"):
        sysroot = subprocess.run(["rustc", "--print", "sysroot"], check=True, capture_output=True, text=True).stdout
        for program in pathlib.Path(sysroot.strip()).glob("lib/rustlib/*/bin/rust-objcopy"):
            return program
    return "objcopy"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} WHEEL ...")
    for wheel in sys.argv[1:]:
        print(split(pathlib.Path(wheel)))
