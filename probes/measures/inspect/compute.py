"""One text, token by token: how strongly the next-token prediction depends on each of them, and on their content.

What is measured (`of`). A step dx_j of the input of block 0 at position j changes the next-token distribution p by
KL = dx_j^T J_j^T F J_j dx_j / 2 to leading order, with J_j = d logits / dx_j and F = diag(p) - p p^T (Fisher's information).
The default, "prediction", is therefore

    sensitivity_j = ||F^(1/2) J_j||_F / sqrt(d),    ||F^(1/2) J_j||_F^2 = sum_v p_v ||d log p_v / dx_j||^2,

so that a random step of length e at position j costs (e sensitivity_j)^2 / 2 nats. It is the gradient of log p of every
token, weighted by how probable it is. "logits", ||J_j||_F / sqrt(d), is the readout of `probes.jacobian`: it weighs
unlikely tokens as much as likely ones, and counts shifts of all logits together, which change no prediction. A
single token's ||d log p_v / dx_j|| / sqrt(d) (of "top", the most probable one, or any) is one product, exact, and blind
to what moves probability between the others. So is that of two, ||d (logit_v - logit_w) / dx_j|| / sqrt(d), the contrast of
two answers. All go through `probes.jacobian`, by a view whose unembedding is the readout.

What it is divided by (`baseline`). Where blocks cannot be taken apart, fresh models are measured instead of "init"'s theory.
"text" is smoothed over neighbours in logarithms, but for both ends; what is left is content alone. "kernel" divides out
where heads look, which is most of what content does (on the bundled models what is left has a quarter of the spread); what
is left is how well directions line up.

The recency part is read off the baseline alone, so that content has no influence (the measured profile under "none"): the
last position, and those right before it for as long as the baseline stands out (`probes.results.ushape.parts_of`).
"""

import json
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from ...data.chat import Chat
from ...data.prompts import FirstToken, draw
from ...errors import InputError, check_choice, near
from ...models.behind import continued
from ...models.checks import check_id, not_finite
from ...models.initialization import CONFIG, Rule, check_rule
from ...models.load import takes_model
from ...models.view import Identity, View
from ...results.curves import smooth_between, spearman
from ...results.dataset import Variable, dataset, provenance
from ...results.ushape import PARTS, parts_of, typical
from ...run.progress import Progress, part
from ...run.store import Store
from ...theory.kernel import second_moment
from ..jacobian import jacobian
from ..reading import Ids, one_token, read_prompt, token_name

Baseline = Literal["init", "kernel", "text", "none"]

BASELINES: tuple[Baseline, ...] = ("init", "kernel", "text", "none")
WORDS = ("prediction", "logits", "top")
Of: TypeAlias = str | int | tuple[int | str, int | str]  # what depends on the tokens: one of `WORDS`, a token, or two
# A token by its id, or by its text in double quotes, where a backslash stands before a quote or itself, n, r or t.
TOKEN = r'(\d{1,18}|"(?:[^"\\]|\\["\\nrt])*")'
TOKENS = re.compile(f"{TOKEN}(?:-{TOKEN})?", re.ASCII)
WINDOWS = 8  # other texts for the baseline "text"; twice as many change the bundled models' by less than content varies
PREDICTIONS = 5  # most probable next tokens that are kept
MEASURED = 0.5  # the share of progress that the text itself takes


