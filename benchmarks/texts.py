"""Collect kinds of English text from Debian packages, to recover language models with and to judge them on.

    mkdir root
    apt-get download anarchism debian-handbook debian-reference-en debian-history debian-faq git-doc \\
        developers-reference harden-doc postgresql-doc-15 perl-doc manpages manpages-dev dict-foldoc \\
        dict-gcide jargon-text fortunes fortunes-min fortunes-bofh-excuses r-cran-tm r-cran-janeaustenr
    apt-get download wesnoth-1.16-{did,dm,dw,ei,httt,l,low,nr,sof,sota,sotbe,thot,trow,tsg,utbs}
    for package in *.deb; do dpkg -x $package root; done
    python benchmarks/texts.py --root root --output texts

Writes ``OUTPUT/training/KIND.txt`` and ``OUTPUT/held_out/KIND.txt``, in which form feeds separate documents.
The kinds that are held out are fixed here, before any training: news, novels, and a reference manual.
Licences are those of the packages, in root/usr/share/doc; the news are 70 articles of Reuters-21578, the
novels Jane Austen's, and the reference is Python's.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import html
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

LARGEST = 8 << 20  # characters of a kind
SHORTEST = 200  # characters of a document
MARKUP = re.compile(r"<(script|style|head)\b.*?</\1>|<[^>]*>", re.S | re.I)
ROFF = re.compile(r"\\f[BIRP]|\\f\(..|\\[&|^]|\\s[-+]?\d")
SPEECH = re.compile(
    r'(?:speaker|id)\s*=\s*([^\n"]+?)\s*$|message\s*=\s*_\s*"([^"]*)"|story\s*=\s*_\s*"([^"]*)"', re.M
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="where the packages are unpacked")
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    arguments = parser.parse_args()
    share, library = arguments.root / "usr/share", arguments.root / "usr/lib/R/site-library"
    training: dict[str, Callable[[], Iterable[str]]] = {
        "essays": lambda: pages(share / "doc/anarchism/markdown", "*.md*", plain=True),
        "guides": lambda: guides(share / "doc"),
        "database": lambda: pages(share / "doc/postgresql-doc-15/html", "*.html"),
        "manuals": lambda: manuals(share),
        "dictionaries": lambda: dictionaries(share),
        "conversation": lambda: conversations(share / "games"),
    }
    held_out: dict[str, Callable[[], Iterable[str]]] = {
        "news": lambda: news(library / "tm/texts"),
        "novels": lambda: novels(library / "janeaustenr/data/Rdata.rdb"),
        "reference": lambda: [topics[name] for name in sorted(topics)],
    }
    for part, kinds in (("training", training), ("held_out", held_out)):
        for kind, documents in kinds.items():
            write(arguments.output / part / f"{kind}.txt", documents())
    return 0


def write(file: Path, documents: Iterable[str]) -> None:
    """Write those documents of a kind that are long enough, in random order."""
    found = [text.replace("\f", "\n").strip() for text in documents]
    found = [text for text in dict.fromkeys(found) if len(text) >= SHORTEST]
    if not found:
        raise SystemExit(f"--root must have the package of {file.stem}: nothing was found")
    random.Random(0).shuffle(found)
    kept, size = [], 0
    for text in found:
        kept.append(text)
        size += len(text)
        if size > LARGEST:
            break
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\f".join(kept))
    print(f"{file}: {len(kept)} of {len(found)} documents, {size / 1e6:.2f} M characters")


def read(file: Path) -> str:
    """Return the text of a file, which may be compressed."""
    raw = file.read_bytes()
    if file.suffix in (".gz", ".dz"):
        raw = gzip.decompress(raw)
    return raw.decode(errors="ignore")


def pages(folder: Path, names: str, plain: bool = False) -> Iterator[str]:
    for file in sorted(folder.rglob(names)):
        text = read(file)
        yield text if plain else without_markup(text)


def without_markup(text: str) -> str:
    """Return what a page of HTML says, a paragraph per line or block of lines."""
    text = html.unescape(MARKUP.sub("", text))
    return re.sub(r"\n\s*\n+", "\n\n", re.sub(r"[ \t]+", " ", text)).strip()


def guides(folder: Path) -> Iterator[str]:
    """Yield English pages of Debian's books."""
    books = ("debian-handbook/html/en-US", "harden-doc/html/en-US", "developers-reference", "debian-history")
    for book in (*books, "debian-reference-common", "debian-reference-en", "debian-faq", "git-doc"):
        for file in sorted((folder / book).rglob("*.html")):
            if is_english(file.name):
                yield without_markup(read(file))


