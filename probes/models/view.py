"""What a probe may ask of a model: one short protocol and the plain data it is made of.

Every probe in this package is written against `View` alone. Adapters (`huggingface`, `lens`) implement it for models
made elsewhere, `toy` for models made here. One layout is fixed: patterns are `[batch, head, query, key]`; queries and
keys are the tensors whose product is taken, after rotation and after key heads are repeated.

Shapes in docstrings: B prompts, T positions, d width, H query heads, G key-value heads, c head width, f feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .initialization import CONFIG, Rule

PositionalEncoding = Literal["rope", "shared rope", "learned", "none"]  # shared: one rotated key for all heads (MLA)


@dataclass(frozen=True)
class Spec:
    """The architecture in the field's terms; tuples have one entry per block."""

    family: str  # transformers' model_type: "llama", "qwen2", "gpt2", ...
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int  # of values
    width: int
    vocabulary: int
    positional: tuple[PositionalEncoding, ...]
    windows: tuple[int | None, ...]  # how many positions a query sees, itself included; None: all before it
    max_length: int | None  # positions the checkpoint was made for
    initializer_range: float | None
    prefix: int | None = None  # every query sees the first so many positions; under a full mask that is all
    sink_logits: bool = False  # every head has a learned one (see `Attention.sink`)
    post_norm: bool = False  # norms on the branches' outputs, before these are added
    left_out: str | None = None  # of a hybrid: its layers without softmax attention; a block may then be several layers


@dataclass(frozen=True)
class Identity:
    """Which weights these are; enters every result's attributes."""

    name: str
    revision: str | None
    condition: str  # "pretrained", "init", or "init-nope" (fresh weights, no positional encoding)
    weights: str  # a hash of names, dtypes, shapes and values (see `identity`)
    config: str  # canonical JSON of the configuration
    backend: str
    dtype: str
    device: str
    initialization: str | None = None  # what fresh weights were drawn from; None: these are others
    weights_file: str | None = None  # JSON: the GGUF file they were dequantized from, its SHA-256, its tensors' types


@dataclass(frozen=True)
class Birth:
    """What fresh weights of a configuration are drawn from: standard deviations of independent normal entries, mean zero.

    Biases start at zero and norm weights at one in all supported families; learned sink logits are taken as zero.
    """

    spec: Spec
    embedding: float  # of the embeddings as block 0 reads them, the family's scaling included
    positions: float  # of added learned positions; 0 without
    v: float
    o: float
    gate: float | None  # None: a plain feed-forward
    up: float
    down: float
    features: int  # of the feed-forward
    activation: Callable[[Tensor], Tensor]
    norm: Literal["rms", "layer"]
    eps: float
    parallel: bool = False
    pre_norm: bool = True  # norms on what the branches read
    experts: int | None = None  # of which a router chooses; None: one feed-forward
    chosen: int = 0
    among_chosen: bool = False  # weights of experts are a softmax over those chosen, not over all
    router: float = 0.0  # deviation of the router's weights
    initialization: str | None = None  # the rule, as results have it
    up_activation: Callable[[Tensor], Tensor] | None = None  # see `Parts`


@dataclass(frozen=True)
class Norm:
    """A normalization as it acts: `weight * (x - mean) / rms + bias`, the mean only for LayerNorm."""

    kind: Literal["rms", "layer"]
    weight: Float[Tensor, " d"]
    bias: Float[Tensor, " d"] | None
    eps: float


@dataclass(frozen=True)
class Linear:
    """`x @ weight.T + bias`; of experts, one after the other."""

    weight: Float[Tensor, "*expert output input"]
    bias: Float[Tensor, "*expert output"] | None


@dataclass(frozen=True)
class Routing:
    """Which experts a position's feed-forward is made of: the `chosen` ones with the largest logits, weight n + bias.

    n is what the feed-forward reads. Outputs of experts are added with the softmax of the logits, over all experts, or over
    those chosen with `among_chosen`.
    """

    weight: Float[Tensor, "expert d"]
    chosen: int
    among_chosen: bool
    bias: Float[Tensor, " expert"] | None = None