class Readout:
    """`View` of another view's model whose `unembed` is something else made of the next-token logits."""

    def __init__(self, model: View, unembed: Callable[[Tensor], Tensor]) -> None:
        self.original, self._unembed = model, unembed
        self.spec, self.tokenizer, self.first_ids, self.bos = model.spec, model.tokenizer, model.first_ids, model.bos
        self.device, self.dtype, self.offloaded = model.device, model.dtype, model.offloaded
        self.embed, self.trace, self.residual = model.embed, model.trace, model.residual
        self.watching = model.watching
        self.output_weights, self.output_norm = model.output_weights, model.output_norm
        self.norm, self.parts, self.reinitialized = model.norm, model.parts, model.reinitialized

    @property
    def identity(self) -> Identity:
        return self.original.identity

    def unembed(self, normed: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows readout"]:
        return self._unembed(normed)


@takes_model
def inspect(
    model: View,
    prompt: str | Ids | None = None,
    *,
    chat: Chat | None = None,
    answer: int | None = None,
    of: Of = "prediction",
    baseline: Baseline = "init",
    method: Literal["exact", "sketch"] = "sketch",
    products: int | None = None,
    first: FirstToken | int = "auto",
    seeds: int = 3,
    seed: int = 0,
    initialization: Rule = CONFIG,
    pieces: Store | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Sensitivity of the prediction that follows a text to each of its tokens, beside what position alone would give.

    Args:
        model: any view, or what `probes.load` makes one of; it is not changed.
        prompt: what the model reads: a text, whose spelled-out special tokens are read as such, or token ids, taken as they
            are. At least 8 tokens with the first one, and no more than the model was made for.
        chat: in its place a conversation, written by the model's chat template, as in `probes.prompts`.
        answer: so many tokens that the model writes after it, the most probable one each time, are read as well: what is
            inspected is the prediction after them.
        of: "prediction", "logits", "top", a token or two, see the module's text. A token is an id, or its text in double
            quotes: 1234, '" Paris"', '" Paris"-" Rome"'. Two may also be a tuple, (1234, 567) or (" Paris", " Rome").
        baseline: "init", "kernel", "text" or "none", see the module's text.
        method: of `probes.jacobian`; a single token takes one product, which is exact, whatever this says.
        products: of the sketch, 64 unless given.
        first: what stands at position 0 before a text, as in `probes.prompts`: "auto" is the model's BOS where it has one
            and the text does not begin with it.
        seeds: fresh models of the baseline "init".
        seed: of the sketch's probes and of the windows of the baseline "text".
        initialization: what the weights of these fresh models are drawn from, as in `probes.fresh`.
        pieces: where parts are kept for an interrupted call (`probes.run.store`); in memory unless given.
        progress: called with (share of the work done, 1).

    Returns:
        Dataset with `sensitivity`, `baseline` (scaled to it) and `ratio` [position]: NaN where neither reaches;
        coordinates `token` [position], as it stands in the text with control characters
        made visible, `part_of` [position], one of "sink", "rest", "recency", and for a chat `turn` [position], the role of
        the message that says the token, else "template" or "answer"; `share` and `baseline_share` [part] of
        the total squared sensitivity; `probability` [rank] of the most probable next tokens, with coordinates `next_id`
        and `next_token`; `tokens` [prompt, position]. Attributes say what made it, and `text` (JSON),
        `entropy` (of the prediction, nats) and `trend`, Spearman's correlation of ratio and position over "rest".

    Raises:
        InputError: no prompt or two, no tokenizer or chat template to read it with, one that is empty, too short or too
            long, a text in `of` that is not one token, an option that cannot be used, values that are not finite.

    Source: ours; the sensitivity is [Chowdhury]'s, arXiv 2603.10123, with Fisher's metric on the logits.
    """
    check_choice("baseline", baseline, BASELINES)
    check_choice("method", method, ("exact", "sketch"))
    if seeds < 1:
        raise InputError(f"seeds={seeds} fresh models are too few; give at least 1")
    check_rule(initialization)
    if initialization != CONFIG and baseline != "init":
        raise InputError(f"initialization '{initialization!s:.40}' has no use with baseline {baseline}; leave it out")
    of = _known(model, of)
    ids, shown, roles, text, origin = read_prompt(model, prompt, chat, first)
    if answer is not None:
        ids += continued(model, torch.tensor([ids]), answer)[0].tolist()
        _, shown, _, text, _ = read_prompt(model, ids, None, "auto")
        roles += ["answer"] * (len(ids) - len(roles)) if roles else []
    tokens = torch.tensor([ids])
    log_p = _log_probabilities(model, tokens)
    chosen: Any = int(log_p.argmax()) if of == "top" else of
    single = not isinstance(chosen, str)
    if single and products is not None:
        raise InputError(f"products={products} has no use with of={of}: one product is exact; leave it out")

    def measured(view: View, ids: Tensor, kept: Store, heard: Progress | None, method: str = "sketch") -> np.ndarray:
        how: Any = {"method": method, "products": products, "seed": seed}
        how = {"method": "scalar"} if single else how
        found = jacobian(readout(view, ids, chosen), ids, **how, readout="logits", pieces=kept, progress=heard)
        return found["sensitivity"].values[0].astype(float)

    pieces = pieces or Store()
    sensitivity = measured(model, tokens, pieces.within("text"), part(progress, 0.0, MEASURED), method)
    windows = draw(model, n=WINDOWS, length=len(ids), first=first, seed=seed).tokens if baseline == "text" else None
    known = baseline == "kernel" or (baseline == "init" and all(map(model.parts, range(model.spec.blocks))))
    count = {"none": 0, "kernel": 1, "text": WINDOWS, "init": seeds}[baseline]
    other, curves = model, [np.ones(len(ids))] if baseline == "none" else []
    for n in range(count):
        heard = part(progress, *(MEASURED + (1 - MEASURED) * at / count for at in (n, n + 1)))
        other = model.reinitialized(n, initialization=initialization) if baseline == "init" else model
        curve = partial(_kernel, of=chosen) if known else measured
        text_of = tokens if windows is None else windows[n : n + 1]
        curves.append(curve(other, text_of, pieces.within(f"baseline {n}"), heard))
    found = typical(np.stack(curves))
    if baseline == "text":
        found[found > 0] = np.exp(smooth_between(np.log(found[found > 0])))
    if progress is not None:
        progress(1.0, 1.0)

    ratio, scaled, parts = divided(sensitivity, found, bare=baseline == "none")
    rest = (parts == "rest") & np.isfinite(ratio)
    shares = [[float(np.sum(x[parts == p] ** 2) / np.sum(x**2)) for p in PARTS] for x in (sensitivity, scaled)]
    best = log_p.topk(min(PREDICTIONS, model.spec.vocabulary))
    unit = "1" if chosen == "logits" else "sqrt(nat) per unit of embedding"
    label = {"prediction": "||F^(1/2) J_j||_F / sqrt(d)", "logits": "||J_j||_F / sqrt(d)"}
    label["contrast"] = "||d (logit_v - logit_w) / dx_j|| / sqrt(d)"
    named = "contrast" if isinstance(chosen, tuple) else str(chosen)
    name, at = label.get(named, "||d log p_v / dx_j|| / sqrt(d)"), ("position",)
    variables = {
        "sensitivity": Variable(at, name, unit).of(sensitivity),
        "baseline": Variable(at, f"baseline '{baseline}', scaled", unit).of(scaled),
        "ratio": Variable(at, "sensitivity / baseline").of(ratio),
        "share": Variable(("part",), "share of the squared sensitivity").of(shares[0]),
        "baseline_share": Variable(("part",), "share of the squared baseline").of(shares[1]),
        "probability": Variable(("rank",), "of the next token").of(best.values.exp()),
    }
    coords = {
        "token": (at, shown),
        "part_of": (at, parts),
        **({"turn": (at, roles)} if roles else {}),
        "part": list(PARTS),
        "next_id": (("rank",), best.indices),
        "next_token": (("rank",), [token_name(model.tokenizer, int(i)) for i in best.indices]),
    }
    options = {"of": of, "baseline": baseline, "method": "exact" if single else method}
    options |= {
        "answer": answer,
        "products": products,
        "first": first,
        "seeds": seeds if baseline == "init" else None,
        "seed": seed,
    }
    attrs = {
        "text": json.dumps(text),
        "readout": _said(model.tokenizer, chosen),
        "baseline_by": "theory" if known else "measurement" if count else "nothing",
        "entropy": float(-(log_p.exp() * log_p.clamp_min(-1e4)).sum()),
        "trend": spearman(np.flatnonzero(rest), ratio[rest]) if rest.sum() > 1 else math.nan,
    }
    made = provenance(model, tokens, measurement="inspect", **options) | origin
    made |= {"initialization": other.identity.initialization} if baseline == "init" else {}
    return dataset(variables, tokens=tokens, coords=coords, attrs=made | attrs)


def readout(model: View, tokens: Tensor, of: Of) -> View:
    """The view whose logits are, to first order at the end of this prompt, what `of` says: "prediction", an id or two.

    For "prediction" they are sqrt(p_v) (logit_v - sum_u p_u logit_u), whose derivative has the norm in Fisher's metric.
    """
    if of == "logits":
        return model
    if isinstance(of, int):
        return Readout(model, lambda normed: model.unembed(normed).log_softmax(-1)[..., of : of + 1])
    if isinstance(of, tuple):
        one, other = (slice(int(at), int(at) + 1) for at in of)
        return Readout(model, lambda normed: (x := model.unembed(normed))[..., one] - x[..., other])
    p = _log_probabilities(model, tokens).exp()

    def unembed(normed: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows vocabulary"]:
        logits = model.unembed(normed)
        weights = p.to(logits)
        return weights.sqrt() * (logits - (weights * logits).sum(-1, keepdim=True))

    return Readout(model, unembed)


def divided(
    sensitivity: Float[np.ndarray, " position"], baseline: Float[np.ndarray, " position"], *, bare: bool = False
) -> tuple[Float[np.ndarray, " position"], Float[np.ndarray, " position"], np.ndarray]:
    """(ratio, the baseline scaled so that the ratio's geometric mean over "rest" is 1, the parts), all [position].

    `bare`: the baseline is no profile, and the parts are read off the sensitivity. Where both are zero the ratio is NaN.
    """
    parts = parts_of(sensitivity if bare else baseline)
    rest = (parts == "rest") & (sensitivity > 0) & (baseline > 0)
    if not rest.any():
        raise InputError(
            "no position between sink and recency reaches the prediction; give a longer text, or one within the window"
        )
    scale = math.exp(float(np.mean(np.log(sensitivity[rest] / baseline[rest]))))
    scaled = baseline * scale
    with np.errstate(divide="ignore", invalid="ignore"):
        return sensitivity / scaled, scaled, parts


def _known(model: View, of: Any) -> Of:
    """One of `WORDS`, the id of a token, or those of two; everything else is refused."""
    if isinstance(of, str) and of in WORDS:
        return of
    given = of if isinstance(of, tuple) else (of,)
    if isinstance(of, str):
        found = [one for one in match.groups() if one] if (match := TOKENS.fullmatch(of)) else []
        given = tuple(json.loads(one, strict=False) for one in found)
    if len(given) not in (1, 2) or not all(isinstance(one, int | str) and not isinstance(one, bool) for one in given):
        known = "a token id, a token's text in double quotes, or two of these, as in 1234-567"
        raise InputError(f"of '{of}' is unknown{near(str(of), WORDS)}; give prediction, logits, top, {known}")
    ids = [one_token(model, one) if isinstance(one, str) else int(one) for one in given]
    if len(set(ids)) < len(ids):
        raise InputError(f"of {of} compares a token with itself; give two different ones")
    for one in ids:
        check_id(model, one)
    return (ids[0], ids[1]) if len(ids) == 2 else ids[0]


def _said(tokenizer: Any, chosen: Of) -> str:
    """What depends on the tokens, in words."""
    if isinstance(chosen, str):
        return {"logits": "all logits together"}.get(chosen, "the prediction")
    one, *other = (f"'{token_name(tokenizer, int(n))}'" for n in (chosen if isinstance(chosen, tuple) else (chosen,)))
    return f"the logit of {one} less that of {other[0]}" if other else f"log p of {one}"


@torch.no_grad()
def _log_probabilities(model: View, tokens: Tensor) -> Float[Tensor, " vocabulary"]:
    """Of the token after the prompt, in double precision on the CPU."""
    last = model.residual(model.embed(tokens))[:, -1]
    logits = model.unembed(model.norm(last))[0].cpu().double()
    if not torch.isfinite(logits).all():
        raise not_finite(model, "logits")
    return logits.log_softmax(-1)


def _kernel(
    model: View, tokens: Tensor, pieces: Store, heard: Progress | None, of: Of
) -> Float[np.ndarray, " position"]:
    """The second-moment kernel of this model on this text, with its patterns and its score path."""
    view = readout(model, tokens, of)
    how: Any = {"attention": "measured", "score_path": True, "readout": "logits"}
    found = second_moment(view, tokens, pieces=pieces, progress=heard, **how)
    return found["sensitivity"].values[0].astype(float)
