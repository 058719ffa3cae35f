"""What decides a statement: results of one population, and the command that measures them.

Each population (`probes.claims.claim.Population`) has its own evidence. Fresh weights of any model decide about
initialization (`fresh`, `places`). Language models that others trained, of `LARGE` parameters and more, decide about
pretrained ones (`real`); the numbers of small ones stand beside them as `tiny`. Three or more runs of each of our
controlled models decide about an ingredient of training (`runs`).

A statement's function is handed what its evidence selects, and says in words what was measured and by which test it is
judged, or None where its argument is no case:

| evidence | what the function is handed |
|---|---|
| `fresh`, `real` of one kind | a result, of each model by itself |
| `fresh`, `real` of several kinds | one model's results by kind, of each model by itself |
| `places` | all places of the maps; the function may say something of each of them, by name |
| `runs` | for each of the models named its runs, by name |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import xarray as xr

from ..results.folder import Collected
from ..results.theory_map import Row, rows
from .claim import Judged, Population
from .rules import Told, commands, having, in_each, in_real, in_runs, one_verdict
from .rules import runs as runs_of

Tell: TypeAlias = Callable[..., Told | Mapping[str, Told] | None]
Suits: TypeAlias = Callable[[xr.Dataset], bool]

BUNDLED = "tiny-llama tiny-llama-ntk tiny-mistral-window tiny-qwen2"
REAL = "smollm2-135m"  # the pretrained language model that decides where no other is at hand
SEEDS = (1, 2)  # of controlled runs beside the bundled models
MEASURED = {  # options for `REAL`, by kind of result
    "jacobian": "--prompts 16 --seeds 2 --products 32 --initialization smollm2-135m",
    "scalar": "--method scalar --conditions pretrained --prompts 16",
    "theory": "--prompts 2 --seeds 2 --length 128 --initialization smollm2-135m",
    "sinks": "--prompts 32 --length 256",
    "trajectory": "--prompts 32 --length 256",
    "leakage": "--prompts 512 --length 128",
    "retrieval": "--pairs 36 --keys apart --digits 4 --contexts 100 --candidates 12",
    "bos-swap": "--replace mean,random --prompts 64 --length 128 --profile-prompts 4 --products 32",
}


@dataclass(frozen=True)
class Evidence:
    """What decides a statement."""

    population: Population
    judge: Callable[[Collected, Tell], Judged | None]  # None: nothing there to judge
    command: str  # that measures it
    model: str  # that the command measures


def _never(collected: Collected, tell: Tell) -> None:
    """Nothing among a folder's results."""


TOYS = Evidence("toys", _never, "", "-")  # judged where they are trained: `toy.experiments`


def unmeasured(command: str, model: str) -> Evidence:
    """For what no result of this suite decides about language models; the command measures what is nearest to it."""
    return Evidence("pretrained", _never, command, model)


def real(
    kinds: str | Sequence[str],
    *needed: str,
    suits: Suits = lambda ds: True,
    only: str | Sequence[str] = (),
    model: str = REAL,
    options: str = "",
    more: str = "",
    out: str = "",
) -> Evidence:
    """Pretrained language models.

    Args:
        kinds: of the results, as `probes.results.folder` names them; of several, those of one model are handed together.
        needed: variables without which a result is left out.
        suits: a further condition on a result.
        only: models by name, of which all are needed.
        model: what the command measures; `only`, if that is given.
        options: of the command, in the place of `MEASURED`'s; `more` of them behind those.
        out: its folder.
    """
    first = kinds if isinstance(kinds, str) else kinds[0]
    only = [only] if isinstance(only, str) else list(only)
    names = only or [model]
    settings = options or MEASURED[first.rpartition("/")[2]]
    said = (_program(first), *names, settings, more, "--out", out or f"reports/llm/{first}")
    judge = _of_models(in_real, kinds, needed, suits, only)
    return Evidence("pretrained", judge, " ".join(filter(None, said)), ", ".join(names))


