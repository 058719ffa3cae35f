"""Another embedding at position 0: what a model does without its first token.

`bos_swap` runs several measures on the model and on a view of it under each intervention (`probes.models.swap`). What is
removed, by which definitions, what a sink is anchored to, and how to read it stand on the measure's page
(`docs/probes/bos-swap.md`).

**Intervals** (95 %) are paired. Of leakage they are percentiles of the bootstrap: each resample draws the prompts once,
within each half, and takes the same ones before and after. All others are the jackknife's over documents, those of recall
over couples of lists: each leaves the same ones out before and after.

**Loss.** `-log p` of the token at i + 1 read out at position i, in nats. Where the next token of some prompt is one that
the model's head excludes (toys that predict labels only) there is no loss: NaN, left out of a prompt's mean over positions.

**What has no leakage.** Without key 0, log-weights of it are minus infinity; under the other changes of weights logits and
denominators are no longer those that mask and stream make. There leakage after the intervention is NaN.

**Jacobian profile.** Sensitivity to what block 0 reads, with the same probes before and after. At position 0 that is the
sensitivity to the replacement, another point; `profile_change` is over the positions from 1 on.

Source: [Ruscio], arXiv 2606.06160, removes 40 % at early queries.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ...errors import InputError
from ...models.checks import check_logits
from ...models.load import takes_model
from ...models.view import View
from ...models.words import Intervention, intervention
from ...results.curves import estimate, relative_error
from ...results.dataset import Variable, dataset, provenance, with_low_high
from ...results.statistics import ends, jackknife, unit_of
from ...run.memory import Retry
from ...run.progress import Progress, Tally, part
from ...run.store import Store
from ..consequences import RECALLED, check_recall, consequences, known_mean
from ..jacobian import PRODUCTS, jacobian
from ..leakage.compute import LAGS, band_coordinates, check
from ..leakage.forms import resampling, splits
from ..retrieval import retrieval
from ..sinks import THRESHOLD, sinks
from ..sinks.compute import FIRST_KEYS
from ..sinks.sums import Sums

PROFILE_PROMPTS = 4
# When each is measured, as shares of a side's time.
STAGES = {
    "leakage": (0.0, 0.5),
    "sinks": (0.5, 0.6),
    "loss": (0.6, 0.7),
    "sensitivity": (0.7, 0.9),
    "recall": (0.9, 1.0),
}
LEAST = {"profile_prompts": 0, "products": 2, "recall": 0}
PLACE, TOKEN, LEAST_SINK = 0.5, 0.1, 0.05  # of the sink rate: kept, kept, before; ours
ANCHORS = ("mean", "random")  # the replacements that tell a place from a token


class Definition(NamedTuple):
    """One of leakage's variables, the entries whose sum it is, and what is made of blocks and heads."""

    form: str
    entries: tuple[int, ...] = (0,)
    over: Callable[..., np.ndarray] = np.mean


V_X, LEFT_IN, TOTAL = "V(X)", "V(X), the constant sink left in", "total leakage"
LEAKAGE = {
    V_X: Definition("steady_stream", over=np.median),
    LEFT_IN: Definition("log_stream", over=np.median),
    "V(X), mean over heads": Definition("steady_stream"),
    "V(X), mean over heads, the constant sink left in": Definition("log_stream"),
    "Shapley value, mean over heads": Definition("parties", (6, 7, 8)),  # the stream's row
    "Shapley value, mean over heads, the constant sink left in": Definition("log_source", (1,)),
    "through logits alone, V(S)": Definition("log_form", (1,)),
    "through denominators alone, V(D)": Definition("log_form", (3,)),
    TOTAL: Definition("log_form", over=np.median),
    "share of variance that position explains": Definition("position_share", over=np.median),
}
SINK, WEIGHT, MOVED = "sink rate", "weight on position 0", "pattern over other keys"
DEFINITIONS = (*LEAKAGE, SINK, WEIGHT, MOVED)
WHAT = {
    "before": "before the swap",
    "after": "after the swap",
    "removed": "before less after",
    "share": "removed by the swap, as a share of what was there",
}
RECALL = {
    "log_p": Variable((), "recall, log probability of the value", "nat"),
    "exact": Variable((), "recall, share of exact answers"),
}
RATE = f"sink rate, share of heads with alpha > {THRESHOLD:g}"
FROM_1 = "mean over positions from 1 on"
Side = dict[str, np.ndarray]  # definitions of leakage [resample, band]; all else by prompt, list or profiled prompt
Variables = dict[str, tuple[Any, ...]]
Three = tuple[Any, Any, Any]  # an estimate, and the ends of its interval


