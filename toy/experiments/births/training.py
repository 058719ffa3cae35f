"""Language models from several initializations: which there are, their training, and what is measured at checkpoints."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float

from probes.data.documents import Document
from probes.data.prompts import draw
from probes.errors import InputError
from probes.measures.consequences import consequences
from probes.measures.jacobian import jacobian
from probes.measures.retrieval import retrieval
from probes.measures.retrieval.numbers import shape
from probes.measures.sinks import sinks
from probes.models.fresh import fresh_model
from probes.models.initialization import KINDS, Initialization, by_depth
from probes.models.load import fresh, load
from probes.results.profiles import typical
from probes.results.ushape import SHORTEST, numbers
from probes.run.files import write_json
from probes.theory.kernel import second_moment

from ...checks import at_least
from ...corpus import Windows, find_text, hold_out, pack
from ...pretrain import Options, pretrain
from ...recipes import CONTEXT, Recipe, recipe_config
from .. import settings
from ..experiment import Work
from ..sweep import Measure, Part, sweep

PROFILES = ("uniform", "branches", "flat")
ENDS = ("primacy", "recency")
STDLIB = "stdlib"  # the text of the bundled models
PROBED = "code"  # what profiles are measured on: bundled, and not in the training text
ORDER = 0  # the seed of the data's order, and of all that is drawn for measuring
DRAWS = 2  # fresh models whose kernels are averaged
FACTORS = (2.0, 0.5)  # the steps of the search
FARTHEST = 16.0  # from the deviation of the others; what lies beyond starts too far from a usable scale to train well
GROUPS = (("q", "k"), ("o",), ("down",), ("embedding",))  # scaled together; `v` acts on the kernel as `o` does
TOKENS_PER_PAIR = 16  # at most: what a line of a list takes in this vocabulary
SAVE_EVERY = 100  # steps
ADVANCED = 10  # parts of a run's progress that measuring counts for, of 100


def strength(kind: str) -> float:
    """d sigma^2 of a kind of initialization.

    Raises:
        InputError: it is no kind.
    """
    profile, _, text = kind.rpartition("-")
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if profile not in PROFILES or not 0 < found < math.inf:
        raise InputError(
            f"kinds={kind} is no initialization; give {', '.join(PROFILES)} with d sigma^2, as uniform-0.36"
        )
    return found


@dataclass(frozen=True)
class Settings(settings.Settings):
    """What is trained and measured; no source gives a setting. Context and steps are what two CPU cores train in hours."""

    LEAST: ClassVar = {"seeds": 0, "checkpoints": 0, "length": 2 * SHORTEST}
    kinds: tuple[str, ...] = ("uniform-0.05", "uniform-0.36", "uniform-1", "uniform-2", "branches-0.36", "flat-0.36")
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 2400
    checkpoints: tuple[int, ...] = (0, 100, 300, 1000)  # beside the last step; 0 is measured in any case
    batch: int = 16
    length: int = 128
    warmup: int = 100
    width: int = 128
    blocks: int = 6
    vocabulary: int = 1024
    text: str = STDLIB  # or a file or folder
    heldout_characters: int = 240_000
    prompts: int = 8
    products: int = 48  # of the Jacobian's sketch
    pairs: int = 6  # of a list; of so small a model a dozen is the most to ask
    contexts: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("vocabulary", self.vocabulary, self.length)
        for kind in self.kinds:
            strength(kind)
        if max(self.checkpoints) >= self.steps:
            raise InputError(f"checkpoints={max(self.checkpoints)} is not before steps={self.steps}; give earlier ones")
        if self.length > CONTEXT:
            raise InputError(f"length={self.length} is more than the {CONTEXT} positions of these models; give less")
        if not 2 <= self.pairs <= max(2, self.length // TOKENS_PER_PAIR):
            raise InputError(
                f"pairs={self.pairs} do not fit in length={self.length}; give from 2 to {self.length // TOKENS_PER_PAIR}"
            )
        self.options()

    def points(self) -> tuple[int, ...]:
        """The steps that are measured."""
        return (*sorted({0, *self.checkpoints}), self.steps)

    def options(self) -> Options:
        """Of every training."""
        return Options(self.steps, self.batch, self.length, warmup=self.warmup, seed=ORDER)

    def config(self) -> Any:
        """Of every model: that of tiny-llama at these sizes."""
        sizes = {"hidden_size": self.width, "intermediate_size": 2 * self.width, "num_hidden_layers": self.blocks}
        return recipe_config(Recipe("llama", "", config=sizes | {"vocab_size": self.vocabulary}))  # type: ignore[arg-type]


QUICK = Settings(("uniform-0.36", "flat-0.36"), (0,), 100, (0, 20), batch=8, length=64, pairs=3, prompts=4, contexts=8)


def rule_of(kind: str, s: Settings) -> Initialization:
    """The deviations of a kind of initialization."""
    sigma = math.sqrt(strength(kind) / s.width)
    deviations = dict.fromkeys(KINDS, sigma)
    if kind.startswith("branches"):
        deviations = by_depth(sigma, s.blocks)
    elif kind.startswith("flat"):
        deviations |= {name: factor * sigma for name, factor in flattest(s.config(), sigma, s.length).items()}
    return Initialization(kind, **deviations)


def flattest(config: Any, sigma: float, length: int) -> dict[str, float]:
    """The factor of each kind of matrix in `GROUPS` that gives the flattest kernel, by steps down from 1.

    Powers of two, and not the exact minimum: the same factors are found on every machine.
    """
    seen: dict[tuple[float, ...], float] = {}

    def spread(factors: tuple[float, ...]) -> float:
        if factors not in seen:
            deviations = dict.fromkeys(KINDS, sigma) | {name: x * sigma for name, x in _by_matrix(factors).items()}
            curve = kernel(config, Initialization("flat", **deviations), length)
            seen[factors] = math.log(curve.max() / curve.min())
        return seen[factors]

    best = (1.0,) * len(GROUPS)
    while True:
        near = [(*best[:n], best[n] * step, *best[n + 1 :]) for n in range(len(best)) for step in FACTORS]
        near = [one for one in near if all(1 / FARTHEST <= x <= FARTHEST for x in one)]
        following = min(near, key=spread)
        if spread(following) >= spread(best):
            return _by_matrix(best)
        best = following


def _by_matrix(factors: tuple[float, ...]) -> dict[str, float]:
    return {name: factor for names, factor in zip(GROUPS, factors, strict=True) for name in names}


def kernel(config: Any, rule: Initialization, length: int) -> Float[np.ndarray, " position"]:
    """The sensitivity that theory predicts for fresh weights, with the score path: geometric mean over `DRAWS` draws."""
    tokens = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(ORDER))[None, :length]
    how: Any = {"attention": "measured", "score_path": True}
    models = [fresh(config, n, initialization=rule) for n in range(DRAWS)]
    return typical(np.stack([second_moment(model, tokens, **how)["sensitivity"].values for model in models]))


def measure(s: Settings, work: Work) -> xr.Dataset:
    """Train what is not there yet and measure it; elasticities are geometric means over prompts."""
    rules = {kind: rule_of(kind, s) for kind in s.kinds}
    coords: dict[str, Any] = {
        "kind": list(s.kinds),
        "seed": list(s.seeds),
        "step": (("step",), np.array(s.points()), {"long_name": "updates of the weights", "units": "1"}),
        "position": np.arange(s.length),
        "matrix": list(KINDS),
    }
    step = ("step",)
    measures = {
        "elasticity": Measure("sensitivity * rms(x) / rms(h)", "1", ("step", "position"), np.float32),
        "primacy": Measure("first 5 % of positions over the middle", dims=step),
        "recency": Measure("last position over the middle", dims=step),
        "loss": Measure("loss on text held out", "nat", step),
        "sink_rate": Measure("share of heads and prompts with a weight above 0.3 on position 0", dims=step),
        "sink_weight": Measure("mean weight on position 0", dims=step),
        "gain": Measure("what a pair of the list adds to its value's log probability", "nat", step),
        "gain_low": Measure("lower end of its 95 % interval over contexts", "nat", step),
        "gain_high": Measure("upper end of it", "nat", step),
        "exact": Measure("share of values recalled exactly", dims=step),
        "seconds": Measure("time of training", "s"),
    }
    theory = {
        "strength": Measure("d sigma^2"),
        "deviation": Measure("standard deviation of fresh weights", "1", ("matrix",)),
        "kernel": Measure("sensitivity at initialization by the second-moment kernel", "1", ("position",)),
    }
    runs = _Runs(s, rules, work)
    predicted = Part(("kind",), theory, _theory(s, rules))
    ds = sweep(coords, predicted, Part(("kind", "seed"), measures, runs.found()))
    if len(runs.data) > 1:
        raise InputError(f"models in '{runs.folder}' were trained on different texts; give another --out")
    return ds.assign_attrs(models=f"language models of {runs.parameters:,} parameters")


def _theory(s: Settings, rules: Mapping[str, Initialization]) -> Iterator[tuple[tuple[str], dict[str, Any]]]:
    for kind, rule in rules.items():
        deviations = [getattr(rule, name) for name in KINDS]
        yield (
            (kind,),
            {"strength": strength(kind), "deviation": deviations, "kernel": kernel(s.config(), rule, s.length)},
        )


class _Runs:
    """The trainings of one call, with what is there of earlier ones."""

    def __init__(self, s: Settings, rules: Mapping[str, Initialization], work: Work) -> None:
        self.s, self.rules, self.work = s, rules, work
        self.folder = work.folder.parent / "births-runs"
        self.data: set[str] = set()  # hashes of the tokens that models were trained on
        self.parameters = 0

    @cached_property
    def text(self) -> tuple[list[Document], list[Document]]:
        """(training, held out)."""
        found, _ = find_text(text=None if self.s.text == STDLIB else self.s.text)
        return hold_out(found, characters=self.s.heldout_characters)

    def found(self) -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
        """Run by run, trained first where need be; with everything that was measured at its checkpoints."""
        cells = list(product(self.s.kinds, self.s.seeds))
        for n, (kind, seed) in enumerate(cells):

            def advance(share: float, n: int = n) -> None:
                self.work.advance("births", n + share, len(cells))

            began, folder = time.monotonic(), self.folder / f"{kind}-{seed}"
            report = self._trained(folder, kind, seed, advance)
            points = []
            for at, point in enumerate(self.s.points()):
                points.append(self._measured(folder, point))
                advance(1 - ADVANCED / 100 * (1 - (at + 1) / len(self.s.points())))
            self.data.add(report["data"])
            self.parameters = report["parameters"]
            self.work.clock.now += time.monotonic() - began
            self.work.clock.spent += report["seconds"] + sum(point["seconds"] for point in points)
            values = {name: [point[name] for point in points] for name in points[0] if name != "seconds"}
            yield (kind, seed), values | {"seconds": report["seconds"]}

    def _trained(self, folder: Path, kind: str, seed: int, advance: Callable[[float], None]) -> dict[str, Any]:
        """What `training.json` of a model holds, which is trained if it is not there.

        Raises:
            InputError: the folder's model has other settings.
        """
        s, rule = self.s, self.rules[kind]
        given = {"seed": seed, "text": s.text, "heldout_characters": s.heldout_characters}
        given |= {"width": s.width, "blocks": s.blocks, "vocabulary": s.vocabulary}
        told = {"births": given | {name: getattr(rule, name) for name in KINDS}, "options": asdict(s.options())}
        file = folder / "training.json"
        if not file.exists():
            training, heldout = self.text
            return pretrain(
                s.config(),
                folder,
                training=training,
                heldout=heldout,
                options=s.options(),
                keep_steps=s.points()[:-1],
                save_every=SAVE_EVERY,
                device=str(self.work.device),
                fresh=partial(fresh_model, seed=seed, rule=rule),
                told={"births": told["births"]},
                advance=lambda step, loss: advance((1 - ADVANCED / 100) * step / s.steps),
            )
        report = json.loads(file.read_text(encoding="utf-8"))
        for part, values in told.items():
            before = report.get(part, {})
            if other := [name for name in values if before.get(name) != values[name]]:
                raise InputError(f"'{folder}' holds a model with other {', '.join(other)}; give another --out")
        if missing := [step for step in s.points()[:-1] if not (folder / f"step{step}" / "model.safetensors").exists()]:
            raise InputError(
                f"'{folder}' has no checkpoint {missing[0]}; give checkpoints that it has, or another --out"
            )
        return report

    def _measured(self, folder: Path, step: int) -> dict[str, Any]:
        """What is measured of one checkpoint; kept beside the model."""
        s, file = self.s, folder / f"measured-{step}.json"
        given = {name: getattr(s, name) for name in ("prompts", "products", "pairs", "contexts", "length")}
        if file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
            if kept.pop("with") == given:
                return kept
        began = time.monotonic()
        found = measured(folder if step == s.steps else folder / f"step{step}", s, self.text[1], self.work.device)
        found["seconds"] = round(time.monotonic() - began, 1)
        write_json(file, {"with": given, **found})
        return found


def measured(folder: Path, s: Settings, heldout: Sequence[Document], device: torch.device) -> dict[str, Any]:
    """Profile, loss, sinks and recall of the model in a folder."""
    view = load(folder, device=device.type)
    windows = Windows(pack(view.tokenizer, heldout), length=s.length, seed=ORDER, bos=view.bos)
    tokens = draw(view, n=s.prompts, length=s.length, text=PROBED, seed=ORDER).tokens
    profile = typical(jacobian(view, tokens, method="sketch", products=s.products)["elasticity"].values)
    attention = sinks(view, tokens, keys=(0,))
    asked: Any = {"pairs": s.pairs, "keys": "apart", "digits": 4, "contexts": s.contexts}
    recall = shape(retrieval(view, **asked, seed=ORDER))
    ends = numbers(profile)
    return {
        "elasticity": profile.tolist(),
        **{name: ends[name] for name in ENDS},
        "loss": float(consequences(view, windows.at(windows.side_by_side())[0])[0].mean()),
        "sink_rate": float(attention["sink_rate_of_model"].values[0]),
        "sink_weight": float(attention["alpha"].mean()),
        "gain": recall.gain.value,
        "gain_low": recall.gain.low,
        "gain_high": recall.gain.high,
        "exact": recall.exact.value,
    }