def fresh(
    kinds: str | Sequence[str],
    *needed: str,
    suits: Suits = lambda ds: True,
    options: str = "",
    model: str = "fresh models",
) -> Evidence:
    """Models at initialization, of any size; arguments as those of `real`."""
    first = kinds if isinstance(kinds, str) else kinds[0]
    said = (_program(first), BUNDLED, options, "--out", f"reports/{first}")
    judge = _of_models(in_each, kinds, needed, suits, [])
    return Evidence("initialization", judge, " ".join(filter(None, said)), model)


def _program(kind: str) -> str:
    """The command that makes results of a kind."""
    name = kind.rpartition("/")[2]
    return f"headwater {'jacobian' if name in ('scalar', 'scalar-init', 'no-rope') else name}"


def _of_models(
    verdict: Callable[..., Judged | None],
    kinds: str | Sequence[str],
    needed: Sequence[str],
    suits: Suits,
    only: Sequence[str],
) -> Callable[[Collected, Tell], Judged | None]:
    def judge(collected: Collected, tell: Tell) -> Judged | None:
        by_kind = {
            kind: {name: ds for name, ds in having(collected[kind], *needed).items() if suits(ds)}
            for kind in ([kinds] if isinstance(kinds, str) else kinds)
        }
        names = only or list(dict.fromkeys(name for found in by_kind.values() for name in found))
        if not all(any(name in found for found in by_kind.values()) for name in names):
            return None
        if isinstance(kinds, str):
            return verdict({name: by_kind[kinds][name] for name in names}, tell)
        return verdict({name: {k: one[name] for k, one in by_kind.items() if name in one} for name in names}, tell)

    return judge


def places(model: str = "fresh models", **where: Any) -> Evidence:
    """Places of the maps of theory, of fresh models, with these coordinates."""

    def judge(collected: Collected, tell: Tell) -> Judged | None:
        maps = collected["map"].values()
        found: list[Row] = [row for ds in maps for row in rows(ds, **where)]
        told = tell(found) if found else None
        if told is None:
            return None
        if isinstance(told, Mapping):
            return one_verdict(told, model, commands(maps))
        words, test = told
        judged = one_verdict({"": ("", test)}, model, commands(maps))
        return judged and judged._replace(measured=words)

    return Evidence("initialization", judge, "headwater map --out reports/theory", model)


def runs(
    kind: str,
    models: Sequence[str],
    *needed: str,
    suits: Suits = lambda ds: True,
    options: str = "",
    steps: Sequence[str] = ("",),
    seeds: Sequence[int] = SEEDS,
) -> Evidence:
    """Controlled training: runs of these models, each of which needs some; `steps` of a run are its checkpoints' folders.

    Further arguments are those of `real`.
    """

    def judge(collected: Collected, tell: Tell) -> Judged | None:
        found = [having(runs_of(collected, kind, model), *needed) for model in models]
        found = [{name: ds for name, ds in one.items() if suits(ds)} for one in found]
        told = tell(found) if all(found) else None
        return in_runs(found, told[0], [told[1]]) if isinstance(told, tuple) else None

    return Evidence("controlled", judge, training(kind, models, options, steps, seeds), ", ".join(models))


def training(
    kind: str,
    models: Sequence[str],
    options: str = "",
    steps: Sequence[str] = ("",),
    seeds: Sequence[int] = SEEDS,
) -> str:
    """The commands that train the missing controlled runs of these recipes and measure them, at some steps if given."""
    folders = {f"runs/{model}-seed{seed}": (model, seed) for model in models for seed in seeds}
    trained = [f"headwater pretrain {model} --seed {seed} --out {out}" for out, (model, seed) in folders.items()]
    measured = " ".join(f"{folder}{step}" for folder in folders for step in steps)
    program = "sinks" if kind == "steps" else kind
    said = (f"headwater {program}", measured, options, f"--out reports/controlled/{kind}")
    return " && ".join([*trained, " ".join(filter(None, said))])