@dataclass(frozen=True)
class Parts:
    """A block taken apart: what the linearized block and the theory of random models are computed from.

    Sequential blocks add attention to the stream before the feed-forward reads it; `parallel` ones (GPT-NeoX) feed both
    from the block's input. All tensors are the model's own, not copies, except where a family stores them fused. With
    `routing`, matrices of the feed-forward have experts as their first axis.
    """

    attention_norm: Norm | None  # None: the branch reads the stream as it is (OLMo 2 and 3)
    mlp_norm: Norm | None
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    gate: Linear | None  # None: a plain feed-forward, `down(act(up(x)))`
    up: Linear
    down: Linear
    activation: Callable[[Tensor], Tensor]
    head_dim: int
    scale: float  # of the logits
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    window: int | None = None
    slopes: Float[Tensor, " H"] | None = None  # ALiBi: each head's logits lose slope * (i - j)
    q_norm: Norm | None = None  # before rotation: per head (Qwen3), or over all heads, H c long (OLMo)
    k_norm: Norm | None = None
    post_attention_norm: Norm | None = None  # on the branch's output, before it is added (Gemma-2)
    post_mlp_norm: Norm | None = None
    parallel: bool = False
    routing: Routing | None = None  # None: one feed-forward for all positions
    up_activation: Callable[[Tensor], Tensor] | None = None  # `down(act(gate(x)) * up_act(up(x)))`; None: the identity
    sink: Float[Tensor, " H"] | None = None  # as in `Attention`


def sees(query: Tensor, key: Tensor, window: int | None, prefix: int | None = None) -> Tensor:
    """Boolean, broadcast: whether queries at these positions may look at keys at those.

    Every query sees the first `prefix` keys, those after it among them; else keys up to itself, the last `window` of them.
    """
    seen = key <= query
    if window is not None:
        seen = seen & (key > query - window)
    return seen if prefix is None else seen | (key < prefix)


