"""Makes README.md's relative links absolute, for a package index.

    python scripts/index_readme.py https://github.com/OWNER/NAME v0.1.0

A package index shows README.md without the other files, so relative links and pictures would be broken there. On the
hosting site, links must stay relative, so that they lead to the same branch. The repository's address is known only
where a release is built, so the release workflow runs this script on its checkout before it builds.
"""

import pathlib
import re
import sys

README = pathlib.Path(__file__).parent.parent / "README.md"
# Matches "[text](target)" or "![text](target)", unless the target is an anchor or has a scheme.
_LINK = re.compile(r"(!?\[[^\]]*\]\()(?![a-z]+:|#)([^)\s]+)\)")


def absolute(text: str, repository: str, ref: str) -> str:
    """Returns the text with absolute links to files of a repository, at a tag, branch or commit."""

    def replaced(link: re.Match[str]) -> str:
        kind = "raw" if link[1].startswith("!") else "blob"
        return f"{link[1]}{repository.rstrip('/')}/{kind}/{ref}/{link[2]})"

    return _LINK.sub(replaced, text)


if __name__ == "__main__":
    if len(sys.argv) != 3 or not re.match(r"https://\S+$", sys.argv[1]):
        sys.exit(f"usage: {sys.argv[0]} https://HOST/OWNER/NAME TAG")
    README.write_text(absolute(README.read_text(), sys.argv[1], sys.argv[2]))
