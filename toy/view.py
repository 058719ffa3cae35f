"""One toy behind the view, so that every probe of `probes` runs on it as on a pretrained model.

The pass is that of `toy.model` with one model side by side, block by block at all positions; only attention is run by
`probes.models.fused`, which gives watchers what they ask for. Nothing of the weights is copied.

Parts that a toy lacks follow from the view's definitions: without norms the final norm is the identity, without W_O a head
writes its values to its own components of the stream (identity slices), without a residual stream a block's output alone is
the stream. A full mask is a prefix of all positions.

A toy whose inputs are vectors (in-context retrieval) is viewed with a vocabulary: vectors are the rows of its `embedding`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from probes.errors import InputError
from probes.models.fused import Listening, attend
from probes.models.identity import weights_hash
from probes.models.initialization import CONFIG, Rule
from probes.models.view import Edit, Identity, Linear, Norm, Parts, Spec, Trace, Watched

from . import model as toy
from .train import Trained

# The field's words for switches: sinusoids are absolute positions added to the embeddings, as learned ones are, and decay
# acts on logits by distance alone, as ALiBi does. The others are called alike.
POSITIONAL: Mapping[str, Any] = {"sinusoidal": "learned", "decay": "none"}
FAMILY = "toy"
NORMS = ("attention_norm", "q_norm", "k_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm")


class Toy(Watched):
    """`View` over one toy.

    Args:
        architecture: its switches.
        weights: by name, as `toy.model.initial` and `Trained.weights` have them; all of one dtype and on one device. They
            are used as they are, without their history.
        name: for provenance.
        condition: "pretrained", "init" or "init-nope".
        bos: the id that training put first, if any.
        positional: False: no positional encoding reaches the blocks, learned positions are zero.

    Raises:
        InputError: weights that are not the architecture's, attention that views do not compute, no vocabulary, a `bos`
            outside of it.
    """

    backend = "toy"
    tokenizer: Any = None

    def __init__(
        self,
        architecture: toy.Architecture,
        weights: Mapping[str, Tensor],
        *,
        name: str = "toy",
        condition: str = "pretrained",
        bos: int | None = None,
        positional: bool = True,
    ) -> None:
        _check_weights(architecture, weights)
        first = next(iter(weights.values()))
        self.architecture = architecture
        self.device, self.dtype, self.offloaded = first.device, first.dtype, False
        self._name, self._condition, self.first_ids = name, condition, () if bos is None else (bos,)
        self._weights = {name: tensor.detach()[None] for name, tensor in weights.items()}
        acting = architecture
        if not positional and "positions" in weights:
            self._weights["positions"] = torch.zeros_like(self._weights["positions"])
        elif not positional:
            acting = replace(architecture, positional="none", decay=None)
        switches = toy.Switches.of([acting], self.device)
        made = {name: x.to(self.dtype) for name, x in vars(switches).items() if x is not None}
        self._switches = replace(switches, **made)
        self._slopes = None if acting.decay is None else first.new_full((architecture.heads,), acting.decay)
        self.spec = _spec(architecture)
        if bos is not None and not 0 <= bos < self.spec.vocabulary:
            raise InputError(f"bos={bos} is no token id; ids run from 0 to {self.spec.vocabulary - 1}")

    @classmethod
    def of(cls, trained: Trained) -> Toy:
        """The view of a trained toy, as `toy.train.train` gives it; named after its task."""
        return cls(trained.run.architecture, trained.weights, name=f"toy of {trained.run.task.kind}")

    @property
    def identity(self) -> Identity:
        return self._identity

    @cached_property
    def _identity(self) -> Identity:
        return Identity(
            name=self._name,
            revision=None,
            condition=self._condition,
            weights=weights_hash((name, tensor[0]) for name, tensor in self._weights.items()),
            config=json.dumps(asdict(self.architecture), sort_keys=True),
            backend=self.backend,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
        )

    # -- forward passes

    @torch.no_grad()
    def embed(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d"]:
        length, weights = tokens.shape[1], self._weights
        self._check_length(length)
        if "positions" in weights:
            weights = {**weights, "positions": weights["positions"][:, :length]}
        return toy.embedded(weights, self._at(length), tokens.to(self.device)[None])[0]

    def residual(
        self, embeddings: Float[Tensor, "batch position d"], *, edits: Sequence[Edit] = ()
    ) -> Float[Tensor, "batch position d"]:
        return self._streams(embeddings, Listening(self.spec, edits, self._watcher, self.device))[-1]

    @torch.no_grad()
    def trace(
        self, embeddings: Float[Tensor, "batch position d"], *, attention: bool = False, edits: Sequence[Edit] = ()
    ) -> Trace:
        heard = Listening(self.spec, edits, self._watcher, self.device, recording=attention)
        streams = self._streams(embeddings.detach(), heard)
        blocks = tuple(partial(self._recorded, layer, edits) for layer in range(self.spec.blocks))
        turns = self._at(embeddings.shape[1]).turns
        rotation = None if turns is None else (turns[0, 0, 0, 0], turns[1, 0, 0, 0])
        return Trace(tuple(streams), blocks, (rotation,) * self.spec.blocks, tuple(heard.attention.values()))

    def output_weights(self, layer: int) -> Float[Tensor, "head c d"]:
        """Rows of W_O by head; without W_O rows of the identity."""
        a = self.architecture
        if a.output_projection:
            return self._weights[f"{layer}.o"][0].unflatten(0, (a.heads, a.head_dim))
        return torch.eye(a.width, dtype=self.dtype, device=self.device).unflatten(0, (a.heads, a.head_dim))

    def output_norm(self, layer: int) -> tuple[Norm, Float[Tensor, " d"]] | None:
        norm = self._norm(f"{layer}.post_attention_norm")
        return None if norm is None else (norm, torch.zeros_like(norm.weight))

    def norm(self, residual: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        """The final norm; the identity where norms are off."""
        rows = residual.reshape(1, 1, -1, residual.shape[-1])
        return toy.normed(self._weights, "norm", rows).reshape(residual.shape)

    def unembed(self, normed: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows vocabulary"]:
        """The head's logits, linear or "mlp"; minus infinity for token ids that it does not tell apart."""
        logits = toy.head(self.architecture, self._weights, normed.reshape(1, 1, -1, normed.shape[-1]))
        logits = logits.reshape(*normed.shape[:-1], self.architecture.outputs)
        # The head's classes are the first ids.
        return functional.pad(logits, (0, self.spec.vocabulary - self.architecture.outputs), value=float("-inf"))

    def _at(self, length: int) -> toy.Switches:
        """The switches of a prompt that may be shorter than the architecture's."""
        s = self._switches
        rows = {name: x[..., :length, :] for name in ("turns", "added") if (x := getattr(s, name)) is not None}
        return replace(s, bias=s.bias[..., :length, :length], **rows)

    def _streams(self, embeddings: Tensor, heard: Listening) -> list[Tensor]:
        """One pass: what every block reads and what the last one writes."""
        self._check_length(embeddings.shape[1])
        streams, stream = [], embeddings
        for layer in range(self.spec.blocks):
            streams.append(heard.edited(layer, "residual", stream))
            stream = self._block(layer, heard, streams[-1])
        return [*streams, stream]

    def _recorded(self, layer: int, edits: Sequence[Edit], stream: Tensor) -> Tensor:
        return self._block(layer, Listening(self.spec, edits, self._watcher, self.device), stream)

    def _block(self, layer: int, heard: Listening, stream: Tensor) -> Tensor:
        """One block, its queries, keys, values and what heads mix edited, its attention heard."""
        a, weights, switches, x = self.architecture, self._weights, self._at(stream.shape[1]), stream[None]
        parts = (part[0] for part in toy.queries_keys_values(a, weights, switches, layer, x))
        read = {
            site: heard.edited(layer, site, part) for site, part in zip(("query", "key", "value"), parts, strict=True)
        }
        masks: dict[str, Any] = {
            "softcap": None,
            "window": a.window,
            "slopes": self._slopes,
            "prefix": self.spec.prefix,
        }
        attention = attend(heard.multiplied(layer, **read, **masks), normalizer=heard.watcher is not None)
        assert attention.output is not None
        heard.attended(layer, attention)
        mixed = heard.edited(layer, "output", attention.output)
        return toy.written(a, weights, switches, layer, x, toy.joined(mixed[None]))[0]

    def _check_length(self, length: int) -> None:
        if not 1 <= length <= self.architecture.length:
            raise InputError(
                f"prompts have {length} positions, '{self._name}' was made for {self.architecture.length}; "
                f"give from 1 to {self.architecture.length}"
            )

    # -- taking apart and starting afresh

    def parts(self, layer: int) -> Parts | None:
        """A block with residual stream, norms, W_O, feed-forward and a mask that looks back; None for others."""
        a = self.architecture
        standard = a.residual and a.norm != "none" and a.output_projection and a.feed_forward
        if not standard or self.spec.prefix is not None:
            return None
        own = {name.partition(".")[2]: w[0] for name, w in self._weights.items() if name.startswith(f"{layer}.")}
        norms: dict[str, Any] = {name: self._norm(f"{layer}.{name}") for name in NORMS}
        names = ("q", "k", "v", "o", "up", "down")
        linear: dict[str, Any] = {name: Linear(own[name].mT, own.get(f"{name}.bias")) for name in names}
        return Parts(
            **norms,
            **linear,
            gate=None,
            activation=functional.gelu,
            head_dim=a.head_dim,
            scale=a.head_dim**-0.5,
            window=a.window,
            slopes=self._slopes,
        )

    def _norm(self, name: str) -> Norm | None:
        """A norm by its name, if there is one."""
        weight, bias = (None if (found := self._weights.get(of)) is None else found[0] for of in (name, f"{name}.bias"))
        return None if weight is None else Norm("rms" if bias is None else "layer", weight, bias, toy.NORM_EPS)

    def reinitialized(self, seed: int, *, positional: bool = True, initialization: Rule = CONFIG) -> Toy:
        """Fresh weights of the same architecture, those of `toy.model.initial`.

        Without `positional`, learned positions and sinusoids are zero, rotations the identity, and nothing decays.
        """
        if initialization != CONFIG:
            raise InputError(
                f"initialization '{initialization!s:.40}' is no rule for a toy, whose weights toy.model.initial draws; "
                "leave it out"
            )
        fresh = {
            name: tensor.to(self.device, self.dtype) for name, tensor in toy.initial(self.architecture, seed).items()
        }
        return Toy(
            self.architecture,
            fresh,
            name=self._name,
            condition="init" if positional else "init-nope",
            bos=self.bos,
            positional=positional,
        )


