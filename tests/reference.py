"""Slow obvious twins: each written from its formula, in plain Python or float64, to test the fast code against."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from probes.models.view import Linear, Norm, Parts

# ----------------------------------------------------------------------------------------- pretraining (toy.pretrain)


def bigram_loss(training: list[int], held: list[int], *, length: int, vocabulary: int) -> float:
    """Nats per token of p(b|a) = (n_ab + k p_b) / (n_a + k), the best k of five, over side-by-side windows' targets."""
    pairs = [
        (held[start + offset], held[start + offset + 1])
        for start in range(0, len(held) - length - 1, length)
        for offset in range(length)
    ]
    losses = []
    for k in (1, 3, 10, 30, 100):
        total = 0.0
        for a, b in pairs:
            together = sum(x == a and y == b for x, y in itertools.pairwise(training))
            alone = sum(x == a for x in training[:-1])
            unigram = (sum(y == b for y in training) + 1) / (len(training) + vocabulary)
            total -= math.log((together + k * unigram) / (alone + k))
        losses.append(total / len(pairs))
    return min(losses)


# ---------------------------------------------------------------------------------------------- curves (summary)


def ushape(curve: list[float]) -> dict[str, float]:
    """The U-shape summary, term by term as science.md has it."""
    length = len(curve)
    median = statistics.median(curve[j] for j in range(length) if length / 4 <= j < 3 * length / 4)
    beginning = [curve[j] for j in range(length) if j < 0.05 * length]
    smoothed = []
    for j in range(length):
        reach = max(r for r in range(length) if 2 * r <= 0.05 * length and j - r >= 0 and j + r <= length - 1)
        smoothed.append(sum(curve[j - reach : j + reach + 1]) / (2 * reach + 1))
    return {
        "primacy": sum(beginning) / len(beginning) / median,
        "recency": curve[-1] / median,
        "middle": median,
        "trough": smoothed.index(min(smoothed)),
    }


def ranks(values: list[float]) -> list[float]:
    """1 for the smallest; of equal values each gets the mean of their places."""
    return [1 + sum(w < v for w in values) + (sum(w == v for w in values) - 1) / 2 for v in values]


# ------------------------------------------------------------------------------- blocks and Jacobians (linear, jacobian)


def normalized(norm: Norm, x: Tensor) -> Tensor:
    """weight * (x - mean) / rms + bias, one row at a time; the mean for LayerNorm alone."""
    rows = [norm.weight * centred(norm, row) / rms(norm, row) for row in x.reshape(-1, x.shape[-1])]
    return torch.stack(rows if norm.bias is None else [row + norm.bias for row in rows]).view_as(x)


def centred(norm: Norm, row: Tensor) -> Tensor:
    return row - row.sum() / len(row) if norm.kind == "layer" else row


def rms(norm: Norm, row: Tensor) -> Tensor:
    return torch.sqrt((centred(norm, row) ** 2).sum() / len(row) + norm.eps)


def affine(linear: Linear, x: Tensor) -> Tensor:
    return x @ linear.weight.T + (0 if linear.bias is None else linear.bias)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [position, c] times each position's rotation matrix, feature f in a plane with feature f + half."""
    half, rows = cos.shape[-1] // 2, []
    for row, c, s in zip(x, cos, sin, strict=True):
        matrix = torch.eye(x.shape[-1], dtype=x.dtype)
        for f in range(half):
            matrix[f, f], matrix[f + half, f + half] = c[f], c[f + half]
            matrix[f, f + half], matrix[f + half, f] = -s[f], s[f + half]
        rows.append(matrix @ row)
    return torch.stack(rows)


