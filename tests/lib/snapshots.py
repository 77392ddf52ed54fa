"""Texts of commands, as files that a reader can compare: `RENEW_SNAPSHOTS=1 pytest tests/python/tools` writes them."""

import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "python" / "tools" / "snapshots"


def check(name, texts):
    """Compares texts with those of `snapshots/NAME.txt`, each after its title. Replace what differs between runs, such
    as pids, before the call."""
    file = FOLDER / f"{name}.txt"
    single = all("\n" not in text for text in texts.values())
    form = "{}: {}\n" if single else "== {} ==\n{}\n"
    text = "".join(form.format(title, text.rstrip()) for title, text in texts.items())
    if os.environ.get("RENEW_SNAPSHOTS"):
        file.write_text(text)
    assert text == file.read_text(), f"{file} differs; `git diff` after RENEW_SNAPSHOTS=1 shows how"
