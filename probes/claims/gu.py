"""[Gu], arXiv 2410.10781, "When Attention Sink Emerges in Language Models"."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import xarray as xr

from ..errors import plural
from ..measures.bos_swap.compute import ANCHORS
from ..measures.sinks.roles import ATTENDS
from ..results.curves import three_digits
from ..results.dataset import options_of
from ..results.folder import Collected
from ..results.statistics import Interval
from ..results.tables import number
from .claim import Judged, Verdict
from .evidence import Evidence, Results, Tell, case, judged, real, runs, training, unmeasured
from .ledger import Source
from .readings import OVER_RUNS, RUNS, UNKNOWN, estimated, over_documents, over_training, roughly
from .rules import QUARTER, Test, Told, above, below, every, listed, near, told

THERE = 0.01  # sink rate from which on a sink is there: ours
AT_ZERO = f"sink rate of position 0 (threshold 0.3) above {THERE:g}"
gu = Source("[Gu]", "gu", real("sinks"), "abstract")
followed, windows = gu.but(needs=real("trajectory"), where="3.1"), gu.but(where="section 6, Fig. 6")


def sinks(ds: xr.Dataset) -> xr.DataArray:
    """1 where a head of a prompt has its sink at a key, or the rate of that over heads where prompts were not kept."""
    if "prompt" not in ds["alpha"].dims:
        return ds["sink_rate_of_model"]
    return (ds["alpha"] > float(options_of(ds).get("threshold", 0.3))).astype(float)


def sink_rate(ds: xr.Dataset) -> Interval:
    """Of position 0, over documents; without interval where prompts were not kept."""
    return over_documents(ds, sinks(ds).sel(key=0))


def ahead(ds: xr.Dataset, values: xr.DataArray) -> tuple[float, float, Interval]:
    """Position 0's number, the largest of the others', and the difference; NaN without others."""
    zero, first = ds["key"].values == 0, float(values.sel(key=0).mean())
    if zero.all():
        return first, math.nan, UNKNOWN
    difference = over_documents(ds, values, lambda by_key: float(by_key[zero][0] - by_key[~zero].max()))
    return first, first - difference.value, difference


# ------------------------------------------------------------------------------------------------------------ universality

LENGTH = 64  # tokens, in [Gu] Table 1
ALONE = "no other position measured (usually 1 to 7) has as high a sink rate as position 0, in every model with a sink"
INPUTS = {"sinks": "prose", "code/sinks": "code", "chat/sinks": "under the chat template"}  # by kind of result
BOTH = f"{real('sinks').command} && {real('code/sinks', more='--text code').command}"
ANY = f"{AT_ZERO} in every model on all of prose, code and chat that were measured, two at least"
SWAPPED = f"behind another embedding there ({' and '.join(ANCHORS)})"
COLLECTS = 0.1  # above uniform attention; ours
ALL_KEYS = real("all-keys/sinks", more="--keys all --reacts off")
COLLECTING = f"no token of three prompts or more at keys 1 to T/2 has an alpha {COLLECTS:g} above uniform in any block"


TABLE = {  # percent, of natural text
    "openai-community/gpt2-xl": 77.00,
    "mistralai/Mistral-7B-v0.1": 97.49,
    "meta-llama/Llama-2-7b-hf": 92.47,
    "meta-llama/Llama-2-13b-hf": 91.69,
    "meta-llama/Meta-Llama-3-8B": 99.02,
}
RATES = ", ".join(f"{model.rpartition('/')[2]} {rate:.2f} %" for model, rate in TABLE.items())
THOSE = real("sinks", only=[*TABLE], options=f"--prompts 100 --length {LENGTH}", out="runs/gu")
AS_PUBLISHED = f"sink rates (threshold 0.3, T = {LENGTH}) within a quarter of the published ones"


@gu("sink-rates", "Table 1", rule=AS_PUBLISHED, published=RATES, needs=THOSE)
def _(ds: xr.Dataset) -> Told:
    """In GPT2-XL, Mistral 7B, Llama-2 7B and 13B and Llama-3 8B the first token is a sink in most heads."""
    length, measured = ds.sizes.get("position", 0), sink_rate(ds)
    words = f"{told(measured, '.1f', lambda share: 100 * share)} % at T = {length}"
    rate = TABLE[str(ds.attrs["model"])] / 100
    return (words, near(measured, rate)) if length == LENGTH else (f"{words}, published at T = {LENGTH}", None)


@gu("sinks-in-small-models", "3.4, Fig. 4", rule=f"{AT_ZERO} in every model")
def sinks_in_small_models(ds: xr.Dataset) -> Told:
    """Attention sinks exist in all auto-regressive language models, even in small ones."""
    rate = sink_rate(ds)
    return told(rate, ".3f"), above(rate, THERE)


@gu("no-meaning-needed", rule=f"{AT_ZERO} in every model, {SWAPPED}", needs=real("bos-swap"))
def _(ds: xr.Dataset) -> Told:
    """The first token is a sink whatever it means, BOS or not."""
    rates = {name: estimated(ds, "sink_rate_after_of_model", replacement=name, key=0) for name in ANCHORS}
    words = ", ".join(f"{told(rate, '.3f')} ({name})" for name, rate in rates.items())
    return words, every(above(rate, THERE) for rate in rates.values())


@gu("sinks-with-various-inputs", rule=ANY, needs=replace(real(*INPUTS), command=BOTH))
def _(inputs: Results) -> Told | None:
    """Attention sinks exist whatever the input is."""
    rates = {INPUTS[kind]: sink_rate(ds) for kind, ds in inputs.items()}
    words = ", ".join(f"{name} {told(rate, '.3f')}" for name, rate in rates.items())
    return (words, every(above(rate, THERE) for rate in rates.values())) if len(rates) > 1 else None


@gu("first-token-above-uniform", rule="mean weight on position 0 above that of uniform attention under the same masks")
def _(ds: xr.Dataset) -> Told:
    """Language models give the first token significant attention."""
    even = float(ds["uniform"].mean("layer").sel(key=0))
    alpha = over_documents(ds, ds["alpha"].sel(key=0))
    return f"{told(alpha, '.3f')} (uniform {number(even, '.3f')})", above(alpha, even)


@gu("first-token-alone", "3.1", rule=ALONE)
def _(ds: xr.Dataset) -> Told:
    """The attention sink is the first token, and no other."""
    first, most, difference = ahead(ds, sinks(ds))
    words = f"{number(first, '.3f')}, others at most {number(most, '.3f')}"
    return words, above(difference, 0) if max(first, most) >= THERE else None


@gu("no-token-collects", "3.1", rule=COLLECTING, needs=ALL_KEYS)
def _(ds: xr.Dataset) -> Told | None:
    """Attention collects at the first token, and at no token behind it."""
    there = ds["token_excess"].where(ds["token_id"] >= 0)
    if there.isnull().all():
        return None
    most = ds.isel(there.argmax(["layer", "collector"]))
    token, block = most["collector_token"].item(), most["layer"].item()
    each = (estimated(ds.isel(layer=a, collector=b), "token_excess") for a, b in np.argwhere(there.notnull().values))
    words = f"most at '{token}' in block {block}: {told(estimated(most, 'token_excess'), '.3f')}"
    return words, every(below(excess, COLLECTS) for excess in each)


# ------------------------------------------------------------------------------------------------ keys, values and streams

MEDIAN = "in the median, known within a quarter, of each model's heads with a mean weight above 0.3 on position 0"
SMALL, LARGE = 0.5, 2.0  # times the others' norm; ours
LARGER = f"the norm at position 0, known within a quarter, is above {LARGE:g} times the others' in some block"
MASSIVE = "in every model some dimension at position 0 exceeds 100 and is above 1,000 medians in some block"


def in_attending(ds: xr.Dataset, values: xr.DataArray) -> np.ndarray:
    """Values of the heads that attend to position 0."""
    return values.values[ds["attends"].values > ATTENDS]


def small_in_median(ratio: np.ndarray, words: str, limit: float = 1.0) -> Told:
    """Whether the median head's ratio is small; a model's heads are no sample, so that it is known as sizes of sinks are."""
    if not ratio.size:
        return "no head attends", None
    count = f"below {limit:g} in {np.count_nonzero(ratio < limit)} of {plural(ratio.size, 'head')}"
    return f"{words}, {count}", below(roughly(float(np.median(ratio)), QUARTER), math.log(limit))


def norm_below(ds: xr.Dataset, name: str, limit: float) -> Told:
    """Whether position 0's norm against the mean of the others is small in the heads that attend to it."""
    ratio = in_attending(ds, ds[name].sel(place="sink") / ds[name].sel(place="rest"))
    return small_in_median(ratio, f"{listed(ratio)} of the others'", limit)


