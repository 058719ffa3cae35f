"""The formulas of the methods section: LaTeX here, MathML on the page, which browsers draw without any library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from latex2mathml.converter import convert
from markupsafe import Markup, escape


class Formula(NamedTuple):
    """One displayed formula with a sentence before it."""

    says: str
    latex: str

    @property
    def mathml(self) -> Markup:
        """The formula as MathML, safe to stand in a page: its LaTeX comes from this file alone."""
        return Markup(convert(self.latex, display="block"))


def mathematical(sentence: str) -> Markup:
    """A sentence with LaTeX between dollar signs, which becomes MathML; the rest is text and escaped."""
    words = sentence.split("$")
    return Markup("").join(Markup(convert(word)) if n % 2 else escape(word) for n, word in enumerate(words))


@dataclass(frozen=True)
class Method:
    """What one quantity is, where it comes from, and what to beware of."""

    title: str
    source: str
    formulas: tuple[Formula, ...]
    remark: str = ""


METHODS = (
    Method(
        "Sensitivity of the output to an input position",
        "[Chowdhury] arXiv 2603.10123, with the whole Jacobian instead of one product",
        (
            Formula(
                "$x_j$ is what block 0 reads at position $j$, $h$ the residual stream after the last block, $d$ its "
                "width:",
                r"s_j = \frac{1}{\sqrt{d}} \left\| J_j \right\|_F , \qquad J_j = \frac{\partial h_{T-1}}{\partial x_j}",
            ),
            Formula(
                "Of a curve: primacy is the mean over the first 5 % of positions against the median $M$ of the "
                "middle half, recency the last position against it:",
                r"\text{primacy} = \frac{1}{\lceil T/20 \rceil\, M} \sum_{j < T/20} s_j , "
                r"\qquad \text{recency} = \frac{s_{T-1}}{M}",
            ),
            Formula(
                "The sketch is exact on an orthonormal basis $Q$ of $m$ directions of the output, and unbiased on "
                "the rest, from $n$ random orthonormal directions $P$ of the complement, which has $d - m$ "
                "dimensions:",
                r"\left\| J_j \right\|_F^2 \approx \left\| Q^{\top} J_j \right\|_F^2 "
                r"+ \frac{d - m}{n} \left\| P^{\top} J_j \right\|_F^2",
            ),
        ),
        "Conditions are compared by the elasticity, the norm times rms(x) / rms(h), and geometric means over prompts. "
        "What a kernel predicts is a mean square, and is compared with root mean squares.",
    ),
    Method(
        "Theory at birth: powers of a mean attention matrix",
        "[Chowdhury]",
        (
            Formula(
                "Uniform causal attention is the matrix $M$; with a share $\\alpha$ of every block's output coming "
                "from attention, influence on the last position is the last row of $N$ to the power of the number of "
                "blocks $L$:",
                r"M_{ij} = \frac{1}{i + 1} \;\; (j \le i), \qquad N = (1 - \alpha) I + \alpha M, "
                r"\qquad \left( N^L \right)_{T-1,\, j}",
            ),
            Formula(
                "With $x = j / (T - 1)$, far from the ends, this becomes the density",
                r"\sum_{k=1}^{L} \frac{L!}{k! \, (L-k)!} (1-\alpha)^{L-k} \alpha^{k} \frac{(- \ln x)^{k-1}}{(k-1)!}",
            ),
        ),
        "Here $\\alpha$ is fitted to the measured profile and the scale is left free, which favours $N^L$ over a "
        "theory without fitted parameters.",
    ),
    Method(
        "Theory at birth: second moments",
        "derived in probes/theory/kernel.py",
        (
            Formula(
                "Weights of different blocks are independent with mean zero, so that powers of paths add up, not "
                "amplitudes. $G$ is carried from the output down; at the top it is",
                r"G = e_{T-1} e_{T-1}^{\top}",
            ),
            Formula(
                "A feed-forward branch with Jacobian $F_i$ at position $i$ multiplies it elementwise:",
                r"G_{ik} \leftarrow G_{ik} \left( 1 + K_{ik} \right), \qquad "
                r"K_{ik} = \frac{1}{d} \, \mathbb{E} \, \mathrm{tr} \left( F_i F_k^{\top} \right)",
            ),
            Formula(
                "Attention $A$ adds its value path, $D$ being the diagonal of the stream's root mean squares $r$:",
                r"G \leftarrow G + s^2 D^{-1} A^{\top} G A D^{-1}, \qquad "
                r"s^2 = \frac{1}{d} \left\| W_O W_V \right\|_F^2",
            ),
            Formula(
                "and, with the score path, what comes through keys (and queries, likewise) of every head:",
                r"G_{jj} \leftarrow G_{jj} + \sum_i G_{ii} \frac{ \left\| u_{ij} \right\|^2 "
                r"\left\| c \, W_K^{\top} R_j^{\top} q_i \right\|^2 }{ d \, r_j^2 }, \qquad "
                r"u_{ij} = A_{ij} W_O \left( v_j - o_i \right)",
            ),
            Formula("The prediction, in which nothing is fitted:", r"s_j^2 = G_{jj}"),
        ),
        "On trained weights the same recursion, with the model's own scales and patterns, is a baseline: what random "
        "directions of the same sizes would give.",
    ),
    Method(
        "Attention sinks",
        "[Gu] arXiv 2410.10781; [Wu] arXiv 2502.01951",
        (
            Formula(
                "The mean weight on key $k$ over the queries from $k$ on, and the share of (prompt, block, head) for "
                "which it is above $\\varepsilon = 0.3$:",
                r"\alpha_k = \frac{1}{T - k} \sum_{i \ge k} A_{ik} , \qquad "
                r"\text{sink rate} = \Pr \left( \alpha_k > \varepsilon \right)",
            ),
            Formula(
                "[Wu] counts the queries that see key $k$ and give it more than $\\tau = 0.2$:",
                r"\frac{ \left| \left\{ i : A_{ik} > \tau \right\} \right| }"
                r"{ \left| \left\{ i : i \text{ sees } k \right\} \right| }",
            ),
            Formula(
                "How large what a head takes from position 0 is beside the stream $x_i$ that its block reads, and beside "
                "all that the head writes, over prompts and queries that see position 0:",
                r"\text{written}^2 = \frac{1}{n} \sum_i \frac{ \left\| A_{i0} \, v_0 W_O \right\|^2 }"
                r"{ \left\| x_i \right\|^2 } , \qquad "
                r"\text{reads}^2 = \frac{ \sum_i \left\| A_{i0} \, v_0 W_O \right\|^2 }"
                r"{ \sum_i \left\| o_i W_O \right\|^2 }",
            ),
        ),
        "Uniform attention alone gives a mean weight on position 0 of $H_T / T$ (the harmonic number over the "
        "length), drawn as a dotted line. A head reads where written is above 0.1 of the stream; it parks where it attends "
        "(above 0.3) and its output is under 0.3 of its own with position 0 hidden; it reacts where another embedding at "
        "position 0 moves more than 0.1 of its attention, or its output by more than 0.1 of the stream; else it ignores.",
    ),
    Method(
        "Leakage of absolute position into attention patterns",
        "after [Ruscio] arXiv 2606.06160; the split is derived in probes/measures/leakage.py",
        (
            Formula(
                "Over prompts $n$, the expected log-weight of query $i$ on the key that stands a lag $\\delta$ "
                "behind it, and how much it depends on $i$ within a band of queries, as a mean over lags:",
                r"\ell_i(\delta) = \mathbb{E}_n \left[ s_{i,\, i - \delta} \right] - \mathbb{E}_n \left[ \log Z_i \right], "
                r"\qquad \text{leakage} = \operatorname{Var}_i \, \ell_i(\delta)",
            ),
            Formula(
                "It splits exactly, into logits and denominator:",
                r"\operatorname{Var}_i \ell_i = \operatorname{Var}_i \mathbb{E}_n s_{i,\, i-\delta} "
                r"+ \operatorname{Var}_i \mathbb{E}_n \log Z_i "
                r"- 2 \operatorname{Cov}_i \left( \mathbb{E}_n s_{i,\, i-\delta}, \, \mathbb{E}_n \log Z_i \right)",
            ),
            Formula(
                "Position 0's mean logit, held constant over the band's queries (the constant sink), counts with the "
                "mask. Two switches, mask and residual stream, turn each source off ($L$ is the leakage with the sources in "
                "parentheses on); each is credited with its Shapley value:",
                r"\varphi_{\text{mask}} = \frac{1}{2} \left[ L(\text{both}) - L(\text{residual}) "
                r"+ L(\text{mask}) - L(\text{neither}) \right]",
            ),
        ),
        "Every variance is a covariance between two halves of the prompts, so that sampling noise cancels. A share "
        "may lie above 100 % or below 0 where the sources work against each other; shares add up to 100 % together "
        "with the spread of single prompts.",
    ),
    Method(
        "Swapping position 0",
        "[Ruscio]",
        (
            Formula(
                "$V(X)$ is the variance that the residual stream alone would put into log-weights. With another "
                "embedding at position 0 it becomes $V'(X)$:",
                r"\text{removed} = 1 - \frac{V'(X)}{V(X)}",
            ),
        ),
        "95 % intervals are bootstraps over prompts. Where $V(X)$ itself is within its noise, no fraction of it is "
        "shown.",
    ),
)