def is_english(name: str) -> bool:
    """Return False for pages such as index.de.html."""
    language = re.search(r"\.([a-z]{2}(?:[-_][A-Za-z]+)?)\.html$", name)
    return language is None or language[1] == "en"


def manuals(share: Path) -> Iterator[str]:
    for file in sorted((share / "man").rglob("*.gz")):
        if re.fullmatch(r"man\d\w*", file.parent.name) and file.parent.parent.name == "man":
            yield without_roff(read(file))
    for file in sorted((share / "perl").rglob("*.pod")):
        yield re.sub(r"^=\w+ ?|[A-Z]<+ ?([^<>]*?) ?>+", r"\1", read(file), flags=re.M)


def without_roff(text: str) -> str:
    """Return the words of a manual page, without requests but for the text of headings and fonts."""
    lines = []
    for line in text.splitlines():
        if line.startswith((".\\", "'\\")):
            continue
        if line.startswith((".SH ", ".SS ", ".B ", ".I ", ".BR ", ".IR ", ".BI ", ".RB ", ".TP")):
            line = line.partition(" ")[2].replace('"', "")
        elif line.startswith((".PP", ".P", ".LP")):
            line = ""
        elif line.startswith((".", "'")):
            continue
        lines.append(ROFF.sub("", line).replace("\\-", "-").replace("\\e", "\\").replace("\\(aq", "'"))
    return "\n".join(lines)


def dictionaries(share: Path) -> Iterator[str]:
    """Yield entries, about twenty to a document."""
    for file in sorted((share / "dictd").glob("*.dict.dz")):
        entries = re.split(r"\n(?=\S)", read(file))
        for start in range(0, len(entries), 20):
            yield "\n".join(entries[start : start + 20])
    jargon = re.split(r"\n\n(?=\S)", read(share / "doc/jargon-text/jargon.txt.gz"))
    for start in range(0, len(jargon), 20):
        yield "\n\n".join(jargon[start : start + 20])


def conversations(games: Path) -> Iterator[str]:
    """Yield what people say to each other in a game's stories, and collected sayings."""
    for file in sorted(games.rglob("*.cfg")):
        speaker, said = "", []
        for name, message, story in SPEECH.findall(file.read_text(errors="ignore")):
            speaker = name or speaker
            if message or story:
                said.append(f"{speaker}: {message}" if message else story)
        if len(said) > 3:
            yield "\n\n".join(said)
    for file in sorted((games / "fortunes").glob("*.u8")):
        sayings = read(file).split("\n%\n")
        for start in range(0, len(sayings), 20):
            yield "\n\n".join(sayings[start : start + 20])


def news(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*/reut-*.xml")):
        text = read(file)
        parts = [re.search(rf"<{tag}>(.*?)</{tag}>", text, re.S) for tag in ("TITLE", "BODY")]
        yield html.unescape("\n".join(part[1] for part in parts if part is not None))


def novels(file: Path) -> Iterator[str]:
    """Yield novels, a hundred paragraphs to a document, from R's database of serialized lines."""
    raw, place, lines = file.read_bytes(), 0, list[str]()
    while (place := raw.find(b"\x78\x9c", place)) >= 0:  # where a compressed object may begin
        with contextlib.suppress(zlib.error):
            lines += strings(zlib.decompressobj().decompress(raw[place:]))
        place += 2
    paragraphs = "\n".join(lines).split("\n\n")
    for start in range(0, len(paragraphs), 100):
        yield "\n\n".join(paragraphs[start : start + 100])


def strings(stream: bytes) -> list[str]:
    """Return all strings of a serialized object: four bytes of flags that end with 9, four of length."""
    found, place = [], 0
    while (place := stream.find(b"\x00\x04\x00\x09", place)) >= 0:
        length = int.from_bytes(stream[place + 4 : place + 8], "big")
        if length > 1 << 16:  # these bytes were something else
            place += 1
            continue
        found.append(stream[place + 8 : place + 8 + length].decode(errors="ignore"))
        place += 8 + length
    return found


if __name__ == "__main__":
    raise SystemExit(main())
