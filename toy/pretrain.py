"""Pretrain a small language model: the program that made the bundled checkpoints (`headwater pretrain`).

A transformers model is built from a config and trained on packed documents with AdamW (warm-up, then cosine decay to a
tenth), gradient clipping and a fixed data order. What a step sees depends on the seed and the step's number alone. So an
interrupted run resumes exactly where it stopped, and models that share seed and data see the same text in the same order.
Weights are rounded to bfloat16 before the first step: the step-0 checkpoint is the true start, not a copy of it.
"""

import copy
import hashlib
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Int
from safetensors.torch import save_file
from torch.nn import functional

from probes.data.documents import Document
from probes.errors import InputError, reason
from probes.models.checkpoint import read_object
from probes.models.families import check_sizes
from probes.run.files import alone, atomic, require_writable, system_error, write_json
from probes.run.store import RESULT, Store

from .checks import at_least, usable_device
from .corpus import SMALLEST_VOCABULARY, Windows, find_text, hold_out, pack, train_tokenizer
from .recipes import Options, Pretraining, recipe_config

LOG_EVERY = 10  # steps
STATE, UNIT = "state", "pretrain"  # folder of an unfinished run, and what is kept there
PROGRESS = "progress"  # array of what is kept beside tensors
PSEUDOCOUNTS = (1.0, 3.0, 10.0, 30.0, 100.0)  # k of the bigram model
Advance: TypeAlias = Callable[[int, float | None], object]


def pretrain(
    config: Any,
    out: str | Path,
    *,
    training: Sequence[Document],
    heldout: Sequence[Document],
    options: Options,
    keep_steps: Sequence[int] = (0,),
    save_every: int = 200,
    device: str = "cpu",
    fresh: Callable[[Any], Any] | None = None,
    told: Mapping[str, Any] | None = None,
    notes: Mapping[str, Any] | None = None,
    advance: Advance = lambda step, loss: None,
) -> dict[str, Any]:
    """Train a fresh model of `config` and write it to the folder `out`; resume a run that was interrupted there.

    The folder receives the model, its tokenizer, `training.json` (everything that was measured, and `notes`), `log.jsonl`
    (loss at every tenth step) and a folder `stepN` for each of `keep_steps`. The config's vocabulary size decides the
    tokenizer's. Held-out documents are only ever evaluated on. `fresh` makes the model that is trained from the config;
    without it the options' seed decides the weights. What `fresh` depends on is `told`: a resumed run must share it. A state
    to resume from is kept every `save_every` steps.

    Returns:
        What `training.json` holds.

    Raises:
        InputError: too little text, `out` holds a run with other settings (the message says which), or another process is
            writing to it.
    """
    import transformers

    out, config = Path(out), copy.deepcopy(config)
    _check(config, options, keep_steps=keep_steps, save_every=save_every)
    tokenizer = train_tokenizer(training, vocabulary=config.vocab_size, bos=options.bos)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id, None
    stream, held = pack(tokenizer, training), pack(tokenizer, heldout)
    windows, validation = (
        Windows(tokens, length=options.length, seed=options.seed, bos=tokenizer.bos_token_id)
        for tokens in (stream, held)
    )
    model = _rounded((fresh or partial(_fresh_model, seed=options.seed))(config)).to(device).train()
    with alone(out / STATE / UNIT):
        run = _Training(model, windows, options, out, _fingerprint(config, options, stream) | dict(told or {}))
        while run.step < options.steps:
            if run.step in keep_steps:
                save_model(model, tokenizer, out / f"step{run.step}")
            loss = run.one_step()
            advance(run.step, loss)
            if run.step % save_every == 0 and run.step < options.steps:
                run.save()
        write_log(out, run.log)
        # What is shipped is measured, not the better weights in memory.
        model.eval().to(torch.bfloat16).to(torch.float32)
        report = {
            **run.identity,
            "parameters": sum(p.numel() for p in model.parameters()),
            "training_documents": len(training),
            "training_tokens": len(stream),
            "tokens_seen": options.steps * options.batch * options.length,
            "heldout_documents": len(heldout),
            "heldout_tokens": len(held),
            "seconds": round(run.seconds, 1),
            "final_training_loss": run.log[-1]["loss"],
            "validation_loss": round(validation_loss(model, validation), 4),
            "bigram_validation_loss": round(bigram_loss(stream, validation, len(tokenizer)), 4),
            "device": device,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            **(notes or {}),
        }
        save_model(model, tokenizer, out)
        write_json(out / "training.json", report)
        shutil.rmtree(out / STATE, ignore_errors=True)
        return report


@torch.no_grad()
def validation_loss(model: Any, windows: Windows, *, batch: int = 32) -> float:
    """Mean next-token loss in nats over the windows side by side."""
    starts, total = windows.side_by_side(), 0.0
    for at in range(0, len(starts), batch):
        inputs, targets = (tokens.to(model.device) for tokens in windows.at(starts[at : at + batch]))
        logits = model(input_ids=inputs, use_cache=False).logits.float()
        total += functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
    return total / (len(starts) * windows.length)


