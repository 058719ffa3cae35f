r"""The Jacobian norm of a random model, predicted with nothing fitted.

Setting. x_i^l is the residual stream that block l reads at position i, h the readout at the last position, J_i = dh/dx_i^l,
and sensitivity^2 = ||J_i||_F^2 / d. Weights are independent with mean zero. Two paths through different weights then have
expected inner product zero, so that the *powers* of paths add up, not their amplitudes: products of attention matrices as
in N^L ([Chowdhury], arXiv 2603.10123) are not the expectation of anything here. The one assumption is that of all mean-field
theories of gradients: the weights of a branch are independent of the Jacobian above it, although the streams up there went
through them. It becomes exact as the width grows; what is left of it is largest at the first positions (7, 5 and 2 % too
much at position 0 for widths 64, 128 and 256 at d sigma^2 = 0.05). What closes is the Gram matrix of the J_i,

    G_ik = E tr(J_i J_k^T) / d,        prediction: sensitivity_j = sqrt(G_jj),

T x T, with G = e e^T at the top (e: the last position). Off-diagonal entries are needed: two positions that both attend to j
pass on what they have in common coherently. One step down per branch:

Feed-forward, y_i = x_i + F(x_i). J_i becomes J_i (I + F_i), F_i its Jacobian. The weights of F are independent of what is
above it, E F_i = 0, and E tr(J_i F_i F_k^T J_k^T) = G_ik tr(F_i F_k^T), hence

    G <- G * (1 + K),   K_ik = tr(F_i F_k^T) / d                                                        (elementwise)
      = sum_f |W_down,f|^2 (a1_if a1_kf |W_gate,f|^2 + a2_if a2_kf |W_up,f|^2) / (d r_i r_k) * p_ik,

f over the hidden features, with pre-activations up and gate, a1 = up silu'(gate), a2 = silu(gate); for a plain
feed-forward one term with a = act'(up). Biases move activations and patterns, and nothing else. Cross terms of two features
have mean zero. r_i is the rms in the norm's denominator, and the norm's derivative is P_i / r_i with
P_i = I - n_i n_i^T / d (and - 1 1^T / d for LayerNorm), n_i the normed stream; for RMSNorm
p_ik = tr(P_i P_k) / d = 1 - (2 - (n_i.n_k / d)^2) / d.

Attention, values. With patterns A_h held constant, J_j becomes J_j + sum_h sum_i A_h,ij J_i W_O,h W_V,h P_j / r_j. The
W_O of different heads are independent, so

    G <- G + (sum_h s_h^2 A_h^T G A_h)_jk p_jk / (r_j r_k),   s_h^2 = ||W_O,h W_V,h||_F^2 / d.

At initialization, while logits are small, every A_h is uniform over what the mask shows (`attention="uniform"`); then
one product with s^2 = ||W_O W_V||_F^2 / d is all there is, value heads repeated for grouped queries. Small means d
sigma^2 of 0.1 to 0.2 at most, sigma the initializer range: at 0.36 (width 896 at the usual 0.02) uniform attention is
already 7 % off. Norms of queries and keys make logits of order one at any width: a Qwen3 is never uniform at
initialization.

Attention, scores (`score_path`). Head h writes W_O o_i, o_i = sum_j A_ij v_j, and the derivative of A by its logit gives
do_i / ds_ij = A_ij (v_j - o_i). With u_ij = A_ij W_O (v_j - o_i), s_ij = scale q_i.k_j and rotations R, J_j gains

    through keys:     sum_i J_i u_ij (scale W_K^T R_j^T q_i)^T P_j / r_j,
    through queries:  sum_m J_i u_im (scale W_Q^T R_i^T k_m)^T P_i / r_i    at j = i.

(q_i and k_j after rotation.) W_K and W_Q are independent of W_O W_V and of each other, so cross terms between values, keys
and queries have mean zero. Terms of two queries that reach j through the same W_K do not; summed exactly they change the
error of a profile by less than 0.1 percentage points (6 to 8 blocks, T = 64, d sigma^2 up to 1.6) and are left out, as is
P_j, an effect of 1/d. The diagonal of G gains

    sum_i |J_i u_ij|^2 |scale W_K^T R_j^T q_i|^2 / (d r_j^2),   and   |J_i W_O C_i R_i W_Q scale|_F^2 / (d r_i^2)

with C_i = sum_m A_im (v_m - o_i) k_m^T, the covariance of values and keys under query i's pattern. Off the diagonal the gain
is incoherent and left out: kept, it changes whole profiles by 0.1 % at most (6 to 8 blocks, T = 64, d sigma^2 up to 1.6),
although in a single block at large logits it reaches a tenth of the diagonal. A soft-cap multiplies A by its
slope; norms of queries and keys (Qwen3) put their own derivative between R and W.

The stream's own direction. For a random direction |J_i u|^2 = G_ii |u|^2, but u_ij is no random direction: in the first
blocks, where the stream is little but what attention wrote, it leans towards the stream itself, and that direction is the
one which every norm above removes. S_i = |J_i x_i|^2 / |x_i|^2 is therefore carried along with G, and
|J_i u|^2 = G_ii (|u|^2 - (u.x_i)^2 / |x_i|^2) + S_i (u.x_i)^2 / |x_i|^2. Branches do not see the direction of their input,
so S changes only as the stream turns: S_below = cos^2 S_above + (1 - cos^2) G_above,ii, cos between the stream below
and above the branch. At d sigma^2 = 1.6 (width 256, 8 blocks, T = 64) this takes the error from 4.0 to 2.8 %.

Learned sink logits (gpt-oss) take their share of each pattern, also of the uniform one: exp(s) stands beside the number of
keys.

Under ALiBi the pattern without content is each head's own decay, softmax of -slope (i - j), and takes the place of the
uniform one; measured patterns have it in them.

Blocks whose branches both read the stream (GPT-NeoX) take both steps from the same G. A norm on a branch's output (Gemma-2)
multiplies W_O and W_down by its weight and divides G by the branch's rms.

Blocks with norms on what the branches give and none on what they read (OLMo 2 and 3) are y_i = x_i + N(B_i), B_i a branch
of the streams themselves, so that J_j gains sum_i J_i (I - n_i n_i^T / d) / rms(B_i) dB_i/dx_j with n_i = N(B_i). The steps
are those above with r_i = 1, P_i = I, p_ik = 1 and G divided by the rms of B_i and B_k. N removes one direction of d from
what comes down; the power along it, |W_O^T n_i|^2 in the mean, is that of any other direction up to a factor of order one,
so that leaving it in costs O(1/d), as it does with Gemma-2. That a branch does not see the direction of its input, as S
needs, is N's doing here: scaling x_i scales the part of B_i that is homogeneous in it, and N takes that out. It is exact
for queries and keys, which have norms of their own, and an approximation for values and feed-forward, without consequence:
S = G in its place changes the error from 3.2 to 3.4 %.

What is special is the size: a fresh stream is as small as its embeddings, and a branch is divided by its own rms, so that
block 0 multiplies the Jacobian by about 1 / sigma (193 below it and 3.8 above it at position 0, sigma = 0.02), and logits
change with the stream as steeply: at the last position nearly everything comes through scores (64.3 of 64.6). Without the
score path the kernel is 21 to 38 % off, and uniform attention is no theory of these models.

Norms of queries and keys over the whole width (OLMo) put their own derivative between R and W as norms per head do. Of it, a
head's own features are kept; what other heads' features add through the common rms is O(1 / H c).

With experts (Qwen3-MoE, gpt-oss) K is that of `probes.models.feedforward`: positions have in common what they send through
the same expert, and the choice of experts is held.

From the configuration alone (`second_moment_from_config`) the coefficients are expectations: the covariance of the stream,
Q_ik = E x_i.x_k / d, starts from sigma_embedding^2 for equal tokens, and goes up through Q <- Q + s^2 A N A^T for attention,
s^2 = d H c sigma_O^2 sigma_V^2 (each kind of matrix with the deviation that the rule of initialization gives it),
and Q <- Q + f sigma_down^2 E[act act] E[up up] for the feed-forward, N_ik = Q_ik / (r_i r_k), r_i^2 = Q_ii + eps, with the
expectations over jointly Gaussian pre-activations of covariance d sigma^2 N; those of slopes give K. With experts, both are
multiplied by the mean over experts, E sum_e w_ie w_ke for router logits of covariance d sigma^2 N, and K gains the router's
own part; a router's bias, 1/d of its logits' covariance, is left out. Attention is uniform: where queries and keys are
normed (Qwen3, Gemma 3, OLMo) this is not what fresh models do.
"""

