"""Makes README.md's relative links absolute, for a package index.

    python scripts/index_readme.py https://github.com/OWNER/NAME v0.1.0

An index shows README.md without the files beside it, so that relative links and pictures lead nowhere there. On the
hosting site they have to stay relative, to lead to the same branch. And the address of the repository is known only
where a release is built: so the release's workflow runs this on its own checkout, before it builds.
"""

import pathlib
import re
import sys

README = pathlib.Path(__file__).parent.parent / "README.md"
# The "[text](target)" of a link, or "![text](target)" of a picture, without those that name a scheme or an anchor.
_LINK = re.compile(r"(!?\[[^\]]*\]\()(?![a-z]+:|#)([^)\s]+)\)")


def absolute(text: str, repository: str, ref: str) -> str:
    """The text with absolute links to the files of a repository, at a tag, branch or commit."""

    def replaced(link: re.Match[str]) -> str:
        kind = "raw" if link[1].startswith("!") else "blob"
        return f"{link[1]}{repository.rstrip('/')}/{kind}/{ref}/{link[2]})"

    return _LINK.sub(replaced, text)


if __name__ == "__main__":
    if len(sys.argv) != 3 or not re.match(r"https://\S+$", sys.argv[1]):
        sys.exit(f"usage: {sys.argv[0]} https://HOST/OWNER/NAME TAG")
    README.write_text(absolute(README.read_text(), sys.argv[1], sys.argv[2]))
