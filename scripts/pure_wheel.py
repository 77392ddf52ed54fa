"""Makes the wheel for macOS and Windows from a Linux wheel: the same files without the compiled extension.

    python scripts/pure_wheel.py dist/rustloader-*-manylinux_*_x86_64.whl

The new wheel is tagged for these two systems only. If it were tagged for any system, pip would install it on a Linux
machine without a matching compiled wheel, instead of building from the sdist.
"""

import base64
import hashlib
import pathlib
import re
import sys
import zipfile

TAGS = ("py3-none-macosx_10_9_universal2", "py3-none-win32", "py3-none-win_amd64", "py3-none-win_arm64")
PLATFORMS = ".".join(tag.rpartition("-")[2] for tag in TAGS)


def pure(linux: pathlib.Path) -> pathlib.Path:
    """Writes the pure wheel next to the Linux wheel, and returns its path.

    Raises:
        ValueError: the Linux wheel has no compiled extension.
    """
    name, version = linux.name.split("-")[:2]
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(linux) as wheel:
        contents = {item: wheel.read(item) for item in wheel.namelist() if not item.endswith("/")}
    # The software bill of materials lists the crates that are compiled into the extension.
    dropped = [item for item in contents if re.search(r"/_core\.[^/]*so$", item) or item.startswith(f"{info}/sboms/")]
    if not any(item.endswith(".so") for item in dropped):
        raise ValueError(f"{linux} has no compiled extension")
    for item in dropped:
        del contents[item]
    contents[f"{info}/WHEEL"] = _wheel_file(contents[f"{info}/WHEEL"].decode()).encode()
    path = linux.with_name(f"{name}-{version}-py3-none-{PLATFORMS}.whl")
    write_wheel(path, contents)
    return path


def write_wheel(path: pathlib.Path, contents: dict[str, bytes]) -> None:
    """Writes a wheel that contains these files and a new RECORD."""
    (record,) = (item for item in contents if item.endswith(".dist-info/RECORD"))
    # RECORD becomes the last file of the wheel, as the wheel specification recommends.
    del contents[record]
    contents[record] = _record(contents, record).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for item, content in contents.items():
            # The date is fixed, so that the same sources give the same bytes.
            entry = zipfile.ZipInfo(item, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if item.endswith(".so") else 0o644) << 16
            wheel.writestr(entry, content)


def _wheel_file(text: str) -> str:
    kept = [line for line in text.splitlines() if line and not line.startswith(("Tag:", "Root-Is-Purelib:"))]
    return "\n".join([*kept, "Root-Is-Purelib: true", *(f"Tag: {tag}" for tag in TAGS)]) + "\n"


def _record(contents: dict[str, bytes], itself: str) -> str:
    lines = []
    for item, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{item},sha256={digest},{len(content)}\n")
    return "".join(lines) + f"{itself},,\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} WHEEL")
    print(pure(pathlib.Path(sys.argv[1])))