import math
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from ..errors import InputError, check_choice
from ..models.checks import check_place
from ..models.initialization import Rule
from ..models.linear import LinearizedBlock
from ..models.load import born, takes_model
from ..models.pullback import Readout, readout_rows
from ..models.view import Parts, View, obstacle
from ..results.dataset import attributes, by_block, dataset, made_with, provenance
from ..run.memory import Retry
from ..run.progress import Progress, Tally
from ..run.store import Piece, Store
from .block import BornBlock, MeasuredBlock, Moments, Patterns, born_stream
from .score_path import HeadWeights

LABEL = {"long_name": "predicted ||J_j||_F / sqrt(d)", "units": "1"}
ROLLOUT = {"long_name": "share of the position in the rollout with measured attention strength", "units": "1"}
STRENGTH = {
    "long_name": "|a| / (|x| + |a|) of attention's output a and the stream x, mean over positions",
    "units": "1",
}


@torch.no_grad()
@takes_model
def second_moment(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    attention: Patterns = "uniform",
    score_path: bool = False,
    readout: Readout = "residual",
    query: int = -1,
    from_layer: int | Literal["all"] = 0,
    pieces: Store | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Predicted sensitivity of the readout at one query position to every position, from the second-moment kernel.

    One forward pass per prompt gives the coefficients (norms, activations, patterns); no derivative of the model is taken.

    Args:
        model: any view whose blocks can be taken apart; fresh weights for a prediction, trained ones for the baseline.
        tokens: ids [prompt, position], position 0 included; of other lengths with `attention_mask` (`docs/prompts.md`).
        attention: "uniform" over what the mask shows (under ALiBi its decay alone), or the "measured" pattern of every head.
        score_path: add the paths through queries and keys; needs measured patterns.
        readout, query, from_layer: as in `probes.jacobian`.
        pieces: where what each prompt gave is kept for an interrupted call (`probes.run.store`); in memory unless given.
        progress: called with (blocks done, blocks in all).

    Returns:
        Dataset with `sensitivity` [prompt, position], or [prompt, layer, position] with `from_layer="all"`, in the unit of
        `probes.jacobian`'s; of the same shape `rollout`, whose rows sum to 1, by arXiv 2602.16837, from the same patterns;
        `strength` [prompt, layer], attention's in every block; `tokens`; attributes that say what made it.

    Raises:
        InputError: an option or a place the model cannot take; blocks that cannot be taken apart (TransformerLens
            bridges, quantized or hooked modules), or do something else than their parts.

    Source: ours, see the module's text; what it answers is [Chowdhury], arXiv 2603.10123, section 3.
    """
    at, layers = check_place(model, tokens, query, from_layer)
    check_choice("attention", attention, ("uniform", "measured"))
    check_choice("readout", readout, ("residual", "normed", "logits"))
    if score_path and attention == "uniform":
        raise InputError("score_path=True needs the patterns themselves; give attention='measured' with it")
    sources = range(layers[0], model.spec.blocks)
    report = Tally(progress, len(tokens) * len(sources))
    retry = Retry(f"a prompt of {at + 1} positions of '{model.identity.name}'", report)

    def parts_of(layer: int) -> Parts:
        parts = model.parts(layer)
        if parts is None:
            why = obstacle(model, layer)
            raise InputError(
                f"block {layer} of '{model.identity.name}' ({model.identity.backend}) cannot be taken apart"
                + ("" if why is None else f" ({why})")
                + "; the theory needs an unchanged transformers model of a supported family"
            )
        return parts

    for layer in sources:  # before any work
        parts_of(layer)

    weights = dict[int, HeadWeights | None]()

    def predicted(n: int) -> Piece:
        trace = model.trace(model.embed(tokens[n : n + 1, : at + 1]))
        top = trace.residual[-1][0]
        dtype = torch.promote_types(top.dtype, torch.float32)
        moments = Moments.at_readout(readout_rows(model, top[-1], readout).to(dtype), top.to(dtype))
        row = torch.zeros_like(moments.radial)
        row[-1] = 1
        found, rows, given, strengths = dict[int, Tensor](), dict[int, Tensor](), list[Tensor](), list[Tensor]()
        for layer in reversed(sources):
            block = LinearizedBlock(parts_of(layer), trace.residual[layer], trace.rotary[layer])
            given.append(block.gives(trace.residual[layer + 1]))
            step = MeasuredBlock(block, trace.residual[layer + 1][0], attention, score_path, weights.get(layer))
            moments, weights[layer] = step.down(moments), step.weights
            found[layer] = moments.gram.diagonal().clamp_min(0).sqrt()
            rows[layer] = row = step.mixed(row)
            strengths.insert(0, step.strength)
            report()
        wrong = [
            layer for layer, right in zip(reversed(sources), torch.stack(given).tolist(), strict=True) if not right
        ]
        if wrong:
            raise InputError(
                f"block {wrong[0]} of '{model.identity.name}' does not do what its parts say; the theory needs its parts"
            )
        curves = [torch.stack([each[layer] for layer in layers]).cpu().numpy() for each in (found, rows)]
        return {"profile": curves[0], "rollout": curves[1], "strength": torch.stack(strengths).cpu().numpy()}

    stage = "second moment and rollout"
    by_prompt = (pieces or Store()).each(stage, len(tokens), lambda n: retry(lambda: predicted(n)))
    report.finish()
    options: dict[str, Any] = {"measurement": "second_moment", "attention": attention, "score_path": score_path}
    attrs = provenance(model, tokens, **options, readout=readout, query=at, from_layer=from_layer)
    variables: dict[str, Any] = {"strength": (("prompt", "layer"), by_prompt.stacked("strength"), STRENGTH)}
    for name, kept, label in (("sensitivity", "profile", LABEL), ("rollout", "rollout", ROLLOUT)):
        values = np.pad(by_prompt.stacked(kept), ((0, 0), (0, 0), (0, tokens.shape[1] - at - 1)))
        if from_layer == "all":
            variables[name] = ("prompt", "layer", "position"), values, label
        else:
            variables[name] = ("prompt", "position"), values[:, 0], label
    return dataset(variables, tokens=tokens, coords=by_block(model.spec, sources), attrs=attrs)


@torch.no_grad()
def second_moment_from_config(
    config: Any,
    length: int | None = None,
    *,
    tokens: Int[Tensor, "prompt position"] | None = None,
    initialization: Rule | None = None,
    adding: Literal["powers", "amplitudes"] = "powers",
) -> xr.Dataset:
    """The same prediction for fresh weights of a configuration, from the configuration alone: no weights are made.

    Uniform attention, the residual stream at the last position, the input of block 0.

    Args:
        config: a transformers configuration, a dictionary or config.json of one, a folder with that file, a bundled name, a
            view, or a `Birth` that says what weights are drawn from.
        length: positions, unless `tokens` are given.
        tokens: ids [prompt, position]. Only which of them are equal matters: equal tokens have equal embeddings. Without
            them all are taken to differ.
        initialization: the rule that weights are drawn by; if not given, the one by which a view's fresh weights were
            drawn, else "config".
        adding: of paths. "amplitudes" is the other theory with the very same coefficients, to tell what the addition alone
            does: the roots of all coefficients add up, as in N^L ([Chowdhury]).

    Returns:
        Dataset with `sensitivity` [position], or [prompt, position] with `tokens`; the attribute `initialization` says
        what weights are drawn from, unless a `Birth` was given that does not say.

    Raises:
        InputError: no such configuration, an unsupported family, no such rule, or a length that is not positive.

    Source: ours, see the module's text.
    """
    check_choice("adding", adding, ("powers", "amplitudes"))
    birth = born(config, initialization=initialization)
    if tokens is None and not (isinstance(length, int) and length >= 1):
        raise InputError(f"length={length} is no number of positions; give at least 1, or tokens")
    positions = int(length or 0) if tokens is None else tokens.shape[1]
    if birth.positions and positions > (birth.spec.max_length or math.inf):
        raise InputError(
            f"{positions} positions are more than the {birth.spec.max_length} that are learned; give fewer"
        )
    profiles = []
    for prompt in [None] if tokens is None else tokens.cpu():
        stream = born_stream(birth, positions, prompt)
        blocks = []
        for layer in range(birth.spec.blocks):
            blocks.append(BornBlock(birth, layer, stream))
            stream = blocks[-1].after
        gram, row = torch.zeros_like(stream), torch.zeros_like(stream[0])
        gram[-1, -1] = row[-1] = 1
        for block in reversed(blocks):
            gram, row = (block.down(gram), row) if adding == "powers" else (gram, block.down_amplitudes(row))
        profiles.append(gram.diagonal().clamp_min(0).sqrt() if adding == "powers" else row)
    options = {"measurement": "second_moment_from_config", "length": positions, "spec": asdict(birth.spec)}
    options |= {"adding": adding}
    drawn = {} if birth.initialization is None else {"initialization": birth.initialization}
    attrs, label = attributes({"options": options} | drawn) | made_with(), LABEL | drawn
    if tokens is None:
        return dataset({"sensitivity": (("position",), profiles[0], label)}, attrs=attrs)
    return dataset({"sensitivity": (("prompt", "position"), torch.stack(profiles), label)}, tokens=tokens, attrs=attrs)