def _spec(a: toy.Architecture) -> Spec:
    if a.vocabulary is None:
        raise InputError(
            "probes read token ids, and the toy's vocabulary is None; make its vectors rows of an embedding"
        )
    return Spec(
        family=FAMILY,
        blocks=a.blocks,
        heads=a.heads,
        kv_heads=a.groups,
        head_dim=a.head_dim,
        width=a.width,
        vocabulary=a.vocabulary,
        positional=(POSITIONAL.get(a.positional, a.positional),) * a.blocks,
        windows=(a.window,) * a.blocks,
        max_length=a.length,
        initializer_range=None,  # matrices are uniform, each within 1/sqrt(inputs)
        prefix=a.length if a.mask == "full" else a.prefix,
    )


def _check_weights(a: toy.Architecture, weights: Mapping[str, Tensor]) -> None:
    expected = {name: list(tensor.shape) for name, tensor in toy.initial(a, 0).items()}
    found: dict[str, Any] = {name: list(tensor.shape) for name, tensor in weights.items()}
    for name in (*expected, *found):
        if expected.get(name) != found.get(name):
            raise InputError(
                f"weight '{name}' has shape {found.get(name)}, its architecture wants {expected.get(name)}; "
                "give the weights of one model, with the architecture that it was made with"
            )
    for name, read in (("attention", "softmax"), ("kernel", "inner"), ("readout", "inner")):
        if getattr(a, name) != read:
            raise InputError(
                f"probes read {name} '{read}', and the toy's is '{getattr(a, name)}'; give one with '{read}'"
            )
