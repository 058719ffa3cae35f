"""Texts of different lengths in one batch: each is cut out by its row of `attention_mask` and measured alone.

What a text gets is what it would get alone because it is alone when it is measured; no model sees padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import InputError, TooFew, reason
from ..run.progress import part
from .checks import check_documents, check_tokens

if TYPE_CHECKING:
    import xarray as xr

MASK = Parameter("attention_mask", Parameter.KEYWORD_ONLY, default=None, annotation=Any)


def by_text(measure: Callable[..., Any]) -> Callable[..., Any]:
    """The measure, which now also takes `attention_mask`, if its second argument is `tokens`; else the function itself."""
    declared = signature(measure)
    parameters = [*declared.parameters.values()]
    if [one.name for one in parameters[1:2]] != ["tokens"]:
        return measure

    @wraps(measure)
    def call(model: Any, tokens: Any = None, *, attention_mask: Any = None, **options: Any) -> Any:
        tokens = options.pop("input_ids", None) if tokens is None else tokens  # as tokenizers of transformers name them
        if attention_mask is None:
            return measure(model, tokens, **options)
        texts, found, documents = cut(model, tokens, attention_mask), [], options.get("documents")
        check_documents(documents, len(texts), "text")
        for n, text in enumerate(texts):
            own = {} if documents is None else {"documents": documents[n : n + 1]}
            if options.get("pieces") is not None:
                own["pieces"] = options["pieces"].within(f"text {n}")
            if "progress" in options:
                own["progress"] = part(options["progress"], n / len(texts), (n + 1) / len(texts))
            try:
                found.append(measure(model, text, **options | own))
            except TooFew:
                raise InputError(
                    f"{measure.__name__} needs several prompts at once, and attention_mask measures each text alone; "
                    "cut the texts to one length, and give them without it"
                ) from None
            except InputError as error:
                raise InputError(f"text {n} alone: {error}") from None
        return side_by_side(found)

    call.__dict__["__signature__"] = declared.replace(parameters=[*parameters, MASK])
    return call


def cut(model: Any, tokens: Any, attention_mask: Any) -> list[Tensor]:
    """Each text of a padded batch as a batch of its own [1, position]; refused where a mask does not say where it stands."""
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or not len(tokens):
        check_tokens(model, tokens)
    try:
        mask = torch.as_tensor(attention_mask, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"attention_mask is no array ({reason(error)}); give 0 or 1 for each token") from None
    if mask.shape != tokens.shape:
        shapes = f"shape {list(mask.shape)} and tokens have {list(tokens.shape)}"
        raise InputError(f"attention_mask has {shapes}; give 0 or 1 for each token")
    for row, place in ((mask != 0) & (mask != 1)).nonzero()[:1].tolist():
        value = mask[row, place].item()
        raise InputError(f"row {row} of attention_mask has {value} at position {place}; give 1 for text, 0 for padding")
    texts = []
    for row, places in enumerate(mask.bool()):
        at = places.nonzero()[:, 0].tolist()
        if not at:
            raise InputError(f"row {row} of attention_mask is all 0, so that it has no text; leave the row out")
        start, stop = at[0], at[-1] + 1
        if hole := (~places[start:stop]).nonzero()[:1, 0].tolist():
            where = f"row {row} of attention_mask is 0 at position {start + hole[0]}, within the text"
            raise InputError(f"{where}; give 0 before the text or behind it alone")
        texts.append(tokens[row : row + 1, start:stop])
    return texts


def side_by_side(found: Sequence[xr.Dataset]) -> xr.Dataset:
    """Results of one text each along a leading dimension `text`, in the place of `prompt`; NaN where a text has no value.

    Attributes that differ become text coordinates, as in `probes.combine`.
    """
    import xarray as xr

    names = dict.fromkeys(name for ds in found for name in ds.attrs if name != "created")
    values = {name: [ds.attrs.get(name, "") for ds in found] for name in names}
    shared = {name: own[0] for name, own in values.items() if all(one == own[0] for one in own)}
    bare = {str(dim) for ds in found for dim in ds.dims if dim not in ds.coords}  # to be joined by their numbers
    placed = []
    for n, ds in enumerate(found):
        coords: dict[str, Any] = {name: str(own[n]) for name, own in values.items() if name not in shared}
        coords |= {"text": n} | {dim: range(ds.sizes[dim]) for dim in bare if dim in ds.dims}
        prompt = ["prompt"] if ds.sizes.get("prompt") == 1 else []
        placed.append(ds.squeeze(prompt, drop=True).assign_coords(coords))
    how: Any = {"data_vars": "all", "coords": "different", "compat": "equals", "join": "outer"}
    joined = xr.concat(placed, "text", combine_attrs="drop_conflicts", **how).drop_vars(bare)
    joined = joined.assign({name: x.astype(float) for name, x in joined.items() if x.dtype == object})  # bools and NaN
    joined.attrs = shared | {"created": max(ds.attrs.get("created", "") for ds in found), "texts": len(found)}
    return joined
