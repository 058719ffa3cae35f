"""Documents of plain text: from a file, a folder, a `datasets` name, or the standard library of the running CPython.

A document is a pair (name, text). Nothing here knows about tokens; `prompts` cuts windows for probing and
`toy.pretrain` packs training streams from the same documents.
"""

import hashlib
import json
import lzma
import platform
import sys
import sysconfig
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InputError, near, reason
from ..run.files import what_is

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
PACKED = ".jsonl.xz"  # the files that come with the package
# What `datasets` calls the readers of single files.
READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".arrow": "arrow", ".txt": "text"}
SHUFFLED = 256  # documents of a stream that are shuffled at a time
CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
HELDOUT = CHECKPOINTS / f"heldout{PACKED}"  # what the bundled models' losses were measured on
TEXTS = Path(__file__).parents[1] / "texts"
# The bundled texts; "long" is prose with so many documents at a time joined to one.
BUNDLED = {name: TEXTS / f"{file}{PACKED}" for name, file in (("prose", "prose"), ("code", "code"), ("long", "prose"))}
JOINED = 4
# Library modules that are no prose and no program: character tables, and build settings that differ between machines.
LEFT_OUT = ("encodings", "_sysconfigdata", "__phello__", "test")
GIVE = "give a text file or a folder of text files"


class Document(NamedTuple):
    """One text and where it came from."""

    name: str
    text: str


def bundled(name: str) -> list[Document]:
    """The documents of a bundled text."""
    documents = read_documents(BUNDLED[name])
    if name != "long":
        return documents
    groups = [documents[start : start + JOINED] for start in range(0, len(documents), JOINED)]
    return [Document(" + ".join(one.name for one in some), "\n\n".join(one.text for one in some)) for some in groups]


def read_documents(path: str | Path) -> list[Document]:
    """Read a text file, a `.jsonl` file with a `text` field per line, or every text file below a folder.

    Raises:
        InputError: the path does not exist, holds no text files, is not UTF-8 text, or a JSON line has no `text`.
    """
    path = Path(path)
    documents = []
    for file in text_files(path):
        name = path.name if file == path else file.relative_to(path).as_posix()
        text = _text(file)
        lines = file.suffix == ".jsonl" or file.name.endswith(PACKED)
        documents += _lines(file, name, text) if lines else [Document(name, text)]
    if not any(document.text.strip() for document in documents):
        raise InputError(f"text '{path}' is empty; give a file with some text in it")
    return documents


def text_files(path: str | Path) -> list[Path]:
    """The files that `read_documents` would read; none of them is opened."""
    path, kind = Path(path), what_is(path)
    if kind in ("nothing", "neither"):
        what = "is a pipe or a device" if kind == "neither" else f"does not exist{near(str(path), BUNDLED)}"
        raise InputError(f"text '{path}' {what}; {GIVE}, or one of {', '.join(BUNDLED)}")
    if kind == "file":
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix in TEXT_SUFFIXES)
    if not files:
        raise InputError(f"folder '{path}' holds no text files; give one with {', '.join(TEXT_SUFFIXES)} files")
    return files


def _text(file: Path) -> str:
    try:
        content = file.read_bytes()
        text = (lzma.decompress(content) if file.name.endswith(PACKED) else content).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"'{file}' is not UTF-8 text (byte {error.start}); convert it or leave it out") from None
    except (OSError, lzma.LZMAError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"'{file}' cannot be read ({why}); check the path and its permissions") from None
    if "\0" in text:
        raise InputError(f"'{file}' holds NUL bytes and is no text file; give plain UTF-8 text")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _lines(file: Path, name: str, text: str) -> Iterator[Document]:
    # Not splitlines(): JSON strings may hold raw U+2028 and the like, which are no line ends of JSON lines.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            passage = record["text"]
            passage.encode("utf-8")  # JSON can spell half a character, which no tokenizer takes
            yield Document(str(record.get("name", f"{name}:{number}")), passage)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InputError(f"'{file}' line {number} is no JSON object with a 'text' field; mend that line") from None


def stream_dataset(
    name: str, *, split: str = "train", column: str = "text", seed: int | None = None
) -> Generator[Document, None, None]:
    """Stream documents of a `datasets` name (`owner/name` or `owner/name:config`) without downloading the whole of it.

    A local folder or file that `datasets` can open (parquet, json, arrow) works too. No dataset's code is run. With a seed
    documents come in another order, as far as a stream can be shuffled.

    Raises:
        InputError: the name is unknown, cannot be reached, has no such split, or its rows have no such column.
    """
    import datasets

    path, _, config = (name, "", "") if Path(name).exists() else name.partition(":")
    try:
        where: dict[str, Any] = {"path": path, "name": config or None}
        if (reader := READERS.get(Path(path).suffix)) is not None:
            where = {"path": reader, "data_files": path}
        rows = datasets.load_dataset(**where, split=split, streaming=True)
        for number, row in enumerate(rows if seed is None else rows.shuffle(seed=seed, buffer_size=SHUFFLED)):
            if not isinstance(row.get(column), str):
                columns = ", ".join(map(repr, row))
                raise InputError(f"'{path}[{number}]' has no text in column '{column}'; name another of {columns}")
            yield Document(f"{path}[{number}]", row[column])
    except InputError:
        raise
    except Exception as error:  # datasets raises dozens of types; every one of them means: this name gave no rows
        raise InputError(
            f"dataset '{name}' cannot be streamed ({reason(error)}); check name, split, network and login, or use text files"
        ) from None


def stdlib_documents() -> list[Document]:
    """The Python sources of the running interpreter's standard library, without tests and tables, in name order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        top = parts[0].removesuffix(".py")
        kept = top in sys.stdlib_module_names and not top.startswith(LEFT_OUT)
        if kept and not {"test", "tests"} & set(parts):
            documents.append(Document("/".join(parts), file.read_text(encoding="utf-8", errors="replace")))
    return documents


def stdlib_name() -> str:
    """How results name that text: it changes with the interpreter."""
    return f"CPython {platform.python_version()} standard library"


def split_heldout(documents: list[Document], *, characters: int) -> tuple[list[Document], list[Document]]:
    """Split into (training, held out), whole documents, by the hash of their names: the same on every machine.

    Documents are taken in hash order until `characters` are held out; one that would take more than a fifth of that
    is left in training, so that the held-out text has many authors.
    """
    heldout, size = [], 0
    for document in sorted(documents, key=lambda document: hashlib.sha256(document.name.encode()).digest()):
        if 0 < len(document.text) <= characters / 5 and size + len(document.text) <= characters:
            heldout.append(document)
            size += len(document.text)
    names = {document.name for document in heldout}
    return [document for document in documents if document.name not in names], heldout
