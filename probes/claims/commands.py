"""The commands that measure what a statement needs, as `make report` and `make llm` give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BUNDLED = "tiny-llama tiny-llama-ntk tiny-mistral-window tiny-qwen2"
REAL = "smollm2-135m"  # the pretrained language model that decides where no other is at hand
COMMANDS = {  # of fresh models
    "jacobian": f"headwater jacobian {BUNDLED} --out reports/jacobian",
    "no-rope": f"headwater jacobian {BUNDLED} --conditions init --no-rope --out reports/no-rope",
    "scalar": f"headwater jacobian {BUNDLED} --method scalar --conditions init --out reports/scalar-init",
    "theory": f"headwater theory {BUNDLED} --prompts 2 --out reports/theory",
    "map": "headwater map --out reports/theory",
}
MEASURED = {  # options for `REAL`
    "jacobian": "--prompts 16 --seeds 2 --products 32 --initialization smollm2-135m",
    "scalar": "--method scalar --conditions pretrained --prompts 16",
    "theory": "--prompts 2 --seeds 2 --length 128 --initialization smollm2-135m",
    "sinks": "--prompts 32 --length 256",
    "trajectory": "--prompts 32 --length 256",
    "leakage": "--prompts 512 --length 128",
    "retrieval": "--pairs 36 --keys apart --digits 4 --contexts 100 --candidates 12",
    "bos-swap": "--replace mean,random --prompts 64 --length 128 --profile-prompts 4 --products 32",
}
SEEDS = (1, 2)  # of controlled runs beside the bundled models


def command(given: Any, population: str, models: Sequence[str] = ()) -> str:
    """A statement's command, as its table names it.

    Args:
        given: a command in full; a key of `COMMANDS` or, for pretrained models, of `MEASURED`; a table of arguments
            of `measuring` or, for controlled training, of `training`; or a list of these.
        population: of the statement.
        models: whose controlled runs it needs.
    """
    if isinstance(given, list):
        return " && ".join(command(one, population, models) for one in given)
    if isinstance(given, Mapping):
        return training(models, **given) if population == "controlled" else measuring(**given)
    if " " in given:
        return given
    return measuring(given) if population == "pretrained" else COMMANDS[given]


def measuring(kind: str, model: str = REAL, *, more: str = "", variant: str = "") -> str:
    """The command that measures a pretrained language model."""
    name = "jacobian" if kind == "scalar" else kind
    folder = "/".join(part for part in ("reports/llm", variant, kind) if part)
    return " ".join(part for part in ("headwater", name, model, MEASURED[kind], more, "--out", folder) if part)


def training(
    models: Sequence[str],
    kind: str,
    options: str = "",
    steps: Sequence[str] = ("",),
    seeds: Sequence[int] = SEEDS,
) -> str:
    """The commands that train the missing controlled runs of these recipes and measure them, at some steps if given."""
    folders = {f"runs/{model}-seed{seed}": (model, seed) for model in models for seed in seeds}
    trained = [f"headwater pretrain {model} --seed {seed} --out {out}" for out, (model, seed) in folders.items()]
    measured = " ".join(f"{folder}{step}" for folder in folders for step in steps)
    name = "sinks" if kind == "steps" else kind
    said = " ".join(one for one in ("headwater", name, measured, options, f"--out reports/controlled/{kind}") if one)
    return " && ".join([*trained, said])