def bigram_loss(training: Int[np.ndarray, " token"], heldout: Windows, vocabulary: int) -> float:
    """Nats per token of the best bigram model on the held-out windows' targets.

    Counts from the training stream, interpolated with the unigram: p(b|a) = (n_ab + k p_b) / (n_a + k). The k is the
    one that does best on the held-out text itself, which favours the bigram, not us.
    """
    # Pairs as single numbers: a full table would hold V V counts, nearly all of them zero.
    pairs, counts = np.unique(training[:-1] * vocabulary + training[1:], return_counts=True)
    unigram = (np.bincount(training, minlength=vocabulary) + 1) / (len(training) + vocabulary)
    cut = heldout.cut(heldout.side_by_side())
    before, after = cut[:, :-1].ravel(), cut[:, 1:].ravel()
    wanted = before * vocabulary + after
    place = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)
    together = np.where(pairs[place] == wanted, counts[place], 0)
    totals = np.bincount(training[:-1], minlength=vocabulary)
    losses = [-np.log((together + k * unigram[after]) / (totals[before] + k)).mean() for k in PSEUDOCOUNTS]
    return float(min(losses))


class _Training:
    """A model, its optimizer and its log, taken up where the folder's unfinished run stopped."""

    def __init__(self, model: Any, windows: Windows, options: Options, out: Path, identity: dict[str, Any]) -> None:
        self.model, self.windows, self.options, self.out, self.identity = model, windows, options, out, identity
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=options.peak_lr,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.step, self.seconds, self.log = 0, 0.0, list[dict[str, Any]]()
        self._resume()

    def one_step(self) -> float | None:
        """Update the weights once; returns the loss where it is logged."""
        options, began = self.options, time.monotonic()
        device = next(self.model.parameters()).device
        rate = options.learning_rate(self.step)
        torch.manual_seed((options.seed << 31) + self.step)  # dropout, if any, follows from seed and step as well
        inputs, targets = self.windows.at(self.windows.starts(self.step * options.batch, options.batch))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16) if options.compute == "bfloat16" else nullcontext():
            logits = self.model(input_ids=inputs.to(device), use_cache=False).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.to(device).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        value = None
        if self.step % LOG_EVERY == 0 or self.step == options.steps - 1:
            value = loss.item()
            if not math.isfinite(value):
                raise InputError(f"loss is {value} at step {self.step}; lower peak_lr={options.peak_lr}")
            self.log.append({"step": self.step, "loss": round(value, 4), "lr": round(rate, 7)})
        self.step += 1
        self.seconds += time.monotonic() - began
        return value

    def save(self) -> None:
        """Keep what a killed run resumes from, in place of what was kept before."""
        arrays = {}
        for name, parameter in self.model.named_parameters():
            for key, value in {"weight": parameter, **self.optimizer.state[parameter]}.items():
                arrays[f"{key} {name}"] = value.detach().cpu().numpy()
        progress = [self.identity, [self.step, self.seconds, self.log]]
        arrays[PROGRESS] = np.frombuffer(json.dumps(progress).encode(), np.uint8)
        Store(self.out / STATE, UNIT).put(RESULT, arrays)
        write_log(self.out, self.log)

    @torch.no_grad()
    def _resume(self) -> None:
        """Take up an unfinished run in the folder, if there is one."""
        arrays = Store(self.out / STATE, UNIT).get(RESULT)
        if arrays is None:
            return
        before, (self.step, self.seconds, self.log) = json.loads(arrays.pop(PROGRESS).tobytes())
        for part, value in json.loads(json.dumps(self.identity)).items():
            was = before.get(part)
            if was != value:
                both = isinstance(value, dict) and isinstance(was, dict)
                changed = sorted(k for k in {*value, *was} if was.get(k) != value.get(k)) if both else [part]
                raise InputError(
                    f"'{self.out}' holds an unfinished run with other {', '.join(changed)}; "
                    "give the same settings to continue it, or another folder"
                )
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[f"weight {name}"])
            if parameter.requires_grad:
                self.optimizer.state[parameter] = {
                    key: tensors[f"{key} {name}"].to(parameter.device) for key in ("step", "exp_avg", "exp_avg_sq")
                }


