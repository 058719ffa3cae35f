"""Readers given anything: files of results, texts and checkpoints give a value or an InputError.

Examples are the same in every run; `HEADWATER_FUZZ=5000` tries so many of each, drawn anew. What could take the interpreter
down (HDF5, safetensors) is read in a process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import probes
from probes.data.documents import read_documents
from probes.data.prompts import draw
from probes.errors import InputError
from probes.results import dataset as results

MANY = int(os.environ.get("HEADWATER_FUZZ", "0"))


def tried(examples: int) -> Any:
    """Few examples, the same ones each time, or as many as the environment says."""
    return settings(
        max_examples=MANY or examples,
        derandomize=not MANY,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def read(function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """What the function gives, or None where it refuses, in words."""
    try:
        return function(*given, **options)
    except InputError as error:
        said = str(error)
    assert said
    assert "Traceback" not in said
    return None


# -------------------------------------------------------------------------------------------------------- damage


def damages(most: int = 4) -> st.SearchStrategy[list[tuple[str, float, bytes]]]:
    """(what is done, where as a fraction of the file, bytes): applied in turn."""
    what = st.sampled_from(["write", "insert", "cut", "drop"])
    return st.lists(st.tuples(what, st.floats(0, 1), st.binary(min_size=1, max_size=24)), min_size=1, max_size=most)


def damaged(content: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    found = bytearray(content)
    for what, where, data in changes:
        at = int(where * len(found))
        gone = {"write": len(data), "insert": 0, "cut": len(found), "drop": len(data)}[what]
        found[at : at + gone] = data if what in ("write", "insert") else b""
    return bytes(found)


READER = """
import sys
from pathlib import Path
import probes
from probes.errors import InputError
for path in sorted(Path(sys.argv[2]).iterdir()):
    print(path.name, end=" ", flush=True)
    try:
        found = eval(sys.argv[1])
        print("read", flush=True)
    except InputError as error:
        assert len(str(error).splitlines()) == 1
        print("refused", flush=True)
"""


def read_in_a_process(call: str, folder: Path) -> list[str]:
    """What became of every file; a crash or another exception fails here and names the file."""
    environment = os.environ | {"PYTHONPATH": str(Path(probes.__file__).parents[1])}
    command = [sys.executable, "-X", "faulthandler", "-c", READER, call, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"at {lines[-1] if lines else folder}: {done.stderr[-2000:]}"
    return [line.split()[1] for line in lines]


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """So many values of a strategy, the same ones each time unless the environment asks for many."""
    found: list[Any] = []

    @tried(count)
    @given(strategy)
    def draw(value: Any) -> None:
        found.append(value)

    draw()
    return found


# -------------------------------------------------------------------------------------------------------- results


@pytest.fixture(scope="module")
def result() -> bytes:
    """A small result as a file has it: numbers, text, coordinates, attributes of every kind."""
    ds = results.dataset(
        {"sensitivity": (("prompt", "position"), np.random.default_rng(0).random((3, 5), dtype=np.float32))},
        coords={"seed": [1, 2], "condition": ["init", "pretrained"]},
        attrs={"headwater": "0.1.0", "model": "m", "options": {"query": 4}, "seconds": 0.5, "n": 3},
    )
    return bytes(ds.to_netcdf(engine="h5netcdf"))


@pytest.mark.slow
def test_damaged_results_are_read_or_refused(result, tmp_path):
    for number, changes in enumerate(drawn(damages(), 250)):
        (tmp_path / f"{number:06}.nc").write_bytes(damaged(result, changes))
    beginnings = [b"", b"\x89HDF\r\n\x1a\n", b"CDF\x01", b"CDF\x05", b"PK\x03\x04"]
    for number, content in enumerate(drawn(st.binary(max_size=400), 60)):
        (tmp_path / f"none-{number:06}.nc").write_bytes(beginnings[number % len(beginnings)] + content)
    found = read_in_a_process("probes.load_result(path).attrs", tmp_path)
    damage, none = found[: -(MANY or 60)], found[-(MANY or 60) :]
    assert damage.count("refused") > len(damage) / 3
    assert damage.count("read") >= 1
    assert set(none) == {"refused"}


# --------------------------------------------------------------------------------------------------------- texts

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=200)  # halves of characters included


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats())
ENTRIES = st.dictionaries(st.sampled_from(["text", "name", "x"]), st.one_of(SCALARS, ANY_TEXT))
LINES = st.lists(ENTRIES, max_size=4).map(lambda values: "\n".join(map(json.dumps, values)).encode())
CONTENT = st.one_of(st.binary(max_size=300), ANY_TEXT.map(lambda text: text.encode("utf-8", "surrogatepass")), LINES)


@tried(300)
@given(CONTENT, st.booleans())
def test_any_text_file_is_read_or_refused(tmp_path, content, lines):
    file = tmp_path / ("any.jsonl" if lines else "any.txt")
    file.write_bytes(content)
    documents = read(read_documents, file)
    assert documents is None or any(document.text.strip() for document in documents)
    for document in documents or ():
        document.text.encode("utf-8")
    if documents and lines:
        held = [json.loads(line)["text"] for line in content.decode().split("\n") if line.strip()]
        assert [document.text for document in documents] == held


@pytest.fixture(scope="module")
def model() -> Any:
    """A bundled model with its own byte-level tokenizer."""
    return probes.load("tiny-llama", device="cpu")


FIRST = st.sampled_from(["auto", "bos", "none", 5])


@tried(60)
@given(ANY_TEXT, st.integers(1, 3), st.integers(-1, 9), FIRST, st.integers(-1, 2**70))
def test_prompts_of_any_text_are_ids_of_the_vocabulary(tmp_path, model, text, n, length, first, seed):
    file = tmp_path / "any.txt"
    file.write_bytes((text * 3).encode("utf-8", "surrogatepass"))
    found = read(draw, model, n=n, length=length, text=file, first=first, seed=seed)
    if found is not None:
        assert found.tokens.shape == (n, length)
        assert 0 <= int(found.tokens.min()) <= int(found.tokens.max()) < model.spec.vocabulary
    # One that is long enough is never refused.
    text = text.replace("\0", "").encode("utf-8", "ignore").decode() + " and so on and on and on"
    file.write_text(text, encoding="utf-8")
    assert draw(model, n=1, length=4, text=file).tokens.shape == (1, 4)


# --------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some kilobytes: one block, eight wide."""
    from transformers import LlamaConfig

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "max_position_embeddings": 32}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)  # type: ignore[arg-type]
    folder = tmp_path_factory.mktemp("checkpoint")
    families.build(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_damaged_checkpoints_are_read_or_refused(checkpoint, tmp_path):
    weights, config = (checkpoint / "model.safetensors").read_bytes(), (checkpoint / "config.json").read_bytes()
    header = (8 + int.from_bytes(weights[:8], "little")) / len(weights)
    kinds = st.sampled_from(["anywhere", "header", "config"])
    for number, (kind, changes) in enumerate(drawn(st.tuples(kinds, damages(3)), 90)):
        folder = tmp_path / f"{number:06}"
        shutil.copytree(checkpoint, folder)
        if kind == "config":
            (folder / "config.json").write_bytes(damaged(config, changes))
            continue
        within = header if kind == "header" else 1.0
        scaled = [(what, where * within, data) for what, where, data in changes]
        (folder / "model.safetensors").write_bytes(damaged(weights, scaled))
    found = read_in_a_process("probes.load(path, device='cpu').spec", tmp_path)
    assert found.count("refused") > len(found) / 3
    assert found.count("read") >= 1
