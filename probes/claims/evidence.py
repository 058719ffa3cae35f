"""What decides a statement: results of one population, and the command that measures them.

Each population (`probes.claims.claim.Population`) has its own evidence. Fresh weights of any model decide about
initialization (`fresh`, `places`). Language models that others trained, of about `LARGE` parameters and more, decide about
pretrained ones (`real`); the numbers of small ones stand beside them as `tiny`. Three or more runs of each of our
controlled models decide about an ingredient of training (`runs`).

A statement's function is handed what its evidence selects, and returns what was measured in words with the test that
decides. None means that its argument is no case, and so does a `KeyError`: a result lacks a variable or a place (`Lacks`).

- `fresh`, `real` of one kind of results: a result of one model, for each model by itself;
- `fresh`, `real` of several kinds: one model's results by kind, for each model by itself;
- `places`: a place of the maps of theory, by itself, if named, else all of them; words and tests may be returned by name;
- `runs`: for each of the models named its runs, by name.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, TypeAlias

import xarray as xr

from ..measures.map import rows
from ..results.folder import Collected
from .claim import Judged, Population
from .rules import SURE, Told, every

Results: TypeAlias = Mapping[str, xr.Dataset]
Tell: TypeAlias = Callable[..., Any]  # gives `Told`, that of several things by name, or None where it is no case
Judge: TypeAlias = Callable[[Collected, Tell], Judged | None]  # None: nothing there to judge

LARGE = 100_000_000  # parameters of a language model that counts as one
BUNDLED = "tiny-llama tiny-llama-ntk tiny-mistral-window tiny-qwen2"
REAL = "smollm2-135m"  # the pretrained language model that decides where no other is at hand
MEASURED = {  # options of the command that measures `REAL`, by kind of result
    "jacobian": "--prompts 16 --seeds 2 --products 32 --initialization smollm2-135m",
    "scalar": "--method scalar --conditions pretrained --prompts 16",
    "theory": "--prompts 2 --seeds 2 --length 128 --initialization smollm2-135m",
    "sinks": "--prompts 32 --length 256",
    "trajectory": "--prompts 32 --length 256",
    "leakage": "--prompts 512 --length 128",
    "horizon": "--prompts 96 --length 512",
    "retrieval": "--pairs 36 --keys apart --digits 4 --contexts 100",
    "sink-factorial": "--prompts 32 --length 128 --lists 32 --pairs 24",
    "bos-swap": "--replace mean,random --prompts 64 --length 128 --profile-prompts 4 --products 32",
}
PROGRAMS = {"scalar": "jacobian", "scalar-init": "jacobian", "steps": "sinks"}


@dataclass(frozen=True)
class Evidence:
    """What decides a statement; `model` is what the command measures."""

    population: Population
    judge: Judge
    command: str
    model: str


def never(collected: Collected, tell: Tell) -> None:
    """Results here do not judge it."""


TOYS = Evidence("toys", never, "", "-")  # judged by the experiment that trains them


def unmeasured(command: str, model: str, population: Population = "pretrained") -> Evidence:
    """For what this suite does not measure about language models; the command measures what is nearest to it."""
    return Evidence(population, never, command, model)


def real(
    *kinds: str,
    first: str = "",
    only: Sequence[str] = (),
    model: str = REAL,
    options: str = "",
    more: str = "",
    out: str = "",
) -> Evidence:
    """Pretrained language models.

    Args:
        kinds: of the results, as `probes.results.folder` names them.
        first: what prompts begin with, where only such results count: "bos", "none" (text).
        only: models by name, where no other counts.
        model: what the command measures; `only`, if that is given.
        options: of the command, in the place of `MEASURED`'s; `more` stands behind those.
        out: the command's folder, of results that would overwrite others of their kind.
    """
    options = options or MEASURED[kinds[0].rpartition("/")[2]]
    command = measuring(kinds[0], only or [model], options, more, out or f"reports/llm/{kinds[0]}")
    return Evidence("pretrained", _of_models(kinds, in_real, first, only), command, ", ".join(only or [model]))


def cells(like: Evidence, *kinds: str) -> Evidence:
    """All results of pretrained language models of these kinds together, by name and kind; else as another evidence."""

    def judge(collected: Collected, tell: Tell) -> Judged | None:
        found = {f"{name}, {kind}": ds for kind in kinds for name, ds in collected[kind].items() if is_real(ds)}
        models = dict.fromkeys(name for kind in kinds for name in collected[kind])
        return judged(case(tell, found), ", ".join(models), found.values()) if found else None

    return replace(like, judge=judge)


def fresh(*kinds: str, options: str = "", model: str = "fresh models") -> Evidence:
    """Models at initialization, of any size; arguments as those of `real`."""
    command = measuring(kinds[0], [BUNDLED], options, "", f"reports/{kinds[0]}")
    return Evidence("initialization", _of_models(kinds, in_each, "", ()), command, model)


def places(model: str = "fresh models", names: Sequence[str] = (), **where: Any) -> Evidence:
    """Places of the maps of theory, of fresh models, with these coordinates; those of these names one by one."""

    def judge(collected: Collected, tell: Tell) -> Judged | None:
        maps = collected["map"].values()
        chosen = [row for ds in maps for row in rows(ds, **where)]
        by_name = {name: row for name in names for row in chosen if row["name"] == name}
        if names:
            return judged({name: tell(row) for name, row in by_name.items()}, model, maps)
        return judged(case(tell, chosen), model, maps) if chosen else None

    return Evidence("initialization", judge, "headwater map --out reports/theory", model)


def runs(kind: str, *models: str, options: str = "", seeds: Sequence[int] = (1, 2)) -> Evidence:
    """Controlled training: runs of these models, each of which needs some."""

    def judge(collected: Collected, tell: Tell) -> Judged | None:
        of_models = [runs_of(collected, kind, model) for model in models]
        used = {name: ds for of_model in of_models for name, ds in of_model.items()}
        return judged(case(tell, of_models), ", ".join(used), used.values()) if all(of_models) else None

    return Evidence("controlled", judge, training(kind, models, options, seeds), ", ".join(models))


# --------------------------------------------------------------------------------------------------------- who counts


def _of_models(kinds: Sequence[str], who: Callable[..., Judged | None], first: str, only: Sequence[str]) -> Judge:
    """The verdict over who counts, of those with such a first token and name."""

    def judge(collected: Collected, tell: Tell) -> Judged | None:
        results: dict[str, dict[str, xr.Dataset]] = {}  # by model and kind
        for kind in kinds:
            for name, ds in collected[kind].items():
                if first in ("", ds.attrs.get("first_policy")) and (not only or name in only):
                    results.setdefault(name, {})[kind] = ds
        return who(results, tell if len(kinds) > 1 else lambda by_kind: tell(by_kind[kinds[0]]))

    return judge


def in_each(results: Mapping[str, Results], tell: Tell) -> Judged | None:
    """The verdict over all models that are a case, of any size, by results of each. None without any.

    Judged on are those whose own test is measured.
    """
    cases = {name: told for name, by_kind in results.items() if (told := case(tell, by_kind))}
    kinds = dict.fromkeys(kind for name in cases for kind in results[name])
    used = [results[name][kind] for kind in kinds for name in cases if kind in results[name]]
    alone = {name: judged(told, name, ()) for name, told in cases.items()}
    deciding = [name for name, found in alone.items() if found and found.verdict != "not measured"]
    return judged(cases, ", ".join(deciding or cases), used)


def in_real(results: Mapping[str, Results], tell: Tell) -> Judged | None:
    """The verdict over language models; what small ones say stands beside it and decides nothing."""
    large = [name for name, by_kind in results.items() if any(map(is_real, by_kind.values()))]
    decided = in_each({name: results[name] for name in large}, tell)
    tiny = in_each({name: results[name] for name in results if name not in large}, tell)
    return (decided or Judged("-", "not measured", "", ""))._replace(tiny=tiny.measured) if tiny else decided


def case(tell: Tell, evidence: Any) -> Any:
    """What is told of evidence; None where it is no case, or lacks what is asked for."""
    try:
        return tell(evidence)
    except KeyError:
        return None


def judged(told: Told | Mapping[str, Told] | None, model: str, used: Iterable[xr.Dataset]) -> Judged | None:
    """The verdict of what is told of these results; what is told of several things by name has to hold in each."""
    if not told:
        return None
    several = {"": told} if isinstance(told, tuple) else told
    words = "; ".join(f"{name}: {words}" if name else words for name, (words, _) in several.items())
    commands = [str(ds.attrs.get("command", "")) for ds in used]
    command = " && ".join(dict.fromkeys(commands)) if all(commands) else ""  # results made from Python have none
    return Judged(words, every(test for _, test in several.values())(SURE), model, command)


def is_real(ds: xr.Dataset) -> bool:
    """Whether a result tells of a pretrained language model of about `LARGE` parameters or more."""
    conditions = ds["condition"].values if "condition" in ds.coords else [ds.attrs.get("condition")]
    return "pretrained" in conditions and parameters(config(ds)) >= LARGE


def parameters(config: Mapping[str, Any]) -> int:
    """About how many parameters a model has: 12 L d^2 in its blocks, V d in its embedding; 0 where it says too little."""
    names = ("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"), ("vocab_size",)
    width, blocks, vocabulary = (next((int(config[n]) for n in same if config.get(n)), 0) for same in names)
    return (12 * blocks * width + vocabulary) * width if blocks and vocabulary else 0


def config(ds: xr.Dataset) -> dict[str, Any]:
    """Of the model."""
    return json.loads(str(ds.attrs.get("config", "{}")))


def runs_of(collected: Collected, kind: str, model: str) -> dict[str, xr.Dataset]:
    """Controlled runs of a bundled model: its own, and those of other seeds, "MODEL-seed1", under "controlled/KIND"."""
    of_all = {**collected[kind], **collected[f"controlled/{kind}"]}
    same = re.compile(rf"{re.escape(model)}(-seed\d+)?")
    return {name: ds for name, ds in of_all.items() if same.fullmatch(PurePath(name).name)}


# ----------------------------------------------------------------------------------------------------------- commands


def measuring(kind: str, models: Sequence[str], options: str, more: str, out: str) -> str:
    """The command that measures models."""
    name = kind.rpartition("/")[2]
    parts = ("headwater", PROGRAMS.get(name, name), *models, options, more, "--out", out)
    return " ".join(part for part in parts if part)


def training(kind: str, models: Sequence[str], options: str, seeds: Sequence[int], steps: Sequence[str] = ("",)) -> str:
    """The commands that train the missing controlled runs of these recipes and measure them, at some steps if given."""
    folders = {f"runs/{model}-seed{seed}": (model, seed) for model in models for seed in seeds}
    trained = [f"headwater pretrain {model} --seed {seed} --out {out}" for out, (model, seed) in folders.items()]
    measured = [f"{folder}{step}" for folder in folders for step in steps]
    return " && ".join([*trained, measuring(kind, measured, options, "", f"reports/controlled/{kind}")])
