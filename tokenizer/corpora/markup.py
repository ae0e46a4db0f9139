"""From the files of packages to paragraphs of plain text: HTML, man pages, POD, dictionaries, SWORD, JSON, text.

A paragraph is one string without line breaks, its blanks squeezed. Scripts, navigation and tables' frames go.
"""

from __future__ import annotations

import gzip
import html
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from selectolax.lexbor import LexborHTMLParser

VERSES = 800

Files = Iterator[tuple[str, bytes]]
"""Path and contents of each file of a package."""

_DROPPED = """
script style nav header footer svg math select button form iframe noscript template textarea title
"""
_INLINE = """
a abbr acronym b bdi bdo big cite code data del dfn em font i ins kbd label mark q s samp small span strike strong sub
sup time tt u var wbr
app gui guiseq key keyseq cmd file link
divinename foreign hi reference scripref seg transchange w
"""  # the last two lines: Mallard's, of GNOME's help, and SWORD's


def documents(files: Files) -> Iterator[list[str]]:
    """Each file that is text, as its paragraphs; an entry of a dictionary is a paragraph of one document.

    Files that are not text, and those that do not hold what their name says, are passed over.
    """
    sword: dict[str, bytes] = {}
    for path, raw in files:
        name = PurePosixPath(path)
        if "/sword/modules/" in path:
            sword[path] = raw
            continue
        if name.suffix in (".gz", ".dz"):
            try:
                raw = gzip.decompress(raw)
            except (OSError, EOFError, zlib.error):
                continue
        reader = _reader(path.removesuffix(name.suffix) if name.suffix in (".gz", ".dz") else path)
        if reader:
            yield from reader(raw)
    yield from _sword(sword)


def _reader(path: str) -> Callable[[bytes], Iterator[list[str]]] | None:
    if "/man/man" in path:
        return _man
    if "/games/fortunes/" in path and "." not in PurePosixPath(path).name:
        return _fortunes
    if "/speeches/" in path and path.endswith(".txt"):
        return _text
    return _READERS.get(PurePosixPath(path).suffix.lower())


_BLANK_LINES = re.compile(r"\n[^\S\n]*\n")


def squeeze(text: str) -> str:
    return " ".join(text.split())


def _html(raw: bytes) -> Iterator[list[str]]:
    yield html_paragraphs(raw.decode("utf-8", "replace"))


def html_paragraphs(text: str) -> list[str]:
    """Of HTML, or of XML with paragraphs like HTML's: a block element's own text is a paragraph.

    Blank lines part it too, for the sake of <pre>, which holds prose as well as code.
    """
    tree = LexborHTMLParser(text)
    if tree.body is None:
        return []
    tree.strip_tags(_DROPPED.split())
    tree.unwrap_tags(_INLINE.split())
    tree.merge_text_nodes()
    text = tree.body.text(separator="\n\n").replace("\r\n", "\n")
    return [squeeze(part) for part in _BLANK_LINES.split(text)]


def _text(raw: bytes) -> Iterator[list[str]]:
    """Paragraphs have blank lines between them."""
    text = raw.decode("utf-8", "replace").replace("\r\n", "\n")
    yield [squeeze(part) for part in _BLANK_LINES.split(text)]


_PRONUNCIATION = re.compile(r"\\[^\\\n]{1,60}\\ ?")


def _dictionary(raw: bytes) -> Iterator[list[str]]:
    """Entries begin at the margin, or after a blank line. {} marks a reference, \\ a pronunciation, [] a remark."""
    text = raw.decode("utf-8", "replace").replace("[1913 Webster]", "")
    text = _PRONUNCIATION.sub("", text).translate(dict.fromkeys(map(ord, "{}[]")))
    yield [squeeze(part) for part in re.split(r"\n\s*\n|\n(?=\S)", text)]


def _fortunes(raw: bytes) -> Iterator[list[str]]:
    yield [squeeze(part) for part in raw.decode("utf-8", "replace").split("\n%\n")]


_POD_CODE = re.compile(r"[A-Z](?:<<+\s+(.*?)\s+>>+|<([^<>]*)>)")


def _pod(raw: bytes) -> Iterator[list[str]]:
    """Indented paragraphs are code, those that begin with = are commands."""
    paragraphs = []
    for part in _BLANK_LINES.split(raw.decode("utf-8", "replace")):
        if part[:1] in ("=", " ", "\t"):
            continue
        for _ in range(3):  # codes nest
            part = _POD_CODE.sub(lambda found: found[1] or found[2] or "", part)
        paragraphs.append(squeeze(part))
    yield paragraphs