def _fresh_model(config: Any, seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:  # what transformers raises for a config class without a causal language model
        raise InputError(
            f"model_type '{config.model_type}' is no causal language model ({reason(error)}); use one"
        ) from None
    return model


@torch.no_grad()
def _rounded(model: Any) -> Any:
    """The model with its weights rounded to bfloat16, in place; learned sink logits held where the config says so."""
    from probes.models.fresh import hold_sink_logits

    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    hold_sink_logits(model)
    return model


def _fingerprint(config: Any, options: Options, stream: np.ndarray) -> dict[str, Any]:
    """What a resumed run must share with the one it continues."""
    described = {key: value for key, value in config.to_dict().items() if key not in ("transformers_version", "dtype")}
    return {
        "config": json.loads(json.dumps(described, default=str)),
        "options": asdict(options),
        "data": hashlib.sha256(stream.tobytes()).hexdigest(),
    }


def _check(config: Any, options: Options, *, keep_steps: Collection[int], save_every: int) -> None:
    """Refuse before any work what would fail, or silently do nothing, after it."""
    if config.vocab_size < SMALLEST_VOCABULARY:
        raise InputError(
            f"vocab_size={config.vocab_size} cannot hold the 256 bytes, BOS and EOS; give {SMALLEST_VOCABULARY} or more"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and options.length > longest:
        raise InputError(f"length={options.length} exceeds the config's max_position_embeddings={longest}; change one")
    at_least("save_every", save_every, 1)
    for step in keep_steps:
        if not 0 <= step < options.steps:
            raise InputError(f"keep_steps={step} is not before a step; give steps from 0 to {options.steps - 1}")


def run(
    recipe: str | None,
    out: str | Path,
    *,
    command: str | None = None,
    advance: Advance = lambda step, loss: None,
    **settings: Any,
) -> dict[str, Any]:
    """What `headwater pretrain` does: find config and text, and train.

    Args:
        recipe: a name of `RECIPES`; exactly one of it and `config`, a transformers `config.json`, is given.
        out: an empty or new folder, or one that holds an unfinished run.
        command: how this was called, for `training.json`.
        settings: other fields of `toy.recipes.Pretraining`.

    Returns:
        What `training.json` holds.

    Raises:
        InputError: anything given cannot be used. Nothing has been written then.
    """
    given, out = Pretraining(recipe=recipe, out=Path(out), **settings), Path(out)
    options, keep_steps, device = given.training(), given.kept(), usable_device(given.device)
    check_folder(out)
    config = recipe_config(given.row) if given.config is None else _read_config(Path(given.config))
    _check(config, options, keep_steps=keep_steps, save_every=given.save_every)
    source = {name: getattr(given, name) for name in ("text", "dataset", "split", "column", "characters")}
    documents, data = find_text(**source)
    training, heldout = hold_out(documents, characters=given.heldout_characters)
    return pretrain(
        config,
        out,
        training=training,
        heldout=heldout,
        options=options,
        keep_steps=keep_steps,
        save_every=given.save_every,
        device=device,
        notes={"data_description": data, "difference": given.row.difference, "command": command},
        advance=advance,
    )


def _read_config(file: Path) -> Any:
    """A transformers config from its JSON file; code that a config refers to is never run."""
    from transformers import CONFIG_MAPPING

    try:
        fields = read_object(file)
    except InputError as error:
        raise InputError(f"config '{file}' cannot be used: {error}; give a transformers config.json") from None
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise InputError(f"config '{file}' has model_type={model_type!r}, unknown to transformers; name a known one")
    try:
        config = CONFIG_MAPPING[model_type].from_dict(fields)
        check_sizes(config)
    except Exception as error:  # each config class checks its values in its own way
        raise InputError(f"config '{file}' is refused by transformers ({reason(error)}); mend that entry") from None
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise InputError(f"config '{file}' has no vocab_size of its own; give the config of a language model")
    return config


# -- what is written to a model's folder, and read from it


def check_folder(out: Path) -> None:
    """Refuse a folder that is neither new nor empty nor an unfinished run."""
    require_writable(out)
    if (out / "training.json").exists():
        raise InputError(f"'{out}' holds a finished model; give another folder, or remove this one to train it again")
    names = sorted(entry.name for entry in out.iterdir()) if out.is_dir() else []
    if names and not any(name == STATE or re.fullmatch(r"step\d+", name) for name in names):
        raise InputError(f"'{out}' holds other files ('{names[0]}' is one); give a new or an empty folder")


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a transformers folder in bfloat16; weights go last, so that a folder with weights is a whole one."""
    config = model.config.to_dict() | {"dtype": "bfloat16"}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(folder)
        type(model.config).from_dict(config).save_pretrained(folder)
    except Exception as error:  # the tokenizer's own is no OSError
        if (reason := system_error(error)) is None:
            raise
        raise InputError(f"cannot write '{folder}' ({reason}); choose a folder with room") from error
    tied = getattr(model, "_tied_weights_keys", None) if model.config.tie_word_embeddings else None
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in (tied or ())
    }
    with atomic(folder / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})


def write_log(out: Path, rows: list[dict[str, Any]]) -> None:
    """Write the log, a line of JSON per row."""
    with atomic(out / "log.jsonl") as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
