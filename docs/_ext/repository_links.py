"""Sphinx extension: pages that the site shares with the repository link to files; here such a link leads to a page."""

import re

from sphinx.application import Sphinx

PAGES = {
    "backends/triton/README.md": "kernel-map.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def rewrite(app: Sphinx, name: str, source: list[str]) -> None:
    folder = "../" * name.count("/")
    for path, page in PAGES.items():
        source[0] = re.sub(rf"\]\((?:\.\./)+{re.escape(path)}\)", f"]({folder}{page})", source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", rewrite)
    return {"parallel_read_safe": True}
