"""Pretrain a small language model: the program that made the bundled checkpoints (`headwater pretrain`).

A transformers model is built from a config and trained on packed documents with AdamW (warm-up, then cosine decay to a
tenth), gradient clipping and a fixed data order. What a step sees depends on the seed and the step's number, so an
interrupted run continues exactly where it stopped, and models that share seed and data see the same text in the same
order. Weights are rounded to bfloat16 before the first step: the step-0 checkpoint is the true start, not a copy of it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from probes.data.documents import Document, read_documents, split_heldout, stdlib_documents, stdlib_name, stream_dataset
from probes.errors import InputError
from probes.models.checkpoint import check_fields
from probes.run.files import atomic, require_writable, system_error, what_is, write_json

from .card import write_card
from .recipes import RECIPES, SHAPE, Recipe

BOS, EOS = "<|bos|>", "<|eos|>"  # ids 0 and 1; EOS stands between packed documents
SMALLEST_VOCABULARY = 256 + 2  # byte-level BPE before its first merge, with BOS and EOS
DATASET_CHARACTERS = 50_000_000  # some 12 million tokens; the default training sees 10 million


@dataclass(frozen=True)
class Options:
    """How to train; all of it enters the fingerprint that a resumed run must match."""

    steps: int = 2400
    batch: int = 16
    length: int = 256
    peak_lr: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.1  # matrices only; decay is known to help sinks form [Gu, section 4]
    clip: float = 1.0
    seed: int = 0
    bos: bool = True
    compute: Literal["float32", "bfloat16"] = "float32"  # bfloat16: autocast; weights and optimizer stay float32

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "warmup"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} is not positive; give a whole number of at least 1")
        for name in ("peak_lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name}={getattr(self, name)} is not positive; give a number above 0")
        if not 0 <= self.weight_decay < math.inf:
            raise InputError(f"weight_decay={self.weight_decay} is no decay; give 0 or more")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed={self.seed} is out of range; give a whole number from 0 to {2**32 - 1}")
        if self.compute not in ("float32", "bfloat16"):
            raise InputError(f"compute={self.compute!r} is unknown; give 'float32' or 'bfloat16'")
        if self.length < 2:
            raise InputError(f"length={self.length} leaves nothing to predict; give at least 2")

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then cosine decay to a tenth of the peak at the last step."""
        if step < self.warmup:
            return self.peak_lr * (step + 1) / self.warmup
        fraction = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.peak_lr * (0.1 + 0.45 * (1 + math.cos(math.pi * fraction)))


def train_tokenizer(documents: Sequence[Document], *, vocabulary: int, bos: bool) -> Any:
    """Byte-level BPE over `documents`, wrapped for transformers; with `bos`, encoding starts with BOS, as in Llama."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer=trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS if bos else None, eos_token=EOS)


def pack(tokenizer: Any, documents: Sequence[Document]) -> np.ndarray:
    """All documents as one stream of token ids, int64 [tokens], EOS after each document."""
    encoded = tokenizer(
        [document.text for document in documents], add_special_tokens=False, return_attention_mask=False, verbose=False
    )
    return np.concatenate([np.asarray([*ids, tokenizer.eos_token_id], dtype=np.int64) for ids in encoded["input_ids"]])


class Windows:
    """The training windows in their fixed order: a function of seed and step, the same for models with and without BOS.

    Each pass over the stream cuts it at a fresh random phase into windows of `length`, and shuffles them. With BOS the
    input is BOS and all but the last token of a window; without, the window itself. Both predict `length` tokens.
    """

    def __init__(self, stream: np.ndarray, *, length: int, seed: int, bos: int | None) -> None:
        self.per_pass = (len(stream) - 1) // length - 1
        if self.per_pass < 1:
            raise InputError(
                f"text of {len(stream)} tokens is too short for windows of length={length}; "
                "give more text or smaller windows"
            )
        self.stream, self.length, self.seed, self.bos = stream, length, seed, bos

    def starts(self, first: int, count: int) -> list[int]:
        """Where windows number `first` to `first + count` begin in the stream."""
        found = []
        for index in range(first, first + count):
            epoch, place = divmod(index, self.per_pass)
            random = np.random.default_rng([self.seed, epoch])
            phase = int(random.integers(self.length))
            found.append(phase + self.length * int(random.permutation(self.per_pass)[place]))
        return found

    def at(self, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(inputs, targets), both [window, length]."""
        cut = torch.from_numpy(np.stack([self.stream[start : start + self.length + 1] for start in starts]))
        if self.bos is None:
            return cut[:, :-1], cut[:, 1:]
        first = torch.full((len(starts), 1), self.bos)
        return torch.cat([first, cut[:, : self.length - 1]], dim=1), cut[:, : self.length]