def block(
    parts: Parts,
    stream: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    attended: Tensor | None = None,
    *,
    frozen: bool = False,
) -> Tensor:
    """A block [position, d] -> [position, d], head by head and query by query.

    `attended` is what attention reads, the stream unless given: so that its derivative can be had apart from the rest.
    With `frozen` the attention weights are numbers that have no derivative.
    """

    def rms_or_as_is(norm: Norm | None, x: Tensor) -> Tensor:
        return x if norm is None else normalized(norm, x)

    n1, c = normalized(parts.attention_norm, stream if attended is None else attended), parts.head_dim
    q, k, v = affine(parts.q, n1), affine(parts.k, n1), affine(parts.v, n1)
    heads, groups = q.shape[1] // c, q.shape[1] // k.shape[1]
    outputs = []
    for head in range(heads):
        own, shared = slice(head * c, (head + 1) * c), slice(head // groups * c, (head // groups + 1) * c)
        queries, keys = rms_or_as_is(parts.q_norm, q[:, own]), rms_or_as_is(parts.k_norm, k[:, shared])
        if rotary is not None:
            queries, keys = rotated(queries, *rotary), rotated(keys, *rotary)
        rows = []
        for i in range(len(stream)):
            seen = slice(0 if parts.window is None else max(0, i - parts.window + 1), i + 1)
            logits = parts.scale * keys[seen] @ queries[i]
            if parts.softcap is not None:
                logits = parts.softcap * torch.tanh(logits / parts.softcap)
            if parts.slopes is not None:
                logits = logits - parts.slopes[head] * torch.tensor([float(i - j) for j in range(i + 1)])[seen]
            weights = torch.exp(logits - logits.max())
            weights = weights / weights.sum()
            rows.append((weights.detach() if frozen else weights) @ v[seen, shared])
        outputs.append(torch.stack(rows))
    middle = stream + rms_or_as_is(parts.post_attention_norm, affine(parts.o, torch.cat(outputs, 1)))
    n2 = normalized(parts.mlp_norm, stream if parts.parallel else middle)
    hidden = affine(parts.up, n2)
    hidden = parts.activation(hidden) if parts.gate is None else parts.activation(affine(parts.gate, n2)) * hidden
    return middle + rms_or_as_is(parts.post_mlp_norm, affine(parts.down, hidden))


def jacobian_norms(outputs: Tensor, source: Tensor) -> Tensor:
    """sqrt(sum_o ||d outputs_o / d source_j||^2) for every position j of `source` [1, position, d], one o at a time."""
    total = torch.zeros(source.shape[1], dtype=torch.float64)
    for output in outputs:
        (row,) = torch.autograd.grad(output, source, retain_graph=True)
        total += row[0].double().pow(2).sum(-1)
    return total.sqrt()


def pathway_norms(
    parts: list[Parts], rotary: Sequence[tuple[Tensor, Tensor] | None], stream: Tensor, top: Tensor
) -> dict[str, Tensor]:
    """||J_j||_F for every pathway, J = top J_total or top J_value, or the difference of the two.

    `stream` [position, d] is what the first of the blocks reads, `top` [output, d] the derivative of the readout with
    respect to the last position's stream after the last one.
    """
    rows = {}
    for frozen in (False, True):
        source = stream.detach().clone().requires_grad_()
        x = source
        for one, turn in zip(parts, rotary, strict=True):
            x = block(one, x, turn, frozen=frozen)
        (rows[frozen],) = torch.autograd.grad(x[-1], source, top, is_grads_batched=True)  # [output, position, d]
    found = {"total": rows[False], "value": rows[True], "score": rows[False] - rows[True]}
    return {pathway: jacobian.pow(2).sum((0, 2)).sqrt() for pathway, jacobian in found.items()}


# ---------------------------------------------------------------------------------- the theory's step (theory, moments)


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

    def projector(norm: Norm, x: Tensor) -> Tensor:
        """P, for one row of a stream (or of one head's queries)."""
        unit = centred(norm, x) / rms(norm, x)
        left = torch.eye(len(x), dtype=x.dtype) - torch.outer(unit, unit) / len(x)
        return left - 1 / len(x) if norm.kind == "layer" else left

    def turn(position: int) -> Tensor:
        """R, as a matrix."""
        if rotary is None:
            return torch.eye(c, dtype=stream.dtype)
        cos, sin = rotary[0][position : position + 1], rotary[1][position : position + 1]
        return torch.stack([rotated(column[None], cos, sin)[0] for column in torch.eye(c, dtype=stream.dtype)], 1)

    # What the block computes on the way up.
    middle = attention_output(parts, stream, rotary)
    read = stream if parts.parallel else middle
    after = block(parts, stream, rotary)

    # Feed-forward: K_ik = tr(F_i F_k^T) / d, cross terms of two features left out.
    norm = parts.mlp_norm
    down = parts.down.weight
    if parts.post_mlp_norm is not None:
        down = parts.post_mlp_norm.weight[:, None] * down
    slopes, branch = [], []
    for x in read:
        n = normalized(norm, x)
        up = affine(parts.up, n)
        if parts.gate is None:
            slopes.append([slope(parts.activation, up)])
            hidden = parts.activation(up)
        else:
            gate = affine(parts.gate, n)
            slopes.append([up * slope(parts.activation, gate), parts.activation(gate)])
            hidden = parts.activation(gate) * up
        branch.append(affine(parts.down, hidden))
    firsts = [one.weight * norm.weight for one in ([parts.up] if parts.gate is None else [parts.gate, parts.up])]
    projectors, sizes = [projector(norm, x) for x in read], [rms(norm, x) for x in read]
    kernel = torch.zeros_like(gram)
    for i in range(length):
        for k in range(length):
            for which, first in enumerate(firsts):
                lengths = (down**2).sum(0) * (first**2).sum(1)  # |W_down,f|^2 |W_first,f|^2, [f]
                kernel[i, k] += (slopes[i][which] * slopes[k][which] * lengths).sum()
            kernel[i, k] *= (projectors[i] @ projectors[k]).trace() / d / (d * sizes[i] * sizes[k])
            if parts.post_mlp_norm is not None:
                kernel[i, k] /= rms(parts.post_mlp_norm, branch[i]) * rms(parts.post_mlp_norm, branch[k])
    between = gram + gram * kernel
    if parts.parallel:
        above, g, s = after, gram, radial
    else:
        above, g = middle, between
        s = turned(radial, gram, after, middle)

    # Attention.
    norm = parts.attention_norm
    n1 = [normalized(norm, x) for x in stream]
    projectors, sizes = [projector(norm, x) for x in stream], [rms(norm, x) for x in stream]
    turns = [turn(position) for position in range(length)]
    post, weight = torch.ones(length, dtype=stream.dtype), torch.ones(d, dtype=stream.dtype)
    if parts.post_attention_norm is not None:
        added, weight = attention_output(parts, stream, rotary, branch=True), parts.post_attention_norm.weight
        post = torch.stack([rms(parts.post_attention_norm, x) for x in added])
    spread, through = torch.zeros_like(gram), torch.zeros_like(radial)
    g, s = g / torch.outer(post, post), s / post**2
    joint = torch.zeros(d, d, dtype=stream.dtype)
    pattern = torch.zeros_like(gram)
    for head in range(heads):
        own, shared = slice(head * c, (head + 1) * c), slice(head // groups * c, (head // groups + 1) * c)
        w_o = weight[:, None] * parts.o.weight[:, own]
        w_q, w_k, w_v = (w * norm.weight for w in (parts.q.weight[own], parts.k.weight[shared], parts.v.weight[shared]))
        joint += w_o @ w_v
        # Rotated queries and keys, and their derivative by the normed stream without the norm's weight.
        queries, keys, values, by_query, by_key = [], [], [], [], []
        for j, x in enumerate(n1):
            q, k, v = (affine(one, x) for one in (parts.q, parts.k, parts.v))
            q, k = q[own], k[shared]
            dq, dk = w_q, w_k
            if parts.q_norm is not None and parts.k_norm is not None:
                dq = torch.diag(parts.q_norm.weight) @ projector(parts.q_norm, q) / rms(parts.q_norm, q) @ dq
                dk = torch.diag(parts.k_norm.weight) @ projector(parts.k_norm, k) / rms(parts.k_norm, k) @ dk
                q, k = normalized(parts.q_norm, q), normalized(parts.k_norm, k)
            queries.append(turns[j] @ q)
            keys.append(turns[j] @ k)
            values.append(v[shared])
            by_query.append(turns[j] @ dq)
            by_key.append(turns[j] @ dk)
        pattern, steep = torch.zeros_like(gram), torch.zeros_like(gram)
        for i in range(length):
            seen = [j for j in range(i + 1) if parts.window is None or j > i - parts.window]
            if not measured:
                pattern[i, seen] = 1 / len(seen)
                continue
            logits = torch.stack([parts.scale * queries[i] @ keys[j] for j in seen])
            steepness = torch.ones_like(logits)
            if parts.softcap is not None:
                steepness = 1 - torch.tanh(logits / parts.softcap) ** 2
                logits = parts.softcap * torch.tanh(logits / parts.softcap)
            pattern[i, seen] = logits.softmax(0)
            steep[i, seen] = pattern[i, seen] * steepness
        if measured:
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
    if not measured:
        spread = joint.pow(2).sum() / d * (pattern.T @ g @ pattern)
    for j in range(length):
        for k in range(length):
            spread[j, k] *= (projectors[j] @ projectors[k]).trace() / d / (sizes[j] * sizes[k])
    if parts.parallel:
        below = turned(radial, gram, after, stream)
    else:
        below = turned(turned(radial, gram, after, middle), between, middle, stream)
    return between + spread + torch.diag(through), below


def attention_output(
    parts: Parts, stream: Tensor, rotary: tuple[Tensor, Tensor] | None, *, branch: bool = False
) -> Tensor:
    """The stream after attention was added; or attention's branch alone, before any norm on it."""
    silent = replace(parts, down=Linear(torch.zeros_like(parts.down.weight), None), post_mlp_norm=None)
    if not branch:
        return block(silent, stream, rotary)
    return block(replace(silent, post_attention_norm=None), stream, rotary) - stream


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


# ------------------------------------------------------------------------------------------- sinks (probes.sinks)


def sinks(
    patterns: Sequence[Sequence[Tensor]],
    keys: Sequence[Sequence[Tensor]],
    values: Sequence[Sequence[Tensor]],
    weights: Sequence[Tensor],
    windows: Sequence[int | None],
    *,
    chosen: Sequence[int],
    threshold: float,
    tau: float,
) -> dict[str, Tensor]:
    """Sink metrics and reading of position 0, entry by entry: patterns, keys, values by prompt and block, W_O by block."""
    prompts, blocks, heads, length = len(patterns), len(weights), len(weights[0]), patterns[0][0].shape[-1]
    by_key = sinks_of_keys(patterns, windows, None, threshold=threshold, tau=tau)
    names = ("attends", "reads", "reads_along", "value_norm", "key_norm", "written_norm")
    found = {n: torch.zeros(blocks, heads, *[2] * n.endswith("norm"), dtype=torch.float64) for n in names}
    for l in range(blocks):  # noqa: E741
        reach = length if windows[l] is None else windows[l]
        assert reach is not None
        for h in range(heads):
            weight_sum = from_0 = along = whole = 0.0
            queries = 0
            norms: dict[str, list[list[float]]] = {n: [[], []] for n in names if n.endswith("norm")}
            for p in range(prompts):
                a, k, v = (x[p][l][h].double() for x in (patterns, keys, values))
                written = v @ weights[l][h].double()
                for i in range(1, min(length, reach)):
                    one, all_of_it = a[i, 0] * written[0], a[i] @ written
                    weight_sum += a[i, 0].item()
                    from_0 += one.pow(2).sum().item()
                    along += (one @ all_of_it).item()
                    whole += all_of_it.pow(2).sum().item()
                    queries += 1
                for name, rows in (("value_norm", v), ("key_norm", k), ("written_norm", written)):
                    norms[name][0].append(rows[0].norm().item())
                    norms[name][1] += [row.norm().item() for row in rows[1:]]
            found["attends"][l, h] = weight_sum / queries
            found["reads"][l, h] = math.sqrt(from_0 / whole)
            found["reads_along"][l, h] = along / whole
            for name, both in norms.items():
                for place in range(2):
                    found[name][l, h, place] = sum(both[place]) / len(both[place])
    alpha, over, rate = (by_key[name][..., list(chosen)] for name in ("alpha", "over_tau", "sink_rate"))
    of_model = {"over_tau_of_model": over.mean((0, 1)), "sink_rate_of_model": rate.mean(0)}
    return found | {"alpha": alpha, "over_tau": over, "sink_rate": rate} | of_model


@cache
def uniform_alpha(length: int, key: int, window: int | None, prefix: int | None = None) -> float:
    """alpha of a key where every query spreads its attention evenly over what it sees."""
    seen = [sum(looks_at(i, j, window, prefix) for j in range(length)) for i in range(length)]
    return sum(1 / seen[i] for i in range(key, length) if looks_at(i, key, window, prefix)) / (length - key)


def written_beside(
    pattern: Tensor, written: Tensor, stream: Tensor, window: int | None, swapped: Tensor | None = None
) -> dict[str, float]:
    """One head's sizes beside the stream over queries i >= 1 that see position 0, its values written as `written` [T, d].

    `swapped` [T, d]: what it writes with another embedding at position 0.
    """
    taken, whole, change, here, elsewhere = [], [], [], 0.0, 0.0
    for i in range(1, min(len(stream), window or len(stream))):
        beside, weight, output = stream[i].norm().item(), pattern[i, 0].item(), pattern[i] @ written
        hidden = pattern[i, 1:] / pattern[i, 1:].sum() @ written[1:]
        taken.append((weight * written[0].norm().item() / beside) ** 2)
        whole.append((output.norm().item() / beside) ** 2)
        here += weight * output.norm().item() ** 2
        elsewhere += weight * hidden.norm().item() ** 2
        if swapped is not None:
            change.append(((output - swapped[i]).norm().item() / beside) ** 2)
    found = {"written": taken, "output": whole} | ({} if swapped is None else {"reacts_output": change})
    return {name: math.sqrt(sum(x) / len(x)) for name, x in found.items()} | {"output_own": math.sqrt(here / elsewhere)}


def reaction(before: Tensor, after: Tensor, window: int | None) -> tuple[float, float]:
    """Total variation over keys >= 1 of one head's rows i >= 2 that see position 0: as they are, and renormalized."""
    moved, among = [], []
    for i in range(2, min(before.shape[-1], window or before.shape[-1])):
        a, b = before[i, 1 : i + 1].double(), after[i, 1 : i + 1].double()
        moved.append((a - b).abs().sum().item() / 2)
        among.append((a / a.sum() - b / b.sum()).abs().sum().item() / 2)
    return sum(moved) / len(moved), sum(among) / len(among)


# -------------------------------------------------------------------------------------------------------- leakage


def _leakage_of_half(logits: Tensor, half: range, queries: range, lags: Sequence[int]) -> dict[str, list[list[float]]]:
    """Means over the prompts of a half by name, [lag][query]; the names are those of science.md."""
    size, length = len(half), logits.shape[-1]
    mean = {
        (i, j): sum(float(logits[n, i, j]) for n in half) / size
        for i in range(length)
        for j in range(i + 1)
        if math.isfinite(float(logits[half[0], i, j]))
    }
    by_lag: dict[int, list[float]] = {}
    for (i, j), value in mean.items():
        if j > 0:
            by_lag.setdefault(i - j, []).append(value)
    t = {lag: sum(values) / len(values) for lag, values in by_lag.items()}
    for lag in range(max(t) + 1, length):
        t[lag] = t[max(by_lag)]

    def own(n: int, i: int, j: int) -> float:
        return float(logits[n, i, j])

    def toeplitz(n: int, i: int, j: int) -> float:
        return own(n, i, j) - mean[i, j] + t[i - j]

    # Position 0's mean logit without position in any stream: a constant of the band, or t(i) and a constant.
    sees = [i for i in queries if (i, 0) in mean]
    plain = {}
    for b in (0, 1):
        away = [mean[i, 0] - b * t[i] for i in sees]
        level = sum(away) / max(1, len(away))
        plain[b] = (sum((x - level) ** 2 for x in away), {i: b * t[i] + level for i in sees})
    steady = min(plain.values(), key=lambda found: found[0])[1]

    def constant(n: int, i: int, j: int) -> float:
        return own(n, i, j) - mean[i, j] + steady[i]

    def log_sums(sink: Callable[..., float], others: Callable[..., float]) -> dict[tuple[int, int], float]:
        """Log-sum-exps of every prompt and query, of logits of position 0 and of all others."""
        return {
            (n, i): math.log(
                sum(math.exp((sink if j == 0 else others)(n, i, j)) for j in range(i + 1) if (i, j) in mean)
            )
            for n in half
            for i in queries
        }

    z, m = log_sums(own, own), log_sums(toeplitz, toeplitz)
    k, c = log_sums(own, toeplitz), log_sums(constant, toeplitz)
    mean_z, mean_m, mean_k, mean_c = ({i: sum(x[n, i] for n in half) / size for i in queries} for x in (z, m, k, c))
    level_z, level_m = (sum(x.values()) / len(x) for x in (mean_z, mean_m))
    found: dict[str, list[list[float]]] = {}
    for lag in lags:
        rows: dict[str, list[float]] = {}
        for i in queries:
            s, mask = mean[i, i - lag], mean_m[i] - level_m
            weights = dict.fromkeys(("both", "w_mask", "w_residual", "t_residual", "neither"), 0.0)
            for n in half:
                logit, plain_one = own(n, i, i - lag) - z[n, i], toeplitz(n, i, i - lag) - m[n, i]
                weights["both"] += math.exp(logit) / size
                weights["w_mask"] += math.exp(plain_one) / size
                weights["w_residual"] += math.exp(logit + mean_z[i] - level_z) / size
                weights["t_residual"] += math.exp(logit + mask) / size
                weights["neither"] += math.exp(plain_one + mask) / size
            values = {"S": s, "M": mean_m[i], "D": mean_z[i] - mean_m[i], "l": s - mean_z[i]}
            values |= {"X+": s - mean_z[i] + mean_m[i], "K": mean_k[i] - mean_m[i], "R": mean_z[i] - mean_k[i]}
            values |= {"X": s - mean_z[i] + mean_c[i], "M+": mean_c[i]}
            values |= {"C": mean_c[i] - mean_m[i], "V": mean_k[i] - mean_c[i]}
            for name, value in (values | weights).items():
                rows.setdefault(name, []).append(value)
        for name, row in rows.items():
            found.setdefault(name, []).append(row)
    return found


def leakage(logits: Tensor, first: int, last: int, lags: Sequence[int]) -> dict[str, float]:
    """Both forms for one head from its logits [prompt, query, key] (minus infinity where hidden), entry by entry.

    Every mean, Toeplitz average and log-sum-exp is written out; the two halves of the prompts are taken apart first.
    """
    count, queries = len(logits), range(first, last + 1)
    quantities = [
        _leakage_of_half(logits, half, queries, lags) for half in (range(count // 2), range(count // 2, count))
    ]

    def covariance(x: str, y: str) -> float:
        total = 0.0
        for at in range(len(lags)):
            for a, b in ((0, 1), (1, 0)):
                one, other = quantities[a][x][at], quantities[b][y][at]
                mean_one, mean_other = sum(one) / len(one), sum(other) / len(other)
                products = [(p - mean_one) * (q - mean_other) for p, q in zip(one, other, strict=True)]
                total += sum(products) / len(products) / 2
        return total / len(lags)

    whole = [
        [(a + b) / 2 for a, b in zip(one, other, strict=True)]
        for one, other in zip(quantities[0]["l"], quantities[1]["l"], strict=True)
    ]
    uncorrected = sum(sum((v - sum(row) / len(row)) ** 2 for v in row) / len(row) for row in whole) / len(whole)
    shared, shared_whole = covariance("X", "M+"), covariance("X+", "M")
    both, only_mask, only_residual, no_terms, neither = (
        covariance(cell, cell) for cell in ("both", "w_mask", "w_residual", "t_residual", "neither")
    )
    return {
        "total": covariance("l", "l"),
        "logits": covariance("S", "S"),
        "mask": covariance("M", "M"),
        "denominator": covariance("D", "D"),
        "covariance": 2 * (covariance("M", "D") - covariance("S", "M") - covariance("S", "D")),
        "stream": covariance("X+", "X+"),
        "log mask": covariance("M", "M") - shared_whole,
        "log residual": covariance("X+", "X+") - shared_whole,
        "steady stream": covariance("X", "X"),
        "steady mask": covariance("M+", "M+") - shared,
        "steady residual": covariance("X", "X") - shared,
        "sink constant": covariance("C", "C"),
        "sink varying": covariance("V", "V"),
        "noise": uncorrected - covariance("l", "l"),
        "sink": covariance("K", "K"),
        "rest": covariance("R", "R"),
        "both": both,
        "only mask": only_mask,
        "only residual": only_residual,
        "neither": neither,
        "weight mask": (only_mask - neither + both - only_residual) / 2,
        "weight residual": (only_residual - neither + both - only_mask) / 2,
        "terms mask": (only_mask - neither + both - no_terms) / 2,
        "terms residual": (no_terms - neither + both - only_mask) / 2,
    }


# ------------------------------------------------------------------------------------------ position 0 (trajectory)


def pair_cosines(vectors: list[list[float]]) -> list[float]:
    """Cosine of every pair of vectors, each pair once."""
    found = []
    for i, x in enumerate(vectors):
        for y in vectors[:i]:
            inner = sum(a * b for a, b in zip(x, y, strict=True))
            found.append(inner / math.sqrt(sum(a * a for a in x)) / math.sqrt(sum(b * b for b in y)))
    return found


def massive_dimensions(streams: list[list[list[float]]], least: float, medians: float) -> tuple[float, float, float]:
    """One layer's [prompt][position][d]: median |h|; dimensions above at position 0, and most elsewhere, mean by prompt."""
    median = statistics.median(abs(x) for prompt in streams for row in prompt for x in row)

    def above(row: list[float]) -> int:
        return sum(abs(x) > least and abs(x) > medians * median for x in row)

    first = sum(above(prompt[0]) for prompt in streams) / len(streams)
    others = sum(max(above(row) for row in prompt[1:]) for prompt in streams) / len(streams)
    return median, first, others


# ------------------------------------------------------------------------------------------------------ BOS swap (bos)


def next_token_losses(logits: list[list[float]], ids: list[int]) -> list[float]:
    """`-log p` of ids[i + 1] under logits[i], for every i but the last."""
    found = []
    for i, row in enumerate(logits[:-1]):
        top = max(row)
        found.append(top + math.log(sum(math.exp(x - top) for x in row)) - row[ids[i + 1]])
    return found


# ------------------------------------------------------------------ masks with a prefix (models.view, models.fused, sinks)


def looks_at(i: int, j: int, window: int | None, prefix: int | None) -> bool:
    """Whether query i sees key j: any of the first `prefix` keys; else itself and the `window - 1` keys before it."""
    if prefix is not None and j < prefix:
        return True
    return j <= i and (window is None or i - j < window)


def masked_logits(
    query: Tensor,
    key: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    window: int | None = None,
    slopes: Tensor | None = None,
    prefix: int | None = None,
) -> Tensor:
    """Logits [B, H, T, T] of q, k [B, H, T, c], every row in full, then minus infinity entry by entry where hidden."""
    prompts, heads, length, _ = query.shape
    every = []
    for b in range(prompts):
        for h in range(heads):
            rows = []
            for i in range(length):
                row = (key[b, h] * query[b, h, i]).sum(-1) * scale
                if softcap is not None:
                    row = softcap * torch.tanh(row / softcap)
                if slopes is not None:
                    row = row - slopes[h] * (i - torch.arange(length, dtype=row.dtype))
                hidden = torch.tensor([not looks_at(i, j, window, prefix) for j in range(length)])
                rows.append(torch.where(hidden, row.new_tensor(-math.inf), row))
            every.append(torch.stack(rows))
    return torch.stack(every).view(prompts, heads, length, length)


attention_logits = masked_logits  # without a prefix


def sinks_of_keys(
    patterns: Sequence[Sequence[Tensor]],
    windows: Sequence[int | None],
    prefix: int | None,
    *,
    threshold: float,
    tau: float,
) -> dict[str, Tensor]:
    """alpha [prompt, layer, head, key] over queries i >= k, over_tau over all that see k, and what uniform patterns have."""
    prompts, blocks, (heads, length, _) = len(patterns), len(windows), patterns[0][0].shape
    alpha = torch.zeros(prompts, blocks, heads, length, dtype=torch.float64)
    over = torch.zeros(blocks, heads, length).double()
    for p, layer, h in itertools.product(range(prompts), range(blocks), range(heads)):
        a = patterns[p][layer][h].tolist()
        for k in range(length):
            seeing = [i for i in range(length) if looks_at(i, k, windows[layer], prefix)]
            alpha[p, layer, h, k] = sum(row[k] for row in a[k:]) / (length - k)
            over[layer, h, k] += sum(a[i][k] > tau for i in seeing) / len(seeing) / prompts
    rate = (alpha > threshold).double().mean((0, 2))
    uniform = [[uniform_alpha(length, k, window, prefix) for k in range(length)] for window in windows]
    return {"alpha": alpha, "over_tau": over, "sink_rate": rate, "uniform": torch.tensor(uniform, dtype=torch.float64)}


# ---------------------------------------------------------------------------------------------- toys (toy.model, toy.view)

from toy.model import Architecture  # noqa: E402 - beside what it is for


def toy_pass(a: Architecture, weights: dict[str, Tensor], inputs: Tensor) -> tuple[list[Tensor], Tensor]:
    """(streams [position, d] that each block reads and the final norm reads; logits at the last position).

    Of one model, whose weights have no model dimension, on one sequence of ids [position] or vectors [position, d].
    """
    w = {name: tensor.double() for name, tensor in weights.items()}
    length, width = len(inputs), a.width // a.heads
    rows = []
    for t in range(length):
        row = w["embedding"][inputs[t]] if a.vocabulary is not None else inputs[t].double()
        if a.positional == "learned":
            row = row + w["positions"][t]
        if a.positional == "sinusoidal":
            for n in range(0, a.width, 2):
                angle = t / 10_000 ** (n / a.width)
                pair = torch.tensor([math.sin(angle), math.cos(angle)]).double()
                row = torch.cat([row[:n], row[n : n + 2] + pair, row[n + 2 :]])
        rows.append(row)
    streams = [torch.stack(rows)]
    for layer in range(a.blocks):
        x = streams[-1]
        n = _toy_norm(a, w, f"{layer}.attention_norm", x)
        mixed = []
        for head in range(a.heads):
            at = slice(head * width, (head + 1) * width)
            q, k, v = ([row @ w[f"{layer}.{name}"][:, at] for row in n] for name in "qkv")
            if a.positional == "rope":
                q, k = ([_toy_turned(row, t) for t, row in enumerate(some)] for some in (q, k))
            own = []
            for i in range(length):
                seen = [j for j in range(length) if a.mask == "full" or looks_at(i, j, a.window, a.prefix)]
                logits = [q[i] @ k[j] / math.sqrt(width) - (a.decay or 0.0) * (i - j) for j in seen]
                top = max(float(logit) for logit in logits)
                shares = [torch.exp(logit - top) for logit in logits]
                own.append(sum(share * v[j] for share, j in zip(shares, seen, strict=True)) / sum(shares))
            mixed.append(torch.stack([torch.as_tensor(row) for row in own]))
        out = torch.cat(mixed, -1)
        if a.output_projection:
            out = out @ w[f"{layer}.o"]
        x = x + out if a.residual else out
        if a.feed_forward:
            up = _toy_norm(a, w, f"{layer}.mlp_norm", x) @ w[f"{layer}.up"] + w[f"{layer}.up.bias"]
            down = up * (1 + torch.erf(up / math.sqrt(2))) / 2 @ w[f"{layer}.down"] + w[f"{layer}.down.bias"]
            x = x + down if a.residual else down
        streams.append(x)
    return streams, toy_head(a, weights, _toy_norm(a, w, "norm", streams[-1])[-1])


def toy_head(a: Architecture, weights: dict[str, Tensor], row: Tensor) -> Tensor:
    """Logits of one normed row [d]."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    for n in range(3 if a.head == "mlp" else 0):
        row = row @ w[f"head.{n}"] + w[f"head.{n}.bias"]
        row = torch.where(row > 0, row, torch.zeros_like(row))
    logits = row @ w["unembedding"]
    return logits + w["unembedding.bias"] if a.head == "mlp" else logits


def _toy_norm(a: Architecture, w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Row by row."""
    if a.norm == "none":
        return x
    rows = []
    for row in x:
        centred = row - row.sum() / a.width if a.norm == "layer" else row
        scaled = centred / torch.sqrt((centred**2).sum() / a.width + 1e-5) * w[name]
        rows.append(scaled + w[f"{name}.bias"] if a.norm == "layer" else scaled)
    return torch.stack(rows)


def _toy_turned(x: Tensor, position: int) -> Tensor:
    """RoPE: entries n and n + c/2 of a head turned as a pair by position * 10000^(-2n/c)."""
    half = len(x) // 2
    out = [torch.zeros(())] * len(x)
    for n in range(half):
        angle = position * 10_000 ** (-2 * n / len(x))
        out[n] = x[n] * math.cos(angle) - x[n + half] * math.sin(angle)
        out[n + half] = x[n] * math.sin(angle) + x[n + half] * math.cos(angle)
    return torch.stack(out)


# ------------------------------------------------------------------------------------------ toys: positional retrieval


def best_reader(vocabulary: int, length: int, target: int, last_apart: bool) -> float:
    """Least loss of who knows a random sequence but not its order, by going through all sequences.

    With `last_apart` the last token is known for itself. The posterior of the answer is counted, not derived.
    """
    seen: dict[object, list[int]] = {}
    for number in range(vocabulary**length):
        tokens = [number // vocabulary**place % vocabulary for place in range(length)]
        known = (tuple(sorted(tokens[:-1])), tokens[-1]) if last_apart else tuple(sorted(tokens))
        seen.setdefault(known, [0] * vocabulary)[tokens[target]] += 1
    total = sum(sum(counts) for counts in seen.values())
    return sum(n * math.log(sum(counts) / n) for counts in seen.values() for n in counts if n) / total


# ------------------------------------------------------------------------------------------ sequences of toys (toy.tasks)


def in_context_sequence(
    means: list[list[float]], labels: list[list[float]], label_of: list[int], noise: list[list[float]], eps: float
) -> list[list[float]]:
    """[Wu]'s sequence, item by item: `(mu + eps eta) / sqrt(1 + eps^2)`, its label's vector, ..., the query without one.

    `means` and `label_of` are those of each item's class, the query's last; `noise` is eta.
    """
    found = []
    for n, (mean, eta) in enumerate(zip(means, noise, strict=True)):
        found.append([(m + eps * e) / math.sqrt(1 + eps * eps) for m, e in zip(mean, eta, strict=True)])
        if n < len(means) - 1:
            found.append(list(labels[label_of[n]]))
    return found


# --------------------------------------------------------------------------------- toys: order without encoding (petroglyph)


def plain_attention_only(
    weights: dict[str, list[list[float]]], tokens: list[int], layers: int, causal: bool, residual: bool
) -> list[float]:
    """Outputs at the last position of one head per layer without norms, feed-forward or encoding, number by number."""

    def product(x: list[float], matrix: list[list[float]]) -> list[float]:
        return [sum(a * row[n] for a, row in zip(x, matrix, strict=True)) for n in range(len(matrix[0]))]

    stream = [list(weights["embedding"][token]) for token in tokens]
    for layer in range(layers):
        q, k, v = ([product(x, weights[f"{layer}.{name}"]) for x in stream] for name in "qkv")
        new = []
        for i, x in enumerate(stream):
            seen = range(i + 1) if causal else range(len(stream))
            sizes = [math.exp(sum(a * b for a, b in zip(q[i], k[j], strict=True)) / math.sqrt(len(x))) for j in seen]
            mixed = [sum(w * v[j][n] for w, j in zip(sizes, seen, strict=True)) / sum(sizes) for n in range(len(x))]
            out = product(mixed, weights[f"{layer}.o"])
            new.append([a + b for a, b in zip(x, out, strict=True)] if residual else out)
        stream = new
    return product(stream[-1], weights["unembedding"])


# ------------------------------------------------------------------------- toys: the token before the last, and rollouts


def widest_margin(points: list[list[float]], asked: int, angles: int = 20_000) -> tuple[float, list[float]]:
    """(margin, direction) along which the others lie farthest above the point `asked`; directions are tried one by one.

    A margin of zero or less means that no direction separates.
    """
    best = (-math.inf, [0.0, 0.0])
    for n in range(angles):
        angle = 2 * math.pi * n / angles
        s = [math.cos(angle), math.sin(angle)]
        along = [p[0] * s[0] + p[1] * s[1] for p in points]
        margin = min(x for j, x in enumerate(along) if j != asked) - along[asked]
        best = max(best, (margin, s))
    return best


def walk_chance(patterns: list[list[list[float]]], start: int, end: int) -> float:
    """P(z = end) of a walk from `start` that takes one step per pattern, the last pattern first, as a sum over all walks."""
    if not patterns:
        return float(start == end)
    *below, top = patterns
    return sum(chance * walk_chance(below, j, end) for j, chance in enumerate(top[start]) if chance)


def paths_weight(lost: list[float], layers: int, distance: int) -> float:
    """Sum over all ways to write `distance` as `layers` steps of zero or more of e^-(what the steps lose)."""
    if layers == 1:
        return math.exp(-lost[distance])
    return sum(math.exp(-lost[x]) * paths_weight(lost, layers - 1, distance - x) for x in range(distance + 1))