@takes_model
def bos_swap(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    replacement: Any = "mean",
    seed: int = 0,
    bands: Any = None,
    lags: Any = LAGS,
    bootstrap: int = 400,
    profile_prompts: int = PROFILE_PROMPTS,
    products: int = PRODUCTS,
    recall: int = 0,
    documents: Sequence[str] | None = None,
    pieces: Store | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """What another embedding at position 0 does to leakage, sinks, next-token loss and the Jacobian profile.

    Args:
        model: any view; it is not changed.
        tokens: ids [prompt, position], at least 4 prompts, as in `probes.leakage`. Position 0, BOS or not, is replaced.
        replacement: a token id, "mean", "zero", "random" or "drawn", see `swapped`; or an intervention by its name, as
            "mean@4:keys" or "without-0@8", see `probes.edited`; or a list of such. Means are taken over `tokens`.
        seed: of the resampling, the sketch's probes and the random direction.
        bands, lags, bootstrap: as in `probes.leakage`.
        profile_prompts: how many prompts the Jacobian profile is taken on, the first ones; all, if there are fewer; 0: no
            profile.
        products: of its sketch, per prompt.
        recall: how many lists recall is measured on, an even number; 0: none.
        documents: what each prompt is a window of, as in `probes.leakage`.
        pieces: where parts are kept for an interrupted call (`probes.run.store`); in memory unless given.
        progress: called with (share of the work done, 1).

    Returns:
        Dataset; of several replacements all but `tokens` has the leading dimension `replacement`, and the model as it is
        was measured once. With intervals `..._low` and `..._high`, see the module's text:
        `component_before`, `component_after`, `component_removed`, `component_share` [definition, band]: leakage's residual
        component by every definition, nat^2 in the log form; of the sink in the first band alone, over all queries.
        `sink_rate_before`, `sink_rate_after` [layer] of key 0, and `sink_rate_..._of_model` [key], with its change;
        `sink_rate_kept`, after / before of key 0. `loss_change [position]`, NaN at the last, which predicts nothing;
        `loss_..._of_model` (mean over positions from 1 on), before, after and the change; `kl_of_model`, nats; with
        `recall` `recall_log_p_...` and `recall_exact_...`, before, after and the change. `sensitivity_before`,
        `sensitivity_after` [position], geometric means over prompts, and `profile_change`.
        By prompt `sink_rate_..._by_prompt` [prompt, key], `loss_..._by_prompt`, `kl_by_prompt`; by list
        `recall_..._by_list`. The attribute `anchoring` where both of `ANCHORS` are among the replacements.
        `tokens`; attributes say what made it, a single `replacement` among them.

    Raises:
        InputError: no such replacement or one twice, an option that cannot be used, prompts that do not fit bands and lags,
            or values that are not finite.

    Source: science of the measurement, section 4; [Ruscio], arXiv 2606.06160.
    """
    swaps = _interventions(replacement)
    bands, lags = check(model, tokens, bands, lags)
    options: dict[str, Any] = {"bands": bands, "lags": lags, "seed": seed, "bootstrap": bootstrap}
    options |= {"profile_prompts": profile_prompts, "products": products, "recall": recall}
    for name, least in LEAST.items():
        if options[name] < least:
            raise InputError(f"{name}={options[name]} is too few; give {least} or more")
    if recall:
        check_recall(model, recall)
    check_logits(model)
    views = {name: swap.on(model, tokens, seed=seed) for name, swap in swaps.items()}
    drawn = resampling(len(tokens), bootstrap, seed, documents)
    unit = unit_of(len(tokens), documents)
    pieces, share = pieces or Store(), 1 / (1 + len(swaps))
    before = _side(model, tokens, options, drawn, pieces.within("before"), part(progress, 0.0, share))
    results = []
    for n, (name, view) in enumerate(views.items(), 1):
        heard = part(progress, n * share, (n + 1) * share)
        unknown = None if swaps[name].leaks else before
        after = _side(view, tokens, options, drawn, pieces.within(name), heard, model, unknown)
        if swaps[name].embeds:
            after["moved"] = _moved(model, view, tokens, pieces.within(name).within("moved"))
        results.append(_compared(before, after, unit))
    if progress is not None:
        progress(1.0, 1.0)
    alone = len(swaps) == 1
    chosen: Any = next(iter(swaps.values())).label if alone else list(swaps)
    made = provenance(model, tokens, measurement="bos_swap", replacement=chosen, **options)
    ds = dataset(
        results[0] if alone else _along_replacements(results),
        tokens=tokens,
        coords={
            **({} if alone else {"replacement": chosen}),
            "definition": list(DEFINITIONS),
            "key": range(min(FIRST_KEYS, tokens.shape[1])),
            **({"list": range(recall)} if recall else {}),
            "layer": range(model.spec.blocks),
            **band_coordinates(options["bands"]),
        },
        attrs=made | ({"replacement": chosen} if alone else {}),
    )
    return ds.assign_attrs({"anchoring": verdict} if (verdict := anchoring(ds)) else {})


def _interventions(given: Any) -> dict[str, Intervention]:
    """By name, in order."""
    chosen = [intervention(one) for one in (given if isinstance(given, (list, tuple)) else [given])]
    named = {str(one.label): one for one in chosen}
    if not chosen or len(named) < len(chosen):
        raise InputError(f"replacements {', '.join(str(one.label) for one in chosen)}: give one or more, each once")
    return named


def _side(
    model: View,
    tokens: Tensor,
    options: Mapping[str, Any],
    drawn: Tensor,
    pieces: Store,
    progress: Progress | None,
    original: View | None = None,
    unknown: Side | None = None,
) -> Side:
    """The model as it is, or another one and how far it is from the `original`.

    Where the leakage of that one means nothing, it is NaN in the shape of `unknown`.
    """
    heard = {name: part(progress, *stage) for name, stage in STAGES.items()}
    if unknown is None:
        forms = splits(model, tokens, options["bands"], options["lags"], drawn, heard["leakage"], pieces=pieces)
        found = {
            name: one.over(forms[one.form][:, list(one.entries)].sum(1), axis=(1, 2)) for name, one in LEAKAGE.items()
        }
    else:
        found = {name: np.full_like(unknown[name], np.nan) for name in LEAKAGE}
    keys = range(min(FIRST_KEYS, tokens.shape[1]))
    alpha = sinks(model, tokens, keys=keys, pieces=pieces, progress=heard["sinks"])["alpha"]
    alpha = alpha.transpose("prompt", "layer", "head", "key").values
    found |= {SINK: (alpha > THRESHOLD).mean(2), WEIGHT: alpha[..., 0].mean((1, 2))}  # [prompt, layer, key], [prompt]
    losses, divergences = consequences(model, tokens, original, heard["loss"], pieces=pieces)
    found |= {"losses": losses} | ({} if divergences is None else {"kl": divergences})
    if len(first := tokens[: options["profile_prompts"]]):
        sketch: Any = {"method": "sketch", "products": options["products"], "seed": options["seed"]}
        ds = jacobian(model, first, **sketch, pieces=pieces, progress=heard["sensitivity"])
        found["sensitivity"] = ds["sensitivity"].transpose("prompt", "position").values
    if options["recall"]:
        lists = {"pairs": RECALLED, "contexts": options["recall"], "seed": options["seed"]}
        ds = retrieval(model, **lists, pieces=pieces, progress=heard["recall"])
        found |= {name: ds[name].mean("depth").values for name in RECALL}
    return found


def _moved(model: View, other: View, tokens: Tensor, pieces: Store) -> Float[np.ndarray, " prompt"]:
    """How far patterns over the keys from 1 on move by another embedding at position 0, mean over heads."""
    retry = Retry(f"a prompt of {tokens.shape[1]} positions of '{model.identity.name}'")
    return Sums(model, tokens, (0,), Tally(None)).measured([model, other], retry, pieces)["reacts"].mean((1, 2))


# ----------------------------------------------------------------------------------------------------- what is reported


def _along_replacements(results: Sequence[Variables]) -> Variables:
    """Variables of each replacement along a leading dimension."""
    return {
        name: (("replacement", *dims), np.stack([one[name][1] for one in results]), attrs)
        for name, (dims, _, attrs) in results[0].items()
    }


def _compared(before: Side, after: Side, unit: Int[np.ndarray, " prompt"]) -> Variables:
    """All that is reported of a replacement."""
    one, other = before[SINK], after[SINK]
    found = _components(before, after, unit) | _both(
        "sink_rate", Variable(("layer",), RATE), one[..., 0], other[..., 0], unit
    )
    of_model = Variable(("key",), f"{RATE}, mean over blocks")
    found |= _both("sink_rate", of_model, one.mean(1), other.mean(1), unit, "_of_model", "_by_prompt")
    ratio = Variable((), "sink rate of key 0 after the swap / before")
    found |= with_low_high("sink_rate_kept", ratio, kept(one[..., 0].mean(1), other[..., 0].mean(1), unit))
    one, other = before["losses"], after["losses"]
    # The last position predicts nothing.
    change = (np.append(end, np.nan) for end in jackknife(_mean, other - one, unit))
    words = Variable(("position",), "change of the next-token loss by the swap", "nat")
    found |= with_low_high("loss_change", words, change)
    one, other, kl = (known_mean(values[:, 1:]) for values in (one, other, after["kl"]))
    of_model = Variable((), f"next-token loss, {FROM_1}", "nat")
    found |= _both("loss", of_model, one, other, unit, "_of_model", "_by_prompt")
    words = Variable((), f"KL divergence of the next token from the model as it is, {FROM_1}", "nat")
    found |= with_low_high("kl_of_model", words, jackknife(_mean, kl, unit))
    found["kl_by_prompt"] = words._replace(dims=("prompt",)).of(kl)
    for name in (name for name in RECALL if name in before):
        of_lists, couple = (before[name], after[name]), np.arange(len(before[name])) // 2
        found |= _both(f"recall_{name}", RECALL[name], *of_lists, couple, "", "_by_list")
    if "sensitivity" in before:
        found |= _of_profiles(before["sensitivity"], after["sensitivity"], unit)
    return found


def _both(
    name: str, variable: Variable, one: np.ndarray, other: np.ndarray, unit: np.ndarray, of: str = "", by: str = ""
) -> Variables:
    """Means over prompts or lists [sample, ...] before and after, of their change too, and by sample where it has a name."""
    found: Variables = {}
    for when, values in {"before": one, "after": other, "change": other - one}.items():
        words = variable._replace(long_name=f"{variable.long_name}, {when}{' by' if when == 'change' else ''} the swap")
        found |= with_low_high(f"{name}_{when}{of}", words, jackknife(_mean, values, unit))
        if by and when != "change":
            dims = (by.rpartition("_")[2], *variable.dims)
            found[f"{name}_{when}{by}"] = words._replace(dims=dims).of(values)
    return found


def _of_profiles(one: np.ndarray, other: np.ndarray, unit: np.ndarray) -> Variables:
    """Profiles [prompt, position], geometric means over prompts, and how far they are apart; the weights are the same."""
    unit, sides = unit[: len(one)], np.stack([one, other], 1)
    curve = Variable(("position",), "||J_j||_F / sqrt(d), geometric mean over prompts")
    found: Variables = {}
    for when, ends_of in zip(
        ("before", "after"), np.moveaxis(np.stack(jackknife(_geometric, sides, unit)), 1, 0), strict=True
    ):
        found |= with_low_high(f"sensitivity_{when}", curve, ends_of)
    change = jackknife(lambda some: relative_error(_geometric(some)[1, 1:], _geometric(some)[0, 1:]), sides, unit)
    words = Variable((), "|after / before - 1| of the profile, mean over positions from 1 on")
    return found | with_low_high("profile_change", words, change)


def _components(before: Side, after: Side, unit: np.ndarray) -> Variables:
    """What is there before and after by every definition, what is removed, and its share."""
    rows = []
    for name in LEAKAGE:
        one, other = before[name], after[name]
        rows.append([*map(resampled, (one, other, one - other)), share(one, other)])
    unknown = np.full_like(rows[0][0], np.nan)  # [estimate, band]

    def early(three: Three) -> np.ndarray:
        return np.where(np.arange(unknown.shape[1]) == 0, np.stack(three)[:, None], unknown)

    for name in (SINK, WEIGHT):
        one, other = (side[name] if side[name].ndim == 1 else side[name][..., 0].mean(1) for side in (before, after))
        there = jackknife(_mean, one, unit)
        value, low, high = kept(one, other, unit)
        lost: Three = (1 - value, 1 - high, 1 - low) if there[1] > 0 else (np.nan, np.nan, np.nan)
        rows.append([*map(early, (there, *(jackknife(_mean, x, unit) for x in (other, one - other)), lost))])
    moved = early(jackknife(_mean, after["moved"], unit)) if "moved" in after else unknown
    rows.append([unknown, unknown, unknown, moved])
    stacked = np.moveaxis(np.array(rows), (1, 2), (0, 1))  # [what, estimate, definition, band]
    found: Variables = {}
    for (what, words), three in zip(WHAT.items(), stacked, strict=True):
        variable = Variable(("definition", "band"), f"residual component of leakage by definition, {words}")
        found |= with_low_high(f"component_{what}", variable, three)
    return found


def resampled(resamples: Float[np.ndarray, "resample band"]) -> Float[np.ndarray, "estimate band"]:
    """The estimate, and the ends of its interval."""
    return np.stack([resamples[0], *ends(resamples)])


def share(
    before: Float[np.ndarray, "resample band"], after: Float[np.ndarray, "resample band"]
) -> Float[np.ndarray, "estimate band"]:
    """`1 - after / before` with its interval; NaN where the interval of `before` does not lie above 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        removed = resampled(np.where(before > 0, 1 - after / before, np.nan))
    return np.where(resampled(before)[1] > 0, removed, np.nan)


def kept(one: Float[np.ndarray, " prompt"], other: Float[np.ndarray, " prompt"], unit: np.ndarray) -> Three:
    """The mean after over the mean before, with its interval; NaN where nothing was there."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return jackknife(lambda some: np.divide(*some.mean(0)), np.stack([other, one], 1), unit)


# ----------------------------------------------------------------------------------------------------------- anchoring


def anchoring(ds: xr.Dataset) -> str:
    """Whether a model's sink is anchored to a place or a token; "" where that was not measured."""
    if "sink_rate_kept" not in ds or not {*ANCHORS} <= {*map(str, np.atleast_1d(ds.get("replacement", "")))}:
        return ""
    before = estimate(ds.isel(replacement=0), "sink_rate_before_of_model", key=0)
    return anchored(before, [estimate(ds, "sink_rate_kept", replacement=name) for name in ANCHORS])


def anchored(before: tuple[float, float, float], shares: Sequence[tuple[float, float, float]]) -> str:
    """In words, from the sink rate before and what is kept of it under every replacement, each with its interval."""
    if np.isnan(before[1]):
        return "undecided: it takes two documents"
    if before[1] <= LEAST_SINK:
        return "no sink to anchor"
    if all(low > PLACE for _, low, _ in shares):
        return "place-anchored"
    return "token-anchored" if all(high < TOKEN for _, _, high in shares) else "mixed"


# --------------------------------------------------------------------------------------------------------------- means


def _mean(values: np.ndarray) -> Any:
    return values.mean(0)


def _geometric(values: np.ndarray) -> Any:
    with np.errstate(divide="ignore"):  # a zero stays one
        return np.exp(np.log(values).mean(0))