def sequential_starts(stream: np.ndarray, length: int) -> list[int]:
    """Windows side by side over the whole stream: what validation reads, whatever the model's BOS policy."""
    return list(range(0, len(stream) - length - 1, length))


@torch.no_grad()
def validation_loss(model: Any, windows: Windows, *, batch: int = 32) -> float:
    """Mean next-token loss in nats over the windows side by side."""
    starts = sequential_starts(windows.stream, windows.length)
    device = next(model.parameters()).device
    total = 0.0
    for at in range(0, len(starts), batch):
        inputs, targets = windows.at(starts[at : at + batch])
        logits = model(input_ids=inputs.to(device), use_cache=False).logits.float()
        total += functional.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten(), reduction="sum").item()
    return total / (len(starts) * windows.length)


def bigram_loss(training: np.ndarray, heldout: Windows, vocabulary: int) -> float:
    """Nats per token of the best bigram model on the held-out windows' targets.

    Counts from the training stream, interpolated with the unigram: p(b|a) = (n_ab + k p_b) / (n_a + k). The k is the
    one that does best on the held-out text itself, which favours the bigram, not us.
    """
    # Pairs as single numbers: a full table would hold V V counts, nearly all of them zero.
    pairs, counts = np.unique(training[:-1] * vocabulary + training[1:], return_counts=True)
    unigram = (np.bincount(training, minlength=vocabulary) + 1) / (len(training) + vocabulary)
    starts = sequential_starts(heldout.stream, heldout.length)
    cut = np.stack([heldout.stream[start : start + heldout.length + 1] for start in starts])
    before, after = cut[:, :-1].ravel(), cut[:, 1:].ravel()
    wanted = before * vocabulary + after
    place = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)
    together = np.where(pairs[place] == wanted, counts[place], 0)
    totals = np.bincount(training[:-1], minlength=vocabulary)
    losses = [
        -np.log((together + k * unigram[after]) / (totals[before] + k)).mean() for k in (1.0, 3.0, 10.0, 30.0, 100.0)
    ]
    return float(min(losses))