_ROFF_ESCAPE = re.compile(r"\\f(?:\[\w*\]|\(\w\w|\w)|\\s[+-]?\d|\\[&|^/,:%]|\\\*\(..|\\\".*")
_ROFF_CHARACTERS = {r"\-": "-", r"\e": "\\", r"\(aq": "'", r"\(em": "--", r"\(bu": "", r"\ ": " ", r"\~": " "}
_ROFF_BREAK = "P PP LP TP IP SH SS HP sp br RS RE Pp Sh Ss It Bl El TH Dd Dt Os nf fi Bd Ed EX EE"
_ROFF_FONT = "B I BR BI IB IR RB RI SM SB Nm Ar Fl Pa Xr Em Sy Va Vt Fn Fa Dv Ev Cm Ic Li Ql Dq Sq"
_ROFF_BREAKS, _ROFF_FONTS = (
    re.compile(rf"\.\s*(?:{'|'.join(names.split())})(?:\s+|$)") for names in (_ROFF_BREAK, _ROFF_FONT)
)


def _man(raw: bytes) -> Iterator[list[str]]:
    """A man page in roff's man or mdoc macros, as far as running text goes."""
    paragraphs: list[list[str]] = [[]]
    code = False
    for line in raw.decode("utf-8", "replace").splitlines():
        if line.startswith((".nf", ".EX", ".Bd")):
            code = True
        elif line.startswith((".fi", ".EE", ".Ed")):
            code = False
        if _ROFF_BREAKS.match(line) or not line.strip():
            paragraphs.append([])
        elif line.startswith((".", "'")):
            words = _ROFF_FONTS.sub("", line)
            if words != line:
                paragraphs[-1].append(_roff(words.replace('"', "")))
        elif not code:
            paragraphs[-1].append(_roff(line))
    yield [squeeze(" ".join(lines)) for lines in paragraphs]


def _roff(line: str) -> str:
    line = _ROFF_ESCAPE.sub("", line)
    for escape, character in _ROFF_CHARACTERS.items():
        line = line.replace(escape, character)
    return line


def _json(raw: bytes) -> Iterator[list[str]]:
    """The descriptions in an SDK's service model; those of botocore are HTML."""
    paragraphs: list[str] = []

    def walk(value: object) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if isinstance(inner, str) and key in ("documentation", "description"):
                    found = html_paragraphs(inner) if inner.startswith("<") else [squeeze(html.unescape(inner))]
                    paragraphs.extend(found)
                else:
                    walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    try:
        walk(json.loads(raw))
    except (ValueError, RecursionError):
        return
    yield paragraphs


def _sword(files: dict[str, bytes]) -> Iterator[list[str]]:
    """SWORD modules: zlib blocks that an index of (offset, size, size unpacked) finds, in XML; a block is a document.

    Commentaries and texts: X.bzs or X.czs beside X.bzz or X.czz. Dictionaries: X.zdx beside X.zdt, whose blocks begin
    with the number of entries and their offsets.
    """
    for path, index in sorted(files.items()):
        stem, suffix = path[:-4], path[-4:]
        if suffix in (".bzs", ".czs"):
            blocks = [(at, size) for at, size, _ in struct.iter_unpack("<III", index)]
            raw = files.get(f"{stem}{suffix[:3]}z", b"")
        elif suffix == ".zdx":
            blocks = list(struct.iter_unpack("<II", index))
            raw = files.get(f"{stem}.zdt", b"")
        else:
            continue
        for at, size in blocks:
            try:
                text = zlib.decompress(raw[at : at + size]).decode("utf-8", "replace")
            except zlib.error:
                continue
            yield _joined(html_paragraphs(re.sub(r"[\x00-\x08]+", "\n\n", text)))


def _joined(verses: list[str]) -> list[str]:
    """Paragraphs of VERSES characters or somewhat more, since a verse by itself is short."""
    paragraphs = [""]
    for verse in verses:
        if len(paragraphs[-1]) >= VERSES:
            paragraphs.append("")
        paragraphs[-1] = squeeze(f"{paragraphs[-1]} {verse}")
    return paragraphs


_READERS: dict[str, Callable[[bytes], Iterator[list[str]]]] = {
    ".html": _html,
    ".htm": _html,
    ".xhtml": _html,
    ".phtml": _html,
    ".page": _html,
    ".docbook": _html,
    ".md": _text,
    ".rst": _text,
    ".txt": _text,
    ".pod": _pod,
    ".dict": _dictionary,
    ".json": _json,
}
