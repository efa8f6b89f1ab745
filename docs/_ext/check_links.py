"""Check a built site offline: internal links lead to files and elements, and every public name has an entry.

python docs/_ext/check_links.py build/site
"""

import sys
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links and the ids of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.ids.add(value)


def broken_links(site: Path) -> Iterator[str]:
    """Yield a sentence for every broken internal link."""
    pages = {
        path.resolve(): Page(path.read_text()) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts
    }
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                yield f"{path.relative_to(site.resolve())}: no file for {link}"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                yield f"{path.relative_to(site.resolve())}: no element for {link}"


def missing_names(site: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for every name of deltazoo without an entry in its reference."""
    ids = Page((site / "api" / "deltazoo.html").read_text()).ids
    for name in names:
        if f"deltazoo.{name}" not in ids:
            yield f"api/deltazoo.html: no entry for {name}"


if __name__ == "__main__":
    import deltazoo

    site = Path(sys.argv[1])
    names = set(deltazoo.__all__) - {"conformance", "fla"}  # modules, which other pages describe
    sentences = [*broken_links(site), *missing_names(site, sorted(names))]
    if not (site / "index.html").is_file():
        sentences.append(f"{site} contains no index.html")
    sys.exit("\n".join(sentences) or None)