@torch.no_grad()
def position0_weights(model: Any, inputs: Tensor) -> list[list[float]]:
    """Mean attention weight on position 0, [layer][head], over the queries after 0 that may look at it."""
    device = next(model.parameters()).device
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")  # this is our own model, fresh from training, and it is set back
    try:
        patterns = model(input_ids=inputs.to(device), use_cache=False, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    window = getattr(model.config, "sliding_window", None) or inputs.shape[1]
    return [layer[:, :, 1:window, 0].float().mean((0, 2)).tolist() for layer in patterns]


def fingerprint(config: Any, options: Options, stream: np.ndarray) -> dict[str, Any]:
    """What a resumed run must share with the one it continues."""
    described = {key: value for key, value in config.to_dict().items() if key not in ("transformers_version", "dtype")}
    return {
        "config": json.loads(json.dumps(described, default=str)),
        "options": asdict(options),
        "data": hashlib.sha256(stream.tobytes()).hexdigest(),
    }


def _check(config: Any, options: Options, *, keep_steps: Sequence[int], save_every: int) -> None:
    """Refuse before any work what would fail, or silently do nothing, after it."""
    if config.vocab_size < SMALLEST_VOCABULARY:
        raise InputError(
            f"vocab_size={config.vocab_size} cannot hold the 256 bytes, BOS and EOS; give {SMALLEST_VOCABULARY} or more"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and options.length > longest:
        raise InputError(f"length={options.length} exceeds the config's max_position_embeddings={longest}; change one")
    if save_every < 1:
        raise InputError(f"save_every={save_every} is not positive; give a whole number of at least 1")
    for step in keep_steps:
        if not 0 <= step < options.steps:
            raise InputError(f"keep_steps={step} is not before a step; give steps from 0 to {options.steps - 1}")


def _fresh_model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:  # what transformers raises for a config class without a causal language model
        reason = str(error).splitlines()[0][:200]
        raise InputError(f"model_type '{config.model_type}' is no causal language model ({reason}); use one") from None


def pretrain(
    config: Any,
    out: str | Path,
    *,
    training: Sequence[Document],
    heldout: Sequence[Document],
    options: Options = Options(),
    keep_steps: Sequence[int] = (0,),
    save_every: int = 200,
    device: str = "cpu",
    compile: bool = False,
) -> dict[str, Any]:
    """Train a fresh model of `config` and write it to the folder `out`; continue a run that was interrupted there.

    Args:
        config: a transformers config of a causal language model; its vocabulary size decides the tokenizer's.
        out: receives the model, its tokenizer, `training.json` (everything that was measured), `log.jsonl` (loss at
            every tenth step) and a folder `stepN` for each of `keep_steps`.
        training, heldout: documents; the held-out ones are only ever evaluated on.
        options: see `Options`.
        save_every: steps between resumable states (removed at the end).
        compile: pass the forward pass through `torch.compile`.

    Returns:
        What `training.json` holds.

    Raises:
        InputError: too little text, or `out` holds a run with other settings (the message says which).
    """
    import transformers

    out, config = Path(out), copy.deepcopy(config)
    _check(config, options, keep_steps=keep_steps, save_every=save_every)
    tokenizer = train_tokenizer(training, vocabulary=config.vocab_size, bos=options.bos)
    if len(tokenizer) != config.vocab_size:
        raise InputError(
            f"the text yields {len(tokenizer)} tokens, the config wants vocab_size={config.vocab_size}; "
            "give more text or a config with the smaller vocabulary"
        )
    config.bos_token_id, config.eos_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id, None
    stream, held = pack(tokenizer, training), pack(tokenizer, heldout)
    windows = Windows(stream, length=options.length, seed=options.seed, bos=tokenizer.bos_token_id)
    validation = Windows(held, length=options.length, seed=options.seed, bos=tokenizer.bos_token_id)

    torch.manual_seed(options.seed)
    model = _fresh_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    model.to(device).train()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=options.peak_lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    names = {parameter: name for name, parameter in model.named_parameters()}
    identity = fingerprint(config, options, stream)
    state = _State(out / "state", identity)
    step, seconds = state.restore(model, optimizer, names)
    log = _read_log(out / "log.jsonl", below=step)
    forward = torch.compile(model) if compile else model

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    columns = (*columns, TextColumn("loss {task.fields[loss]}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"pretrain {out.name}", total=options.steps, completed=step, loss="-")
        began, clock = step, time.monotonic()
        while step < options.steps:
            if step in keep_steps:
                _save_model(model, tokenizer, out / f"step{step}")
            torch.manual_seed((options.seed << 31) + step)  # dropout, if any, follows from seed and step as well
            inputs, targets = windows.at(windows.starts(step * options.batch, options.batch))
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rate(step)
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=options.compute == "bfloat16"):
                logits = forward(input_ids=inputs.to(device), use_cache=False).logits
            loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.to(device).flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0 or step == options.steps - 1:
                value = loss.item()
                if not math.isfinite(value):
                    raise InputError(f"loss is {value} at step {step}; lower peak_lr={options.peak_lr}")
                log.append({"step": step, "loss": round(value, 4), "lr": round(options.learning_rate(step), 7)})
                progress.update(task, loss=f"{value:.3f}")
            step += 1
            progress.update(task, completed=step)
            if step % save_every == 0 and step < options.steps:
                state.save(model, optimizer, names, step, seconds + time.monotonic() - clock)
                _write_log(out / "log.jsonl", log)
        seconds += time.monotonic() - clock if step > began else 0.0
    _write_log(out / "log.jsonl", log)

    # Everything is measured on the weights that are shipped, rounded to bfloat16, not on the better ones in memory.
    model.eval().to(torch.bfloat16).to(torch.float32)
    inputs, _ = validation.at(sequential_starts(held, options.length)[:64])
    weights = position0_weights(model, inputs)
    report = {
        **identity,
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_documents": len(training),
        "training_tokens": len(stream),
        "tokens_seen": options.steps * options.batch * options.length,
        "heldout_documents": len(heldout),
        "heldout_tokens": len(held),
        "seconds": round(seconds, 1),
        "final_training_loss": log[-1]["loss"],
        "validation_loss": round(validation_loss(model, validation), 4),
        "bigram_validation_loss": round(bigram_loss(stream, validation, config.vocab_size), 4),
        "position0_weight": [[round(w, 4) for w in layer] for layer in weights],
        "sample": sample(model, tokenizer, length=min(options.length, 120), seed=options.seed),
        "device": device,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    _save_model(model, tokenizer, out)
    write_json(out / "training.json", report)
    state.remove()
    return report


def run(
    recipe: str | None,
    out: str | Path,
    *,
    config: str | Path | None = None,
    text: str | Path | None = None,
    dataset: str | None = None,
    stdlib: bool = False,
    split: str | None = None,
    column: str | None = None,
    characters: int | None = None,
    heldout_characters: int = 240_000,
    bos: bool | None = None,
    keep_steps: Sequence[int] | None = None,
    save_every: int = 200,
    device: str = "auto",
    compile: bool = False,
    command: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """What `headwater pretrain` does: find config and text, train, write the model card.

    Args:
        recipe: a name of `RECIPES`; exactly one of it and `config`, a transformers `config.json`, is given.
        out: an empty or new folder, or one that holds an unfinished run.
        text, dataset, stdlib: the source, at most one; the standard library of the running CPython if none is given.
        split, column, characters: of the dataset; reading stops after so many characters.
        heldout_characters: kept out of training, for validation.
        bos: start windows with BOS; the recipe's own policy if None (and yes for a config).
        keep_steps: weights to keep; the recipe's own, as far as training goes, if None (and step 0 for a config).
        command: how this was called, for the card.
        settings: other fields of `Options`.

    Raises:
        InputError: anything given cannot be used. Nothing has been written then.
    """
    out = Path(out)
    if (recipe is None) == (config is None):
        given = "neither" if recipe is None else f"both '{recipe}' and '{config}'"
        raise InputError(f"{given} given; give a recipe ({', '.join(RECIPES)}) or --config FILE")
    if recipe is not None and recipe not in RECIPES:
        raise InputError(f"recipe '{recipe}' is unknown; choose one of {', '.join(RECIPES)}")
    row = RECIPES[recipe] if recipe is not None else None
    options = Options(bos=bos if bos is not None else row is None or row.bos, **settings)
    if keep_steps is None:
        keep_steps = [step for step in (row.keep_steps if row else (0,)) if step < options.steps]
    device = _device(device)
    _check_out(out)
    built = _recipe_config(row) if row is not None else _read_config(Path(str(config)))
    _check(built, options, keep_steps=keep_steps, save_every=save_every)

    documents, data = find_text(
        text=text, dataset=dataset, stdlib=stdlib, split=split, column=column, characters=characters
    )
    training, heldout = hold_out(documents, characters=heldout_characters)
    report = pretrain(
        built,
        out,
        training=training,
        heldout=heldout,
        options=options,
        keep_steps=keep_steps,
        save_every=save_every,
        device=device,
        compile=compile,
    )
    write_card(out, data=data, difference=row.difference if row else None, command=command)
    return report


def hold_out(documents: list[Document], *, characters: int) -> tuple[list[Document], list[Document]]:
    """(training, held out): whole documents where enough of them are short, else pieces of documents.

    Raises:
        InputError: there is too little text to hold out `characters` and train on at least as much.
    """
    if characters < 1:
        raise InputError(f"heldout_characters={characters} is not positive; give a whole number of at least 1")
    for candidates in (documents, [piece for document in documents for piece in _pieces(document, characters // 10)]):
        training, heldout = split_heldout(candidates, characters=characters)
        kept, held = (sum(len(document.text) for document in part) for part in (training, heldout))
        if held >= characters / 2 and kept >= characters:
            return training, heldout
    total = sum(len(document.text) for document in documents)
    raise InputError(
        f"text of {total} characters is too short to hold out heldout_characters={characters}; "
        "give more text or hold out less"
    )


def _pieces(document: Document, size: int) -> list[Document]:
    """Cut a document into pieces of at most `size` characters, at line ends where there are any."""
    pieces, start = [], 0
    while start < len(document.text):
        end = start + max(1, size)
        if end < len(document.text):
            end = document.text.rfind("\n", start + size // 2, end) + 1 or end
        pieces.append(Document(f"{document.name}#{len(pieces)}", document.text[start:end]))
        start = end
    return pieces


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise InputError(f"device '{name}' is unknown; choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device 'cuda' is not available here; choose cpu or auto")
    return name


def _check_out(out: Path) -> None:
    """`out` is ours to write: new, empty, or an unfinished run."""
    require_writable(out)
    if not out.is_dir():
        return
    if (out / "training.json").exists():
        raise InputError(f"'{out}' holds a finished model; give another folder, or remove this one to train it again")
    found = sorted(entry.name for entry in out.iterdir())
    if found and not any(name == "state" or re.fullmatch(r"step\d+", name) for name in found):
        raise InputError(f"'{out}' holds other files ('{found[0]}' is one); give a new or an empty folder")


def _recipe_config(recipe: Recipe) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[recipe.model_type](**(SHAPE | dict(recipe.config)))


def _read_config(file: Path) -> Any:
    """A transformers config from its JSON file; code that a config refers to is never run."""
    from transformers import CONFIG_MAPPING

    if what_is(file) == "neither":
        raise InputError(f"config '{file}' is a pipe or a device; give a transformers config.json")
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"config '{file}' is not readable ({error.strerror}); give a transformers config") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, or no JSON
        raise InputError(f"config '{file}' is no JSON ({error}); give a transformers config.json") from None
    model_type = described.get("model_type") if isinstance(described, dict) else None
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise InputError(f"config '{file}' has model_type={model_type!r}, unknown to transformers; name a known one")
    try:
        check_fields(described)
    except InputError as error:
        raise InputError(f"config '{file}' cannot be used: {error}") from None
    try:
        config = CONFIG_MAPPING[model_type].from_dict(described)
    except Exception as error:  # each config class checks its values in its own way
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"config '{file}' is refused by transformers ({reason}); mend that entry") from None
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise InputError(f"config '{file}' has no vocab_size of its own; give the config of a language model")
    return config


def find_text(
    *,
    text: str | Path | None = None,
    dataset: str | None = None,
    stdlib: bool = False,
    split: str | None = None,
    column: str | None = None,
    characters: int | None = None,
) -> tuple[list[Document], str]:
    """The documents of the one source that is given, and what to call them; see `run`."""
    sources = {"--text": text, "--dataset": dataset, "--stdlib": stdlib or None}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} given; give one source of text")
    if dataset is None:
        for name, value in (("split", split), ("column", column), ("characters", characters)):
            if value is not None:
                raise InputError(f"{name}={value} is for --dataset only; leave it out or give --dataset NAME")
    if text is not None:
        return read_documents(text), f"text '{Path(text).name}'"
    if dataset is None:
        return stdlib_documents(), stdlib_name()
    limit = DATASET_CHARACTERS if characters is None else characters
    if limit < 1:
        raise InputError(f"characters={limit} is not positive; give a whole number of at least 1")
    documents, size = [], 0
    with closing(stream_dataset(dataset, split=split or "train", column=column or "text")) as stream:
        for document in stream:
            documents.append(document)
            size += len(document.text)
            if size >= limit:
                break
    if not size:
        raise InputError(f"dataset '{dataset}' has only empty text in '{column or 'text'}'; name another column")
    return documents, f"dataset '{dataset}', split '{split or 'train'}'"


@torch.no_grad()
def sample(model: Any, tokenizer: Any, *, length: int, seed: int, temperature: float = 0.7) -> str:
    """Text drawn from the model, `length` tokens, started from BOS (or from a line's start where there is none)."""
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    ids = [first]
    for _ in range(length):
        logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, -1].float().cpu()
        ids.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
    return tokenizer.decode(ids[1:])


class _State:
    """A resumable state: one safetensors file, with the run's fingerprint in it to check on return."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder, self.identity = folder, identity

    def save(self, model: Any, optimizer: Any, names: dict[Any, str], step: int, seconds: float) -> None:
        tensors = {f"model.{name}": parameter.detach() for parameter, name in names.items()}
        for parameter, moments in optimizer.state.items():
            for key, value in moments.items():
                tensors[f"optimizer.{key}.{names[parameter]}"] = value
        with atomic(self.folder / "state.safetensors") as temporary:
            metadata = {"step": str(step), "seconds": str(seconds), "identity": json.dumps(self.identity)}
            save_file(tensors, temporary, metadata=metadata)

    def restore(self, model: Any, optimizer: Any, names: dict[Any, str]) -> tuple[int, float]:
        from safetensors import safe_open

        file = self.folder / "state.safetensors"
        if not file.exists():
            return 0, 0.0
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        previous = json.loads(metadata["identity"])
        for part, value in self.identity.items():
            if previous[part] == value:
                continue
            changed = [part]
            if isinstance(value, dict):
                changed = sorted(k for k in {*value, *previous[part]} if previous[part].get(k) != value.get(k))
            raise InputError(
                f"'{self.folder.parent}' holds an unfinished run with other {', '.join(changed)}; "
                "give the same settings to continue it, or another folder"
            )
        tensors = load_file(file)
        with torch.no_grad():
            for parameter, name in names.items():
                parameter.copy_(tensors[f"model.{name}"])
                optimizer.state[parameter] = {
                    key: tensors[f"optimizer.{key}.{name}"].to(parameter.device)
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }
        return int(metadata["step"]), float(metadata["seconds"])

    def remove(self) -> None:
        (self.folder / "state.safetensors").unlink(missing_ok=True)
        if self.folder.exists():
            self.folder.rmdir()


def _save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """A transformers folder in bfloat16: weights last, so that a folder with weights is a whole one."""
    config = model.config.to_dict() | {"dtype": "bfloat16"}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(folder)
        type(model.config).from_dict(config).save_pretrained(folder)
    except Exception as error:  # the tokenizer's own is no OSError
        if (reason := system_error(error)) is None:
            raise
        raise InputError(f"cannot write '{folder}' ({reason}); choose a folder with room") from error
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    with atomic(folder / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})


def _read_log(file: Path, *, below: int) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["step"] < below]


def _write_log(file: Path, rows: list[dict[str, Any]]) -> None:
    with atomic(file) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
