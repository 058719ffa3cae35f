"""Next-token loss by position, -log p of each token of a prompt given those before it, in nats.

What a model predicts is what all of its sense of position is for: a change of the model that moves nothing here moves
nothing that matters to its predictions. Means over positions are taken within each prompt, intervals over documents. Tokens
that the head excludes (a logit of minus infinity) have no loss and do not count.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import xarray as xr
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from .. import options
from ..charts import BLUE, Panel, Series, curves, panels
from ..measure import Headline, Measure
from ..models.checks import check_tokens
from ..models.load import takes_model
from ..models.view import View
from ..results.dataset import dataset, provenance
from ..results.statistics import jackknife, units
from ..results.tables import Table, interval
from ..run.progress import Progress
from ..run.store import Store
from .consequences import consequences

CAPTION = "Mean over prompts; band: 95 % over documents."


@takes_model
def loss(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    pieces: Store | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """The loss of every next token.

    Args:
        model: any view; it is not changed.
        tokens: ids [prompt, position]; of other lengths with `attention_mask` (`docs/prompts.md`).
        pieces: where finished prompts are kept.
        progress: called with (prompts done, prompts in all).

    Returns:
        Dataset: `loss` [prompt, predicted], of the token at position `predicted`, in nats.

    Raises:
        InputError: tokens that the model cannot take, or a loss that is not finite.
    """
    check_tokens(model, tokens)
    values, _ = consequences(model, tokens, pieces=pieces, progress=progress)
    look = {"long_name": "next-token loss", "units": "nat"}
    variables = {"loss": (("prompt", "predicted"), values.astype(np.float32), look)}
    coords = {"predicted": range(1, tokens.shape[1])}
    return dataset(variables, tokens=tokens, coords=coords, attrs=provenance(model, tokens, measurement="loss"))


@dataclass(frozen=True)
class Options(options.Options):
    """Measure the next-token loss by position, in nats.

    Examples:
      headwater loss tiny-llama
      headwater loss smollm2-135m --ablate 18.8 --prompts 64
    """


def by_band(ds: xr.Dataset) -> xr.DataArray:
    """Mean loss within 1, 2-3, 4-7, ... of the predicted positions [prompt, band]."""
    last = int(ds["predicted"][-1])
    starts = [2**n for n in range(int(np.log2(last)) + 1)]
    ends = [min(2 * start - 1, last) for start in starts]
    parts = [ds["loss"].sel(predicted=slice(*band)).mean("predicted") for band in zip(starts, ends, strict=True)]
    return xr.concat(parts, xr.Variable("band", [f"{one}-{other}" for one, other in zip(starts, ends, strict=True)]))


def answer(results: Mapping[str, xr.Dataset]) -> list[str]:
    """The mean loss, and how far it falls along the prompt."""
    lines = []
    for model, ds in results.items():
        at = by_band(ds).isel(band=[min(1, by_band(ds).sizes["band"] - 1), -1]).transpose("band", "prompt")
        mean = jackknife(partial(np.mean, axis=0), ds["loss"].mean("predicted").values, units(ds))
        change = jackknife(partial(np.mean, axis=0), (at[1] - at[0]).values, units(ds))
        lines.append(
            f"{model}: the loss is {interval(*mean)} nat per token; from positions {at.band[0].item()} to positions "
            f"{at.band[1].item()} it changes by {interval(*change, form='+.3g')}."
        )
    return lines


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """The mean loss over positions."""

    def draw(cell: Axes, ds: xr.Dataset) -> None:
        mean, low, high = jackknife(partial(np.nanmean, axis=0), ds["loss"].values.astype(np.float64), units(ds))
        curves(cell, [Series("", mean, BLUE, low, high, ds["predicted"].values, width=1.0)])
        cell.set_xscale("log", base=2)
        cell.set_xlabel("position of the predicted token")

    caption = CAPTION if any(ds.sizes["prompt"] > 1 for ds in results.values()) else "One prompt alone."
    return panels(results, [Panel("next-token loss (nat)", draw, share=True)], caption)


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """The loss by band of positions."""
    rows = []
    for model, ds in results.items():
        bands = by_band(ds).transpose("prompt", "band")
        ends = np.stack(jackknife(partial(np.mean, axis=0), bands.values, units(ds)))
        rows += [[model, str(band), interval(*ends[:, n])] for n, band in enumerate(bands.band.values)]
    return [Table("Loss by position", ("model", "positions", "nat"), rows)]


MEASURE = Measure(
    name="loss",
    question="How well does the model predict the next token, position by position?",
    compute=loss,
    options=Options,
    headlines=(
        Headline("loss (nat)", lambda ds: ds["loss"].mean("predicted"), form=".4g"),
        Headline("loss by position (nat)", by_band, form=".4g"),
    ),
    answer=answer,
    tables=tables,
    chart=chart,
    trials={"loss": loss},
)