@gu("values-small", "3.1, Fig. 2", rule=f"the value's norm at 0 is below {SMALL:g} times the others' mean {MEDIAN}")
def _(ds: xr.Dataset) -> Told:
    """Values of the sink are much smaller than those of other tokens."""
    return norm_below(ds, "value_norm", SMALL)


@gu("keys-small", "3.1, Fig. 2", rule=f"the key's norm at 0 is below the others' mean {MEDIAN}")
def _(ds: xr.Dataset) -> Told:
    """Keys of the sink are smaller than those of other tokens."""
    return norm_below(ds, "key_norm", 1.0)


@gu("stores-attention", rule=f"position 0's share of the output's size is smaller than its weight {MEDIAN}")
def _(ds: xr.Dataset) -> Told:
    """Sinks store extra attention without contributing to the value computation, as key biases would."""
    ratio = in_attending(ds, ds["reads"] / ds["attends"])
    return small_in_median(ratio, f"share over weight {listed(ratio)}")


@followed("stream-of-sink-large", rule=LARGER)
def _(ds: xr.Dataset) -> Told:
    """From some block on the first token's hidden state is significantly larger than the others'."""
    ratio = (ds["norm_first"] / ds["norm_others"]).isel(first=0).values
    at = int(np.argmax(ratio))
    return f"{ratio[at]:.1f} times before block {at}", above(roughly(float(ratio[at]), QUARTER), math.log(LARGE))


