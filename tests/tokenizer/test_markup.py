"""What becomes of a package's files: paragraphs of plain text, and of those the English prose."""

import gzip
import json
import struct
import zlib

import pytest

from sagebwd.tokenizer.corpora.markup import documents
from sagebwd.tokenizer.corpora.prose import is_prose


def paragraphs(path: str, content: str | bytes) -> list[list[str]]:
    raw = content if isinstance(content, bytes) else content.encode()
    return [list(filter(None, found)) for found in documents(iter([(path, raw)]))]


def test_html_is_its_block_elements_without_scripts_and_navigation() -> None:
    page = """<html><head><title>T</title><style>p {}</style></head><body><nav><p>Up</p></nav>
    <h1>A   <em>head</em></h1><p>One <a href="x">link</a>,
    <code>code</code> &amp; more.</p><ul><li>First<p>inner</p></li></ul><pre>int x;\n \nIt is\nan int.</pre>
    <script>alert(1)</script><div>Own text<table><tr><td>cell</td></tr></table></div></body></html>"""
    expected = ["A head", "One link, code & more.", "First", "inner", "int x;", "It is an int.", "Own text", "cell"]
    assert paragraphs("/a/b.html", page) == [expected]
    assert paragraphs("/a/b.html.gz", gzip.compress(page.encode())) == [expected]


def test_man_pages_are_their_running_text() -> None:
    page = (
        '.\\" a comment\n.TH OPEN 2\n.SH NAME\nopen \\- open a file\n.SH DESCRIPTION\nThe\n.BR open ()\nsystem call\n'
        "opens \\fIpath\\fP,\nor fails.\n.PP\n.nf\nint open(void);\n.fi\n.TP\n.B O_RDONLY\nIt reads."
    )
    expected = ["open - open a file", "The open () system call opens path, or fails.", "O_RDONLY It reads."]
    assert paragraphs("/usr/share/man/man2/open.2.gz", gzip.compress(page.encode())) == [expected]


def test_the_other_kinds() -> None:
    assert paragraphs(
        "/a.pod", "=head1 X\n\nUse C<open> and B<I<this>>.\n\n    code\n\nC<< a->b >> too.\n\n=cut\n"
    ) == [["Use open and this.", "a->b too."]]
    entries = (
        "Cat \\K[a^]t\\ n.\n   A {feline} animal [syn: {puss}].\n   [1913 Webster]\n\n   It purrs.\nDog\n   A canine."
    )
    assert paragraphs("/x.dict.dz", gzip.compress(entries.encode())) == [
        ["Cat n. A feline animal syn: puss.", "It purrs.", "Dog A canine."]
    ]
    assert paragraphs("/a/notes.txt", "one\ntwo\r\n\r\nthree") == [["one two", "three"]]
    assert paragraphs("/usr/share/games/fortunes/wise", "One.\n%\nTwo\nlines.\n%\n") == [["One.", "Two lines."]]
    model = {"documentation": "<p>Of <b>all</b>.</p><p>More.</p>", "shapes": [{"description": "Plain &amp; simple"}, 3]}
    assert paragraphs("/service-2.json", json.dumps(model)) == [["Of all.", "More.", "Plain & simple"]]


def test_sword_modules_are_their_blocks() -> None:
    blocks = [zlib.compress(text.encode()) for text in ("<q>In the</q> beginning<br/>was", "the word")]
    index = b"".join(struct.pack("<III", sum(map(len, blocks[:i])), len(b), 99) for i, b in enumerate(blocks))
    folder = "/usr/share/sword/modules/texts/ztext/x"
    files = iter([(f"{folder}/ot.bzs", index), (f"{folder}/ot.bzv", b"?"), (f"{folder}/ot.bzz", b"".join(blocks))])
    assert [list(filter(None, found)) for found in documents(files)] == [["In the beginning was"], ["the word"]]


@pytest.mark.parametrize("path", ["/a/picture.png", "/a/README", "/a/page.html.gz", "/a/broken.json"])
def test_what_is_no_text_is_passed_over(path: str) -> None:
    assert paragraphs(path, b"\x1f\x8bnothing of the kind {") == []


GOOD = "The compiler checks that every reference is valid for as long as it is used, and refuses the program if not."


NO_PROSE = """
for (item in the_list) { if item is not in the other; then it = it | that; } else { return this->one of them }
One two three four five. Extraordinarily-longwordedness and considerable-lengthinesses are in this.
static int foo(struct bar *b, int n) { for (i = 0; i < n; i++) { b[i].x = y(i) + 1; } return n - 1; }
Alpha Beta Gamma Delta Epsilon Zeta Eta Theta Iota Kappa Lambda Mu Nu Xi Omicron Pi Rho Sigma Tau Phi
Der Übersetzer prüft, dass jeder Verweis so lange gilt, wie er gebraucht wird, und lehnt sonst das ab.
Le compilateur vérifie que chaque référence reste valable tant que le programme en fait usage ici.
0.5 0.75 1.0 the of 2.25 3.5 4.75 to 5.25 6.5 and 7.75 is 8.0 9.25 in 10.5 that 11.75 12.0 it 13.25
"""


@pytest.mark.parametrize(
    "paragraph", [GOOD, GOOD.replace("every", "https://example.org/a/rather/long/link/to/a/manual")]
)
def test_what_is_prose(paragraph: str) -> None:
    assert is_prose(paragraph)


@pytest.mark.parametrize(
    "paragraph",
    [*NO_PROSE.strip().splitlines(), GOOD[:79], GOOD.replace("every", "ab" * 60), " ".join([GOOD] * 300)],
)
def test_what_is_not(paragraph: str) -> None:
    assert not is_prose(paragraph)