# (logits [B, H, query, key], log Z [B, H, query, 1], positions of queries and keys, which broadcast to the logits)
# -> (logits, log Z): weights are exp(logits - log Z). Whole rows: every key that a query sees is in them, and the learned
# sink logit, if there is one, as a key at position -1.
Reweigh: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Attention:
    """What one block's attention multiplied: q, k `[B, H, T, c]` after rotation, v alike, and the scale of q.k.

    `output` and `normalizer` are what the kernel that ran gave, `sum_j A_ij v_j` and `log Z_i` (the log-sum-exp of a
    query's logits over the keys it sees and the learned sink logit); None where the kernel that ran does not give them.
    `reweigh`: edits of "logits".
    """

    query: Float[Tensor, "batch head position c"]
    key: Float[Tensor, "batch head position c"]
    value: Float[Tensor, "batch head position c"]
    scale: float
    softcap: float | None
    window: int | None
    slopes: Float[Tensor, " head"] | None = None  # ALiBi: logits lose slope * (i - j)
    prefix: int | None = None  # every query sees the first so many keys; at T or above, all of them
    output: Float[Tensor, "batch head position c"] | None = None
    normalizer: Float[Tensor, "batch head position"] | None = None
    reweigh: tuple[Reweigh, ...] = ()
    sink: Float[Tensor, " head"] | None = None  # a learned logit that takes part in each softmax and reads nothing
    gate: Float[Tensor, "batch head position c"] | None = None  # what `output` is multiplied by before W_O

    def first_key(self, start: int) -> int:
        """The first key that any query from `start` on sees."""
        return 0 if self.window is None or self.prefix is not None else max(0, start - self.window + 1)

    def last_key(self, stop: int) -> int:
        """One past the last key that any query before `stop` sees."""
        return stop if self.prefix is None else max(stop, min(self.prefix, self.query.shape[-2]))

    def logits(self, start: int = 0, stop: int | None = None) -> Float[Tensor, "batch head query key"]:
        """Scaled logits of queries start to stop against keys `first_key(start)` to `last_key(stop)`, in at least float32.

        Soft-cap, ALiBi's slopes and edits are in them; what a query does not see is minus infinity. They hold
        B H (stop - start) (last_key - first_key) numbers.
        """
        logits, queries, keys = self._products(start, stop)
        return self.edited(logits, queries, keys)[0] if self.reweigh else logits

    def weighed(
        self, start: int = 0, stop: int | None = None, keys: slice | Tensor | None = None
    ) -> tuple[Float[Tensor, "batch head query key"], Float[Tensor, "batch head query one"]]:
        """(`logits`, the log Z_i by which these queries' weights are `exp(s_ij - log Z_i)`); of `keys` alone if given."""
        return self.edited(*self._products(start, stop, keys))

    def kept_keys(self, start: int, stop: int) -> slice | Tensor:
        """The keys that queries start to stop may see, without those that the first edit of logits hides from them all."""
        seen = slice(self.first_key(start), self.last_key(stop))
        hidden = getattr(self.reweigh[0], "hidden", None) if self.reweigh else None
        if hidden is None:
            return seen
        keys = torch.arange(seen.start, seen.stop, device=self.query.device)
        return keys[~hidden(start, keys)]

    def _products(
        self, start: int, stop: int | None, keys: slice | Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits before edits, and the positions of their queries and keys."""
        places = torch.arange(self.query.shape[-2], device=self.query.device)
        stop = len(places) if stop is None else stop
        keys = slice(self.first_key(start), self.last_key(stop)) if keys is None else keys
        exact = torch.promote_types(self.query.dtype, torch.float32)
        query, key = self.query[..., start:stop, :].to(exact) * self.scale, self.key[..., keys, :].to(exact)
        queries, seen = places[start:stop, None], places[None, keys]
        return self.logits_of(query @ key.transpose(-1, -2), queries, seen), queries, seen

    def edited(self, logits: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Whole rows of logits and their log-sum-exp `[B, H, query, 1]`, after the edits of them."""
        count = logits.shape[-1]
        if self.sink is not None:
            sink, keys = self.sink.to(logits)[:, None, None], torch.nn.functional.pad(keys, (0, 1), value=-1)
            logits = torch.cat([logits, sink.expand(*logits.shape[:-1], 1)], -1)
        log_z = logits.logsumexp(-1, keepdim=True)
        for change in self.reweigh:
            logits, log_z = change(logits, log_z, queries, keys)
        return logits[..., :count], log_z

    def logits_of(self, products: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Logits of scaled products `[B, H, ...]` of the queries and keys at these positions, which broadcast to `...`.

        Soft-cap, ALiBi's slopes and mask; `products` may be overwritten, since nothing larger is held anywhere.
        """
        logits = products
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if self.slopes is not None:
            distance = (queries - keys).to(logits)
            logits = logits - self.slopes.to(logits).reshape(-1, *[1] * distance.ndim) * distance
        return logits.masked_fill_(~sees(queries, keys, self.window, self.prefix), float("-inf"))

    def pattern(self) -> Float[Tensor, "batch head query key"]:
        """The full attention pattern; for small T, since it holds B H T T numbers."""
        logits, log_z = self.weighed()
        return (logits - log_z).exp().to(self.query.dtype)


@dataclass(frozen=True)
class Trace:
    """One forward pass, recorded.

    `residual[l]` is the stream that block l reads, `residual[blocks]` what the final norm reads. `blocks[l]` is the block
    as a function of its input, under the masks and rotations of this pass and its edits but those of the residual; it
    takes `[n, T, d]` for any n when the pass had one prompt, and is differentiable. `rotary[l]` is (cos, sin), each
    `[T, rotated]`, or None.
    """

    residual: tuple[Float[Tensor, "batch position d"], ...]
    blocks: tuple[Callable[[Tensor], Tensor], ...]
    rotary: tuple[tuple[Tensor, Tensor] | None, ...]
    attention: tuple[Attention, ...] = ()


@dataclass(frozen=True)
class Edit:
    """Change what flows: `function` receives the tensor at `site` of block `layer` and returns its replacement.

    `site` is "residual" (the stream the block reads, `[B, T, d]`), "query", "key", "value" (`[B, H, T, c]`, after rotation,
    keys and values per key-value head), "output" (`sum_j A_ij v_j` of every head, `[B, H, T, c]`, before W_O), "logits": its
    function is a `Reweigh`, or "mask": it receives T and returns how many first keys every query sees. With `position` the
    function receives and changes that position alone.
    """

    site: Literal["residual", "query", "key", "value", "output", "logits", "mask"]
    layer: int
    function: Callable[..., Any]
    position: int | None = None

    def __call__(self, tensor: Float[Tensor, "*rows position c"]) -> Float[Tensor, "*rows position c"]:
        """What stands at the site after it; not for "logits" and "mask"."""
        if self.position is None:
            return self.function(tensor)
        at = slice(self.position, self.position + 1)
        changed = tensor.clone()
        changed[..., at, :] = self.function(tensor[..., at, :])
        return changed


Watcher = Callable[[int, Attention], None]  # (block, what its attention multiplied)


@runtime_checkable
class View(Protocol):
    """A model as the probes see it. Nothing here changes the model it was made from.

    `offloaded` says whether weights of blocks lie elsewhere than on `device`: `parts` then fetches them anew each time, and
    probes do not hold what it gave them.
    """

    spec: Spec
    tokenizer: Any | None
    device: torch.device
    dtype: torch.dtype
    offloaded: bool

    @property
    def identity(self) -> Identity:
        """Which weights these are; computed when it is first read, since that reads all weights."""
        ...

    @property
    def first_ids(self) -> tuple[int, ...]:
        """The ids that the tokenizer puts before every text: BOS, none (Qwen2), or several, whatever they are called."""
        ...

    @property
    def bos(self) -> int | None:
        """The first of them, or None."""

    def embed(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d"]:
        """The input of block 0: token embeddings, scaled if the family scales them, plus added positional ones."""
        ...

    def trace(
        self, embeddings: Float[Tensor, "batch position d"], *, attention: bool = False, edits: Sequence[Edit] = ()
    ) -> Trace:
        """Run the blocks on `embeddings` without gradients and record the pass; with `attention`, q, k and v too.

        Raises:
            RuntimeError: a site did not fire, naming the block and the site.
        """
        ...

    def residual(
        self, embeddings: Float[Tensor, "batch position d"], *, edits: Sequence[Edit] = ()
    ) -> Float[Tensor, "batch position d"]:
        """The stream after the last block, differentiable with respect to `embeddings`."""
        ...

    def watching(self, watcher: Watcher) -> AbstractContextManager[None]:
        """Inside, `watcher(layer, attention)` is called as each block attends, in `residual`, `trace` and traced blocks.

        It sees queries, keys and values after edits, the kernel's own output, and log-sum-exp where there is any. Only
        what the watcher keeps is kept: no more than one block's tensors are alive at a time. Inside another's `with`, only
        the innermost watcher is called.

        Raises:
            RuntimeError: on leaving a pass in which some block's attention was not seen, naming the block.
        """
        ...

    def output_weights(self, layer: int) -> Float[Tensor, "head c d"]:
        """W_O by head: what a head adds to the branch's output is `(sum_j A_ij v_j) W_O[head]`, before any post-norm."""
        ...

    def output_norm(self, layer: int) -> tuple[Norm, Float[Tensor, " d"]] | None:
        """The norm on attention's output before it is added, and the bias beside W_O that it reads; None without one."""
        ...

    def norm(self, residual: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        """The final norm, differentiable."""
        ...

    def unembed(self, normed: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows vocabulary"]:
        """Next-token logits of normed rows, soft-cap included, differentiable."""
        ...

    def parts(self, layer: int) -> Parts | None:
        """The block taken apart, or None where this model is not known well enough for that."""
        ...

    def reinitialized(self, seed: int, *, positional: bool = True, initialization: Rule = CONFIG) -> View:
        """Fresh weights of the same configuration; without `positional`, no positional encoding reaches the blocks.

        Then rotations are the identity and learned positional embeddings are zero. Fresh weights are what the
        configuration gives today, not the step 0 of the run that made a published checkpoint; where that exists, load it
        by its revision. `initialization` is another rule (see `probes.models.initialization`): a seed then means the same
        draw, every matrix multiplied by the ratio of its deviations.

        Raises:
            InputError: no such rule, or one that this model cannot be drawn by.
        """
        ...


def obstacle(model: Any, layer: int) -> str | None:
    """What a caller put on the block that makes `model.parts(layer)` None; None if there is no such thing."""
    while hasattr(model, "original"):  # a view of another view's model
        model = model.original
    found = getattr(model, "obstacle", None)
    return None if found is None else found(layer)


def never_fired(family: str, site: str, layer: int) -> RuntimeError:
    """The error of an adapter whose pass did not come by a named point of a block."""
    return RuntimeError(
        f"{family}: site '{site}' of block {layer} never fired; this family runs its attention elsewhere and is not "
        "supported by this probe"
    )


class Watched:
    """`View.watching` for a view whose passes ask for `_watcher`, and `View.bos`."""

    @property
    def bos(self: Any) -> int | None:
        return self.first_ids[0] if self.first_ids else None

    _watcher: Watcher | None = None

    @contextmanager
    def watching(self, watcher: Watcher) -> Iterator[None]:
        before, self._watcher = self._watcher, watcher
        try:
            yield
        finally:
            self._watcher = before