@followed("massive-activations", "3.1, after [Sun]", rule=MASSIVE)
def _(ds: xr.Dataset) -> Told:
    """The first token has massive activations."""
    first = ds.isel(first=0)
    count, largest = float(first["massive"].isel(rule=0).max()), three_digits(float(first["top_ratio"].max()))
    return f"{count:g} dimension{'s' * (count != 1)}, largest {largest} medians", count > 0  # a mean over prompts


# ------------------------------------------------------------------------------------------------------ controlled training

STEP = re.compile(r"(?:.*/)?(?P<model>[^/@]+)[@/]step(?P<step>\d+)")
EMERGES = (1000, 2000)  # steps, of the published models of 60 million parameters
Courses = Sequence[Mapping[float, float]]  # of runs, by step
STEPS = ("/step0", "/step100", "/step300", "/step1000", "")
COURSE = training("steps", ["tiny-llama"], "--reacts off --prompts 16", (1, 2), STEPS)
WHEN = f"the steps measured around the first sink rate of {THERE:g} lie within in each of {RUNS} runs or more (in none: not)"
WINDOWS, LOGITS = ("tiny-llama", "tiny-mistral-window"), ("tiny-sink-logits", "tiny-no-sink-logits")
PREVENTS = f"{AT_ZERO} in {{}}, below in {{}}, {OVER_RUNS} of each"
FIRST = f"mean weight against uniform attention's is above 1 at position 0 and higher than at any other, {OVER_RUNS}"
CONTROL = runs("sinks", *LOGITS, seeds=(0, 1, 2))


def judge_courses(collected: Collected, tell: Tell) -> Judged | None:
    """For the tests of sink rates by step, one course per controlled run; the end, which no name tells, is infinity."""
    courses: dict[str, dict[float, xr.Dataset]] = {}
    for name, ds in {**collected["steps"], **collected["controlled/steps"]}.items():
        match = STEP.fullmatch(name)
        model, step = (match["model"], float(match["step"])) if match else (name.rpartition("/")[2], math.inf)
        courses.setdefault(model, {})[step] = ds
    courses = {model: dict(sorted(steps.items())) for model, steps in courses.items() if len(steps) > 1 and 0 in steps}
    used = [ds for steps in courses.values() for ds in steps.values()]

    def words_and_test(courses: Mapping[str, Mapping[float, xr.Dataset]]) -> Told:
        rates = {model: {step: sink_rate(ds).value for step, ds in steps.items()} for model, steps in courses.items()}
        words = (
            f"{model}: " + ", ".join(f"{rate:.3f} at step {step:,.0f}" for step, rate in course.items())
            for model, course in rates.items()
        )
        return "; ".join(words).replace("step inf", "the end"), tell(list(rates.values()))

    return judged(case(words_and_test, courses), f"{', '.join(courses)} over training", used) if courses else None


