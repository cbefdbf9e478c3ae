"""Complete the site: files of the repository, and links to them and to the reference.

MkDocs calls the functions whose names begin with ``on_``, see mkdocs.yml.
"""

from __future__ import annotations

import logging
import posixpath
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tables import generated

log = logging.getLogger("mkdocs.hooks.docs")  # whose warnings are errors in a strict build
ROOT = Path(__file__).resolve().parents[1]
PAGES = {  # of the repository, and their places on the site
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
}
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
ANCHOR = re.compile(r'<(?:h\d|a) id="(tilesparse\.[\w.]+)"')
NOTEBOOK_LINK = re.compile(r'(?<=href=")([^":#]+\.(?:md|ipynb))(?=["#])')
CODE = re.compile(r"<(a|pre|h\d)\b.*?</\1>|<code>([A-Za-z][\w.]*)(\(\))?</code>", re.S)


def on_files(files: Files, config: Any) -> Files:
    """Adds what pages need that lies outside of docs."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for file in [file for file in files.documentation_pages() if file.src_uri.endswith(".md")]:
        for _, target, _ in LINK.findall(file.content_string):
            place = place_of(target, file.src_uri)
            path = ROOT / place.removeprefix("source/")
            if place.startswith("source/") and path.is_file() and not files.get_file_from_path(place):
                files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Generate tables; links between files of the repository become links between those of the site."""
    here, markdown = page.file.src_uri, generated(markdown)

    def moved(link: re.Match[str]) -> str:
        place = posixpath.relpath(place_of(link[2], here), posixpath.dirname(here) or ".")
        return f"{link[1]}{place}{link[3]}"

    return LINK.sub(moved, markdown) if here.endswith(".md") else markdown


def on_env(env: Any, files: Files, **_: Any) -> Any:
    """Public names that pages write as code lead to the reference, and notebooks' links to pages."""
    pages: dict[str, Any] = {file.src_uri: file.page for file in files.documentation_pages()}
    names = references({page.url: page.content for page in pages.values()})
    for place, page in pages.items():
        if place.endswith(".md"):
            page.content = CODE.sub(partial(linked, names=names, here=page.url), page.content)
        else:
            page.content = NOTEBOOK_LINK.sub(partial(url_of, notebook=place, pages=pages), page.content)
    return env


def url_of(link: re.Match[str], notebook: str, pages: dict[str, Any]) -> str:
    """The address of a page as a notebook reaches it, which MkDocs only knows of pages in Markdown."""
    target = link[1]
    place = posixpath.normpath(posixpath.join(posixpath.dirname(notebook), target))
    if place not in pages:
        log.warning("%s: a link to %s, which is no page", notebook, target)
        return target
    return str(get_relative_url(pages[place].url, pages[notebook].url))


def linked(code: re.Match[str], names: dict[str, str], here: str) -> str:
    """The code itself, or a link around it; never within links, listings and headings."""
    target = names.get(code[2] or "")
    return f'<a href="{get_relative_url(target, here)}">{code[0]}</a>' if target else code[0]


def references(contents: dict[str, str]) -> dict[str, str]:
    """Return the spellings of public names in pages, and the places on the site that explain them.

    That is a whole name, one without ``tilesparse.``, or the last part alone, if it belongs to one thing only
    and is no plain word.
    """
    places = {name: f"{url}#{name}" for url, content in contents.items() for name in ANCHOR.findall(content)}
    last = Counter(name.rpartition(".")[2] for name in places)
    found = {}
    for name, place in places.items():
        short = name.rpartition(".")[2]
        found[name] = found[name.removeprefix("tilesparse.")] = place
        if last[short] == 1 and (re.search(r"[A-Z]|\w_\w", short)):
            found[short] = place
    return {name: place for name, place in found.items() if re.search(r"[A-Z._]", name)}


def place_of(target: str, page: str) -> str:
    """Return the place on the site of a file to which a page links, as the repository has it."""
    here = next((source for source, place in PAGES.items() if place == page), f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    return PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}")
