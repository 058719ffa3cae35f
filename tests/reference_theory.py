"""The slow twin of a block's step in the second-moment theory, one pair of positions at a time."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import reference
import torch
from torch import Tensor

from probes.models.view import Linear, Norm, Parts


def second_moment_step(
    parts: Parts,
    stream: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    gram: Tensor,
    radial: Tensor,
    *,
    measured: bool,
    scores: bool,
) -> tuple[Tensor, Tensor]:
    """(G, S) above a block -> (G, S) below it, from the formulas at the top of theory.py, one pair of positions at a time.

    G is [position, position], S [position]; `measured` takes the block's own patterns, `scores` adds the score path.
    """
    length, d = stream.shape
    c = parts.head_dim
    heads = parts.q.weight.shape[0] // c
    groups = parts.q.weight.shape[0] // parts.k.weight.shape[0]

    def projector(norm: Norm | None, x: Tensor) -> Tensor:
        """P, for one row of a stream (or of queries); without a norm the identity."""
        if norm is None:
            return torch.eye(len(x), dtype=x.dtype)
        unit = reference.centred(norm, x) / reference.rms(norm, x)
        left = torch.eye(len(x), dtype=x.dtype) - torch.outer(unit, unit) / len(x)
        return left - 1 / len(x) if norm.kind == "layer" else left

    def turn(position: int) -> Tensor:
        """R, as a matrix."""
        if rotary is None:
            return torch.eye(c, dtype=stream.dtype)
        cos, sin = rotary[0][position : position + 1], rotary[1][position : position + 1]
        return torch.stack(
            [reference.rotated(column[None], cos, sin)[0] for column in torch.eye(c, dtype=stream.dtype)], 1
        )

    # What the block computes on the way up.
    middle = attention_output(parts, stream, rotary)
    read = stream if parts.parallel else middle
    after = reference.block(parts, stream, rotary)

    # Feed-forward: K_ik = tr(F_i F_k^T) / d, cross terms of two features left out.
    norm = parts.mlp_norm
    branch, terms = zip(*(feed_forward_terms(parts, reference.normalized(norm, x)) for x in read), strict=True)
    projectors, sizes = [projector(norm, x) for x in read], [size(norm, x) for x in read]
    kernel = torch.zeros_like(gram)
    for i in range(length):
        for k in range(length):
            for name in terms[i].keys() & terms[k].keys():
                kernel[i, k] += (terms[i][name][0] * terms[k][name][0] * terms[i][name][1]).sum()
            kernel[i, k] *= (projectors[i] @ projectors[k]).trace() / d / (d * sizes[i] * sizes[k])
            if parts.post_mlp_norm is not None:
                kernel[i, k] /= reference.rms(parts.post_mlp_norm, branch[i]) * reference.rms(
                    parts.post_mlp_norm, branch[k]
                )
    between = gram + gram * kernel
    if parts.parallel:
        above, g, s = after, gram, radial
    else:
        above, g = middle, between
        s = turned(radial, gram, after, middle)

    # Attention.
    norm = parts.attention_norm
    n1 = [reference.normalized(norm, x) for x in stream]
    first_weight = torch.ones(d, dtype=stream.dtype) if norm is None else norm.weight
    projectors, sizes = [projector(norm, x) for x in stream], [size(norm, x) for x in stream]
    turns = [turn(position) for position in range(length)]
    post, weight = torch.ones(length, dtype=stream.dtype), torch.ones(d, dtype=stream.dtype)
    if parts.post_attention_norm is not None:
        added, weight = attention_output(parts, stream, rotary, branch=True), parts.post_attention_norm.weight
        post = torch.stack([reference.rms(parts.post_attention_norm, x) for x in added])
    spread, through = torch.zeros_like(gram), torch.zeros_like(radial)
    g, s = g / torch.outer(post, post), s / post**2
    joint = torch.zeros(d, d, dtype=stream.dtype)
    seen: Any = {"softcap": parts.softcap, "window": parts.window}
    slopes = torch.zeros(heads, dtype=stream.dtype) if parts.slopes is None else parts.slopes
    for head in range(heads):
        own, shared = slice(head * c, (head + 1) * c), slice(head // groups * c, (head // groups + 1) * c)
        w_o = weight[:, None] * parts.o.weight[:, own]
        matrices = parts.q.weight[own], parts.k.weight[shared], parts.v.weight[shared]
        w_q, w_k, w_v = (w * first_weight for w in matrices)
        joint += w_o @ w_v
        # Rotated queries and keys, and their derivative by the normed stream without the norm's weight.
        queries, keys, values, by_query, by_key = [], [], [], [], []
        for j, x in enumerate(n1):
            q, k, v = (reference.affine(one, x) for one in (parts.q, parts.k, parts.v))
            (q, dq), (k, dk) = (
                normed_head(one, full, at, w)
                for one, full, at, w in ((parts.q_norm, q, own, w_q), (parts.k_norm, k, shared, w_k))
            )
            queries.append(turns[j] @ q)
            keys.append(turns[j] @ k)
            values.append(v[shared])
            by_query.append(turns[j] @ dq)
            by_key.append(turns[j] @ dk)
        whole = reference.masked_logits(
            torch.stack(queries)[None, None], torch.stack(keys)[None, None], parts.scale, **seen
        )
        logits = whole[0, 0]
        weighed = logits if measured else torch.where(logits.isfinite(), 0.0, logits)
        weighed = weighed + slopes[head] * torch.arange(length, dtype=stream.dtype)  # up to a row's own
        pattern = weighed.softmax(-1) if parts.sink is None else reference.beside_sink(weighed, parts.sink[head])
        capped = torch.where(logits.isfinite(), logits, 0.0) / (parts.softcap or math.inf)
        steep = pattern * (1 - capped**2)
        if measured or parts.sink is not None or parts.slopes is not None:  # or all heads' patterns are one
            spread += (w_o @ w_v).pow(2).sum() / d * (pattern.T @ g @ pattern)
        if not scores:
            continue
        for i in range(length):
            x, o = above[i], sum(pattern[i, j] * values[j] for j in range(length))

            def felt(u: Tensor, i: int = i, x: Tensor = x) -> Tensor:
                """|J_i u|^2 / d."""
                along = (u @ x) ** 2 / (x @ x)
                return g[i, i] * (u @ u - along) + s[i] * along

            moved = torch.zeros(d, d, dtype=stream.dtype)  # sum_m u_im (scale W_Q^T R_i^T k_m)^T
            for j in range(length):
                u = steep[i, j] * w_o @ (values[j] - o)
                through[j] += felt(u) * (parts.scale * by_key[j].T @ queries[i]).pow(2).sum() / (d * sizes[j] ** 2)
                moved += torch.outer(u, parts.scale * by_query[i].T @ keys[j])
            through[i] += sum(felt(column) for column in moved.T) / (d * sizes[i] ** 2)
    if not measured and parts.sink is None and parts.slopes is None:
        spread = joint.pow(2).sum() / d * (pattern.T @ g @ pattern)
    for j in range(length):
        for k in range(length):
            spread[j, k] *= (projectors[j] @ projectors[k]).trace() / d / (sizes[j] * sizes[k])
    above = (radial, gram, after) if parts.parallel else (turned(radial, gram, after, middle), between, middle)
    below = turned(*above, stream)
    return between + spread + torch.diag(through), below


def size(norm: Norm | None, x: Tensor) -> Any:
    return 1.0 if norm is None else reference.rms(norm, x)


def normed_head(norm: Norm | None, full: Tensor, at: slice, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """One head's queries or keys after their norm, and the derivative by the normed stream; heads' own features alone."""
    if norm is None:
        return full[at], matrix
    whole = len(norm.weight) == len(full)  # over all heads at once
    x, weight = (full, norm.weight[at]) if whole else (full[at], norm.weight)
    unit = (x / reference.rms(norm, x))[at] if whole else x / reference.rms(norm, x)
    left = torch.eye(len(unit), dtype=unit.dtype) - torch.outer(unit, unit) / len(x)
    return weight * unit, torch.diag(weight) @ left / reference.rms(norm, x) @ matrix


def feed_forward_terms(parts: Parts, n: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Any]]]:
    """(output, by term (a [f], |..|^2 |..|^2 [f])) at one normed row; two rows' terms of one name go together."""
    norm, weight = (torch.ones_like(n) if one is None else one.weight for one in (parts.mlp_norm, parts.post_mlp_norm))
    output = reference.fed_forward(parts, n[None])[0]
    if parts.routing is None:
        lengths = ((weight[:, None] * parts.down.weight) ** 2).sum(0)
        up = reference.affine(parts.up, n)
        if parts.gate is None:
            terms = {"up": (slope(parts.activation, up), parts.up)}
        else:
            gate, of_up = reference.affine(parts.gate, n), parts.up_activation or torch.nn.Identity()
            terms = {
                "gate": (of_up(up) * slope(parts.activation, gate), parts.gate),
                "up": (parts.activation(gate) * slope(of_up, up), parts.up),
            }
        return output, {key: (a, lengths * ((one.weight * norm) ** 2).sum(1)) for key, (a, one) in terms.items()}
    routing, found = parts.routing, {}
    for e, w in reference.routed(routing, n).items():
        own, terms = feed_forward_terms(reference.expert(parts, e), n)
        found |= {f"{e} {key}": (w * a, lengths) for key, (a, lengths) in terms.items()}
        turned = torch.autograd.functional.jacobian(lambda x, e=e: reference.routed(routing, x)[e], n)
        found[f"{e} router"] = torch.outer(weight * own, norm * turned), 1.0
    return output, found


def attention_output(
    parts: Parts, stream: Tensor, rotary: tuple[Tensor, Tensor] | None, *, branch: bool = False
) -> Tensor:
    """The stream after attention was added; or attention's branch alone, before any norm on it."""
    silent = replace(parts, down=Linear(torch.zeros_like(parts.down.weight), None), post_mlp_norm=None)
    if not branch:
        return reference.block(silent, stream, rotary)
    return reference.block(replace(silent, post_attention_norm=None), stream, rotary) - stream


def turned(radial: Tensor, gram: Tensor, above: Tensor, below: Tensor) -> Tensor:
    """S_below = c^2 S_above + (1 - c^2) G_above,ii, c the cosine between the stream below and above a branch."""
    found = []
    for i, (x, y) in enumerate(zip(above, below, strict=True)):
        squared = (x @ y) ** 2 / ((x @ x) * (y @ y))
        found.append(squared * radial[i] + (1 - squared) * gram[i, i])
    return torch.stack(found)


def slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """f'(x), elementwise."""
    return torch.autograd.functional.jacobian(function, x).diagonal()