emerging = gu.but(needs=Evidence("controlled", judge_courses, COURSE, "tiny-llama over its training"))


@emerging("emerges-in-training", "section 4", rule=f"{AT_ZERO} at the last step and below at step 0, {OVER_RUNS}")
def _(courses: Courses) -> Test:
    """Attention sinks are not there at initialization; they emerge in training."""
    first, last = (over_training([list(course.values())[at] for course in courses]) for at in (0, -1))
    return every([below(first, THERE), above(last, THERE)])


@emerging("emerges-when", "Fig. 4", rule=WHEN, published=f"{EMERGES[0]:,} to {EMERGES[1]:,} steps")
def _(courses: Courses) -> Test:
    """The attention sink emerges between 1,000 and 2,000 steps of training."""

    def within(course: Mapping[float, float]) -> Verdict:
        first = next((step for step, rate in course.items() if rate >= THERE), math.inf)
        last = max((step for step in course if step < first), default=0.0)
        if EMERGES[0] <= last and first <= EMERGES[1]:
            return "holds"
        return "does not hold" if last >= EMERGES[1] or first <= EMERGES[0] else "undecided"

    verdicts: list[Verdict] = [within(course) for course in courses]
    agreed = verdicts[0] if len(verdicts) >= RUNS and len({*verdicts}) == 1 else "undecided"
    return lambda level: agreed


def of_runs(results: Results) -> list[float]:
    """Sink rates of one model's runs."""
    return [sink_rate(ds).value for ds in results.values()]


def prevents(without: Sequence[float], with_it: Sequence[float]) -> Test:
    """Whether there is a sink without something, and none with it."""
    return every([above(over_training(without), THERE), below(over_training(with_it), THERE)])


@windows("window-absolute-first", rule=FIRST, needs=runs("sinks", WINDOWS[1]))
def _(models: Sequence[Results]) -> Told:
    """Under sliding-window attention the sink is the absolute first token."""
    numbers = [ahead(ds, ds["alpha"] / ds["uniform"].mean("layer")) for ds in models[0].values()]
    first, most = [of_run[0] for of_run in numbers], [of_run[1] for of_run in numbers]
    difference = over_training([a - b for a, b in zip(first, most, strict=True)])
    words = f"{listed(first)} times uniform at 0, others at most {listed(most)}"
    return words, every([above(over_training(first), 1), above(difference, 0)])


@windows("window-prevents", rule=PREVENTS.format(*WINDOWS), needs=runs("sinks", *WINDOWS))
def _(models: Sequence[Results]) -> Told:
    """Small windows prevent the emergence of attention sinks."""
    plain, narrow = map(of_runs, models)
    words = f"{WINDOWS[0]} {listed(plain, '.3f')}; {WINDOWS[1]} {listed(narrow, '.3f')}"
    return words, prevents(plain, narrow)


DEPENDS = "sink rates of three runs or more with another setting against three of the base, by Welch's t: not run"
of_training = gu.but(needs=unmeasured(training("sinks", ["tiny-llama"], "", (1, 2)), "tiny-llama", "controlled"))
for short, setting in (("rate", "learning rate"), ("data", "amount of data"), ("weight-decay", "weight decay")):
    claim = f"How large the attention sink becomes depends on the {setting} of training."
    of_training(f"depends-on-{short}", "section 4", claim, rule=DEPENDS)(lambda models: None)


@gu("learned-sink-replaces-first", "our control", rule=PREVENTS.format(*LOGITS[::-1]), kind="ours", needs=CONTROL)
def _(models: Sequence[Results]) -> Told:
    """A learned sink logit in every head takes the place of the sink at position 0."""
    learned, plain = map(of_runs, models)
    shares = [float(ds["sink_logit_share"].mean()) for ds in models[0].values() if "sink_logit_share" in ds]
    words = f"{LOGITS[0]} {listed(learned, '.3f')} (weight on the learned logit {listed(shares)})"
    return f"{words}; {LOGITS[1]} {listed(plain, '.3f')}", prevents(plain, learned)
