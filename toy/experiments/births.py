"""Does the U of initialization cause the trained profile? Language models of 1 M parameters from several initializations.

[Chowdhury] finds the U in fresh weights and leaves open whether it is why trained models have one. What is trained, from
which initializations, and how to read slopes stands in `docs/probes/match.md`, "Births".

`flattest` finds the flat profile: it scales kinds of matrices by powers of two and takes what gives the second-moment kernel
with its score path the least spread over positions. The configuration-only kernel has no score path, so that fresh weights
are drawn and their patterns measured; no derivative is taken.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from scipy.stats import t as student

from probes.charts import CYCLE, GREY, Series, curves, level, sheet
from probes.claims.claim import Claim
from probes.claims.evidence import TOYS
from probes.claims.ledger import Source
from probes.claims.rules import Told, above, nothing, told
from probes.data.documents import Document
from probes.data.prompts import draw
from probes.errors import InputError
from probes.measure import Headline
from probes.measures.consequences import consequences
from probes.measures.jacobian import jacobian
from probes.measures.sinks import sinks
from probes.models.fresh import fresh_model
from probes.models.initialization import KINDS, Initialization, by_depth
from probes.models.load import fresh, load
from probes.results.curves import ESTIMATE
from probes.results.statistics import INTERVAL, Interval
from probes.results.tables import number
from probes.results.ushape import SHORTEST, numbers, typical
from probes.run.files import write_json
from probes.theory.kernel import second_moment

from .. import checks
from ..checks import at_least
from ..corpus import Windows, find_text, hold_out, pack
from ..pretrain import Options, pretrain
from ..recipes import Recipe, recipe_config
from .experiment import Work
from .reading import judge, lies, need, over, state
from .sweep import Cells, Measure, Part, filled, sweep

PROFILES = ("uniform", "branches", "flat")
ENDS = ("primacy", "last")
STDLIB = "stdlib"  # the text of the bundled models
PROBED = "code"  # what profiles are measured on: bundled, and not in the training text
ORDER = 0  # the seed of the data's order, and of all that is drawn for measuring
DRAWS = 2  # fresh models whose kernels are averaged
FACTORS = (2.0, 0.5)  # the steps of the search
FARTHEST = 16.0  # from the deviation of the others; what lies beyond starts too far from a usable scale to train well
GROUPS = (("q", "k"), ("o",), ("down",), ("embedding",))  # scaled together; `v` acts on the kernel as `o` does
WARMUP, SAVE_EVERY = 100, 100  # steps


def strength(kind: str) -> float:
    """d sigma^2 of a kind of initialization."""
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
class Settings(checks.Settings):
    """What is trained and measured; no source gives a setting. Context and steps are what two CPU cores train in hours."""

    LEAST: ClassVar = {"seeds": 0, "checkpoints": 0, "length": 2 * SHORTEST}
    kinds: tuple[str, ...] = ("uniform-0.05", "uniform-0.36", "uniform-1", "uniform-2", "branches-0.36", "flat-0.36")
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 2400
    checkpoints: tuple[int, ...] = (0, 100, 300, 1000)  # beside the last step; 0 is measured in any case
    batch: int = 16
    length: int = 128
    width: int = 128
    blocks: int = 6
    vocabulary: int = 1024
    text: str = STDLIB  # or a file or folder
    heldout_characters: int = 240_000
    prompts: int = 8
    products: int = 48  # of the Jacobian's sketch

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("vocabulary", self.vocabulary, self.length)
        for kind in self.kinds:
            strength(kind)
        if max(self.checkpoints) >= self.steps:
            raise InputError(f"checkpoints={max(self.checkpoints)} is not before steps={self.steps}; give earlier ones")
        self.options()

    def points(self) -> tuple[int, ...]:
        """The steps that are measured."""
        return (*sorted({0, *self.checkpoints}), self.steps)

    def options(self) -> Options:
        """Of every training."""
        return Options(self.steps, self.batch, self.length, warmup=WARMUP, seed=ORDER)

    def config(self) -> Any:
        """Of every model: that of tiny-llama at these sizes."""
        sizes = {"hidden_size": self.width, "intermediate_size": 2 * self.width, "num_hidden_layers": self.blocks}
        return recipe_config(Recipe("llama", "", config=sizes | {"vocab_size": self.vocabulary}))  # type: ignore[arg-type]


QUICK = Settings(("uniform-0.36", "flat-0.36"), (0,), 100, (0, 20), batch=8, length=64, prompts=4)


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

    @cache
    def spread(factors: tuple[float, ...]) -> float:
        deviations = dict.fromkeys(KINDS, sigma) | {name: x * sigma for name, x in _by_matrix(factors).items()}
        curve = kernel(config, Initialization("flat", **deviations), length)
        return math.log(curve.max() / curve.min())

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
    coords: dict[str, Any] = {
        "kind": list(s.kinds),
        "seed": list(s.seeds),
        "step": (("step",), np.array(s.points()), {"long_name": "updates of the weights", "units": "1"}),
        "position": np.arange(s.length),
    }
    step = ("step",)
    measures = {
        "elasticity": Measure("sensitivity * rms(x) / rms(h)", "1", ("step", "position"), np.float32),
        "loss": Measure("loss on text held out", "nat", step),
        "sink_rate": Measure("share of heads and prompts with a weight above 0.3 on position 0", dims=step),
    }
    strengths = filled([[kind] for kind in s.kinds], strength=[strength(kind) for kind in s.kinds])
    reports: list[dict[str, Any]] = []
    drawn = Part(("kind",), {"strength": Measure("d sigma^2")}, strengths)
    ds = sweep(coords, drawn, Part(("kind", "seed"), measures, _runs(s, work, reports)))
    return ds.assign_attrs(models=f"language models of {reports[0]['parameters']:,} parameters")


def _runs(s: Settings, work: Work, reports: list[dict[str, Any]]) -> Cells:
    """Run by run, trained first where need be, with everything that was measured at its checkpoints."""
    cells, home = list(product(s.kinds, s.seeds)), work.folder.parent / "births-runs"
    documents, _ = find_text(text=None if s.text == STDLIB else s.text)
    text = hold_out(documents, characters=s.heldout_characters)
    for n, (kind, seed) in enumerate(cells):

        def advance(step: int, loss: float | None, n: int = n) -> None:
            work.advance("births", n + step / s.steps, len(cells))

        began, folder = time.monotonic(), home / f"{kind}-{seed}"
        report = _trained(s, folder, kind, seed, text, device=str(work.device), advance=advance)
        work.now += time.monotonic() - began
        work.spent += report["seconds"]
        reports.append(report)
        if report["data"] != reports[0]["data"]:
            raise InputError(f"models in '{home}' were trained on different texts; give another --out")
        points = [_measured(s, folder, point, text[1], work.device) for point in s.points()]
        yield (kind, seed), {name: [point[name] for point in points] for name in points[0]}


def _trained(
    s: Settings, folder: Path, kind: str, seed: int, text: tuple[list[Document], list[Document]], **options: Any
) -> dict[str, Any]:
    """What `training.json` of a model holds, which is trained if it is not there."""
    rule, file = rule_of(kind, s), folder / "training.json"
    names = ("text", "heldout_characters", "width", "blocks", "vocabulary")
    drawn = {"seed": seed} | {name: getattr(s, name) for name in names} | {name: getattr(rule, name) for name in KINDS}
    if not file.exists():
        draws = partial(fresh_model, seed=seed, rule=rule)
        options |= {"training": text[0], "heldout": text[1], "options": s.options(), "save_every": SAVE_EVERY}
        return pretrain(s.config(), folder, keep_steps=s.points()[:-1], fresh=draws, told={"births": drawn}, **options)
    report = json.loads(file.read_text(encoding="utf-8"))
    for before, now in ((report.get("births", {}), drawn), (report.get("options", {}), asdict(s.options()))):
        if other := [name for name in now if before.get(name) != now[name]]:
            raise InputError(f"'{folder}' holds a model with other {', '.join(other)}; give another --out")
    if missing := [step for step in s.points()[:-1] if not (folder / f"step{step}" / "model.safetensors").exists()]:
        raise InputError(f"'{folder}' has no checkpoint {missing[0]}; give checkpoints that it has, or another --out")
    return report


def _measured(
    s: Settings, folder: Path, step: int, heldout: Sequence[Document], device: torch.device
) -> dict[str, Any]:
    """Profile, loss and sinks at one checkpoint of a model; kept beside it, by the settings of the measurement."""
    key = "-".join(str(getattr(s, name)) for name in ("prompts", "products", "length"))
    file = folder / f"measured-{step}-{key}.json"
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    view = load(folder if step == s.steps else folder / f"step{step}", device=device.type)
    windows = Windows(pack(view.tokenizer, heldout), length=s.length, seed=ORDER, bos=view.bos)
    tokens = draw(view, n=s.prompts, length=s.length, text=PROBED, seed=ORDER).tokens
    profile = typical(jacobian(view, tokens, method="sketch", products=s.products)["elasticity"].values)
    found = {
        "elasticity": profile.tolist(),
        "loss": float(consequences(view, windows.at(windows.side_by_side())[0])[0].mean()),
        "sink_rate": float(sinks(view, tokens, keys=(0,))["sink_rate_of_model"].values[0]),
    }
    write_json(file, found)
    return found


# -- what a result says

COVARIATES: Mapping[str, tuple[str, ...]] = {"none": (), "log sigma, loss": ("log sigma", "loss")}
MARGIN = 0.1  # of a slope that counts as none
SHOWN = ("first", "primacy", "recency", "last")  # numbers of the profile; position 0 holds BOS, the others text
MEASURED = {"loss": "loss, nat", "sink_rate": "sink rate"}
FEWEST = 1e-8  # of the predictor's square that covariates and the constant have to leave


def with_ends(ds: xr.Dataset) -> xr.Dataset:
    """The result with the numbers `SHOWN` of its elasticities."""
    curves = ds["elasticity"].transpose(..., "position")
    found = np.apply_along_axis(lambda curve: [numbers(curve)[name] for name in SHOWN], -1, curves.values)
    return ds.assign({name: (curves.dims[:-1], found[..., n]) for n, name in enumerate(SHOWN)})


def fitted(
    y: Float[np.ndarray, " n"], x: Float[np.ndarray, " n"], *covariates: Float[np.ndarray, " n"]
) -> tuple[Interval, float]:
    """(slope, its variance inflation by covariates) of least squares of y on x, the covariates and a constant.

    The slope's interval is by Student's t. NaN where covariates leave nothing of x, or no degree of freedom is left.
    """
    others = np.column_stack([np.ones_like(x), *covariates])
    left, spared = (one - others @ np.linalg.lstsq(others, one)[0] for one in (x, y))
    spread, alone = float(left @ left), float(np.square(x - x.mean()).sum())
    freedom = len(x) - int(np.linalg.matrix_rank(others)) - 1
    if freedom < 1 or spread <= FEWEST * float(x @ x):
        return Interval(np.nan, np.nan, np.nan), np.nan
    value = float(left @ spared) / spread
    error = float(np.sqrt(np.square(spared - value * left).sum() / freedom / spread))
    reach = float(student.ppf(INTERVAL[1] / 100, freedom)) * error
    return Interval(value, value - reach, value + reach, freedom), alone / spread


def regressed(
    ds: xr.Dataset, end: str, point: int, covariates: Sequence[str] = (), *, kinds: bool = False
) -> tuple[Interval, float]:
    """The slope of log `end` at one of the points on that at initialization, over runs or over means of kinds."""
    values = {
        "y": np.log(ds[end].isel(step=point)),
        "x": np.log(ds[end].isel(step=0)),
        "log sigma": np.log(ds["strength"]) / 2 + xr.zeros_like(ds[end].isel(step=0)),
        "loss": ds["loss"].isel(step=point),
    }
    table = np.stack([values[name].transpose("kind", "seed").values for name in ("y", "x", *covariates)])
    by_kind = [one[:, np.isfinite(one).all(0)] for one in table.swapaxes(0, 1)]
    return fitted(*np.hstack([one.mean(1, keepdims=True) if kinds else one for one in by_kind if one.size]))


def slopes(ds: xr.Dataset) -> xr.DataArray:
    """Slopes at every later checkpoint [step, end, unit, covariates, estimate]."""
    ds = with_ends(ds)
    coords: dict[str, Any] = {"step": ds["step"].values[1:], "end": list(SHOWN), "unit": ["runs", "kinds"]}
    coords |= {"covariates": list(COVARIATES), "estimate": list(ESTIMATE)}
    places = product(range(1, ds.sizes["step"]), SHOWN, (False, True), COVARIATES.values())
    values = [regressed(ds, end, n, by, kinds=kinds)[0][:3] for n, end, kinds, by in places]
    return xr.DataArray(np.reshape(values, [*map(len, coords.values())]), coords, tuple(coords))


def of_flat(ds: xr.Dataset, end: str) -> xr.DataArray:
    """An end at the last step, of kinds of flat initialization."""
    flat = [str(kind) for kind in ds["kind"].values if str(kind).startswith("flat")]
    need(flat)
    return with_ends(ds)[end].isel(step=-1, drop=True).sel(kind=flat)


HEADLINES = (
    *(Headline(end, lambda ds, end=end: with_ends(ds)[end]) for end in SHOWN),
    *(Headline(words, lambda ds, name=name: ds[name]) for name, words in MEASURED.items()),
    Headline("slope of logarithms, trained on initial", slopes),
)


CAPTION = (
    "Left: runs, by initialization and d sigma^2. Right: slopes of logarithms, 95 % intervals; grey: as good as none."
)


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """Trained ends of the profile against initial ones, and the slope at every checkpoint."""
    ds = with_ends(ds)
    colors = dict(zip(map(str, ds["kind"].values), CYCLE * len(ds["kind"]), strict=False))
    figure, cells = sheet(2, 2, caption=CAPTION)
    by_step = slopes(ds).sel(unit="runs", covariates="none")
    for (left, right), end in zip(cells, ENDS, strict=True):
        initial, trained = ds[end].isel(step=0), ds[end].isel(step=-1)
        dots = [
            Series(kind, trained.sel(kind=kind), color, x=initial.sel(kind=kind), line="")
            for kind, color in colors.items()
        ]
        curves(left, dots, log=True)
        left.set(xscale="log", xlabel=f"{end} at initialization", ylabel=f"{end}, trained")
        left.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}", minor_formatter="")
        value, low, high = by_step.sel(end=end).transpose("estimate", "step").values
        curves(right, [Series("", value, low=low, high=high, x=ds["step"].values[1:], line="")])
        right.axhspan(-MARGIN, MARGIN, color=GREY, alpha=0.25, linewidth=0)
        level(right, 1.0, "as at initialization")
        steps = ds["step"].values  # without a slope there is nothing that the axis could be made for
        right.set(xscale="log", xlabel="step", ylabel=f"slope of {end}", xlim=(steps[1] / 1.3, steps[-1] * 1.3))
    return {"": figure}


# -- statements: no source trains; these are what the question comes to

births: Any = Source("[Chowdhury] discussion", "births", replace(TOYS, population="controlled"), kind="ours")
MODELS = "1 M-parameter language models"
SLOPE = (
    "the slope of log {end} at the last step on log {end} at initialization, over means of kinds, log sigma and loss as "
    "covariates, is above 0 by its 95 % interval; it does not hold where the slope is equivalent to 0: its 90 % interval "
    f"lies within {MARGIN:g} of it"
)


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements, for each of `SHOWN`."""
    return judge(births, ds)


def follows(ds: xr.Dataset, end: str) -> Told:
    """The end of trained profiles follows from that at initialization."""
    slope, inflation = regressed(with_ends(ds), end, -1, COVARIATES["log sigma, loss"], kinds=True)
    need(np.isfinite(slope.value))
    words = f"{told(slope)} (variance inflation {number(inflation)})"
    return words, lambda level: "does not hold" if nothing(slope, MARGIN)(level) == "holds" else above(slope, 0)(level)


for _end in SHOWN:
    _name = _end.replace(" ", "-")
    _claim = f"The {_end} of trained {MODELS} follows from the {_end} that they were initialized with."
    births(f"follows-{_name}", "", _claim, rule=SLOPE.format(end=_end), end=_end)(follows)
    _claim = f"Training gives {MODELS} that start from a flat profile one with {_end}."
    _flat = Headline(f"{_end} at the last step of flat kinds", partial(of_flat, end=_end), ratio=True)
    state(births, f"from-flat-{_name}", _claim, lies(_flat, over(1)))
