"""Do the U, the sink and recall by depth outlive softmax? Sigmoid attention against it, in pairs of runs.

    headwater toy births --with kinds=uniform-0.36 --out runs/births
    python tools/sigmoid.py runs/births/births-runs --seeds 0,1,2 --out reports/controlled/sigmoid.md

Each run of `headwater toy births` of the kind uniform-0.36 gets a twin with the same fresh weights, text, order of the text
and options, whose attention weights are sigmoid(q.k / sqrt(d) - ln n), n the length of training, after Ramapuram et al.,
"Theory, Analysis, and Best Practices for Sigmoid Self-Attention" (arXiv 2409.04431). Nothing normalizes the rows. Twins are
kept beside the runs as sigmoid-0.36-SEED and are taken up where they were stopped.

Views compute softmax attention, so that both kinds are measured here by transformers' own forward pass and exact derivatives
in float64: the elasticity of the last position's residual stream, the loss on text held out, the share of a row's weight on
position 0 and what a passage gains from an earlier copy of itself, by the copy's place.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, AutoModelForCausalLM

from probes.data.documents import Document
from probes.data.prompts import draw
from probes.figures.style import CYCLE, LARGEST, STYLE, blank, save_figure
from probes.models.fresh import fresh_model
from probes.models.load import load
from probes.results.profiles import typical
from probes.results.statistics import over_runs
from probes.results.tables import Report, Table, interval, write_report
from probes.results.ushape import middle_of, numbers
from probes.run.files import write_json
from toy.corpus import Windows, find_text, hold_out, pack
from toy.experiments.births import ORDER, PROBED, Settings, rule_of
from toy.pretrain import pretrain

KIND, SIGMOID = "uniform-0.36", "sigmoid less log n"
SETTINGS = Settings(kinds=(KIND,))
ABOVE = 0.3  # share of a row's weight on position 0 from which a head counts as a sink's reader
PASSAGE, TESTED = 8, 128  # tokens of a copied passage; windows
PLACES = (1, 16, 32, 48, 64, 80, 96, 112)  # where the copy begins
CHUNK = 32  # directions pulled back at once
NUMBERS = (
    *("loss, nat", "primacy", "recency", "share on 0", "sink rate", "sum of a row"),
    *(f"copy at {place}, nat" for place in PLACES),
)
Measured = dict[str, Any]  # numbers and curves by name


def sigmoid_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """An attention function as transformers takes it: causal, with weights that need not sum to 1."""
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    logits = query @ key.mT * scaling - math.log(SETTINGS.length)
    weights = logits.sigmoid() * torch.ones_like(logits, dtype=torch.bool).tril()
    return (weights @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register(SIGMOID, sigmoid_attention)


def born(config: Any, seed: int) -> Any:
    """The fresh weights of the run, with sigmoid attention."""
    model = fresh_model(config, seed, rule_of(KIND, SETTINGS))
    model.set_attn_implementation(SIGMOID)
    return model


def twin(folder: Path, seed: int, text: Sequence[Document], heldout: Sequence[Document]) -> Path:
    """The folder of the run with sigmoid attention, which is trained if it is not there."""
    out, told = folder / f"sigmoid-0.36-{seed}", {"attention": SIGMOID, "seed": seed}
    file, options = out / "training.json", SETTINGS.options()
    if file.exists():
        kept = json.loads(file.read_text(encoding="utf-8"))
        if any(kept.get(key) != value for key, value in {"options": asdict(options), **told}.items()):
            raise SystemExit(f"'{out}' was trained with other settings; remove it to train it again")
        return out
    fresh = partial(born, seed=seed)
    report = pretrain(
        SETTINGS.config(),
        out,
        training=text,
        heldout=heldout,
        fresh=fresh,
        options=options,
        keep_steps=[0],
        save_every=100,
        told=told,
    )
    del report["position0_weight"]  # of softmax, which this model has not
    write_json(file, report)
    return out


def elasticity(model: Any, tokens: Int[Tensor, " position"]) -> Float[np.ndarray, " position"]:
    """||dh_T/dx_j||_F / sqrt(d) times rms(x) / rms(h_T), with all d directions: x enters block 0 and h leaves the last."""
    x = model.get_input_embeddings()(tokens[None]).detach().requires_grad_()
    last: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0][0, -1]))
    model(inputs_embeds=x, use_cache=False)
    hook.remove()
    (h,), width = last, x.shape[-1]
    squares = torch.zeros(len(tokens), dtype=x.dtype)
    for directions in torch.eye(width, dtype=x.dtype).split(CHUNK):
        (back,) = torch.autograd.grad(h, x, directions, retain_graph=True, is_grads_batched=True)
        squares += back[:, 0].square().sum((0, 2))
    scale = x[0, 1:].square().mean().sqrt() / h.square().mean().sqrt()
    return ((squares / width).sqrt() * scale).detach().numpy()


@torch.no_grad()
def gains(model: Any, windows: Int[Tensor, "window position"]) -> Float[np.ndarray, " place"]:
    """Nats per token that the last `PASSAGE` tokens but the first gain where an earlier place holds the same, by place.

    They are compared with windows that have the passage of another window at that place.
    """

    def loss(place: int, passages: Tensor) -> float:
        changed = windows.clone()
        changed[:, place : place + PASSAGE] = passages
        logits = model(input_ids=changed, use_cache=False).logits[:, -PASSAGE:-1]
        return float(cross_entropy(logits.flatten(0, 1), changed[:, 1 - PASSAGE :].flatten()))

    own = windows[:, -PASSAGE:]
    return np.array([loss(place, own.roll(1, 0)) - loss(place, own) for place in PLACES])


@torch.no_grad()
def measured(folder: Path, attention: str, prompts: Int[Tensor, "prompt position"], held: Windows) -> Measured:
    """Numbers and curves of one model."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.float64).eval()
    inputs, targets = held.at(held.side_by_side()[:TESTED])
    patterns = torch.stack(model(input_ids=prompts, output_attentions=True, use_cache=False).attentions, 1)[..., 1:, :]
    share = (patterns[..., 0] / patterns.sum(-1)).mean(-1)  # [prompt, layer, head], over queries from 1 on
    logits = model(input_ids=inputs, use_cache=False).logits
    with torch.enable_grad():
        profile = typical(np.stack([elasticity(model, one) for one in prompts]))
    ends = numbers(profile)
    copies = gains(model, inputs)
    return {
        "elasticity": profile,
        "gains": copies,
        **{name: ends[name] for name in ("primacy", "recency")},
        "loss, nat": float(cross_entropy(logits.flatten(0, 1), targets.flatten())),
        "share on 0": float(share.mean()),
        "sink rate": float((share > ABOVE).double().mean()),
        "sum of a row": float(patterns.sum(-1).mean()),
        **{f"copy at {place}, nat": float(copies[n]) for n, place in enumerate(PLACES)},
    }


def cells(softmax: Sequence[float], sigmoid: Sequence[float]) -> tuple[str, str, str]:
    """Means over runs and of the differences within pairs, with intervals."""
    a, b = np.array(softmax), np.array(sigmoid)
    told = [interval(*over_runs(one)[:3]) for one in (a, b)]
    return told[0], told[1], interval(*over_runs(b - a)[:3], form="+.3g")


def drawn(found: dict[str, list[list[Measured]]], path: Path) -> None:
    """The profiles before and after training, and recall by place: a line per run."""
    looks = [("softmax", CYCLE[0]), ("sigmoid", CYCLE[1])]
    with matplotlib.rc_context(STYLE):
        figure = blank((8.6, 3.0), 150)
        panels: Any = figure.subplots(1, 3)
        for panel, (at, kinds) in zip(panels, found.items(), strict=False):
            for (_, color), runs in zip(looks, kinds, strict=True):
                for one in runs:
                    panel.plot(one["elasticity"] / middle_of(one["elasticity"]), color=color, linewidth=1.1)
            panel.set(title=at, yscale="log", xlabel="position", ylabel="elasticity over the middle")
        for (name, color), runs in zip(looks, found["Trained"], strict=True):
            for n, one in enumerate(runs):
                panels[2].plot(
                    PLACES, one["gains"], color=color, marker="o", markersize=3, label=name if n == 0 else ""
                )
        panels[2].set(title="Trained", xlabel="position of the copy", ylabel="gain, nat per token")
        panels[2].legend()
        save_figure(figure, path, dpi=150, largest=LARGEST)


def main() -> None:
    """Train, measure and write the table."""
    given = argparse.ArgumentParser(description="Sigmoid attention against softmax, in pairs of runs.")
    given.add_argument("folder", type=Path, help="births-runs of `headwater toy births`")
    given.add_argument("--seeds", default="0,1,2")
    given.add_argument("--out", type=Path, required=True)
    asked = given.parse_args()
    seeds = [int(seed) for seed in asked.seeds.split(",")]
    runs = {seed: asked.folder / f"{KIND}-{seed}" for seed in seeds}
    if missing := [str(run) for run in runs.values() if not (run / "training.json").exists()]:
        raise SystemExit(f"'{missing[0]}' holds no finished run; run headwater toy births --with kinds={KIND} first")
    text, heldout = hold_out(find_text(text=None)[0], characters=SETTINGS.heldout_characters)
    twins = {seed: twin(asked.folder, seed, text, heldout) for seed in seeds}
    view = load(runs[seeds[0]])
    held = Windows(pack(view.tokenizer, heldout), length=SETTINGS.length, seed=ORDER, bos=view.bos)
    prompts = draw(view, n=SETTINGS.prompts, length=SETTINGS.length, text=PROBED, seed=ORDER).tokens
    folders = {
        "Fresh": ([run / "step0" for run in runs.values()], [run / "step0" for run in twins.values()]),
        "Trained": (list(runs.values()), list(twins.values())),
    }
    found = {
        at: [
            [measured(folder, attention, prompts, held) for folder in kind]
            for attention, kind in zip(("eager", SIGMOID), kinds, strict=True)
        ]
        for at, kinds in folders.items()
    }
    columns = ("number", "softmax", "sigmoid", "sigmoid less softmax")
    tables = [
        Table(at, columns, [[name, *cells(*([one[name] for one in runs] for runs in kinds))] for name in NUMBERS])
        for at, kinds in found.items()
    ]
    described = f"Means over {len(seeds)} pairs of runs, 95 % intervals by Student's t over pairs."
    command = f"python tools/sigmoid.py {asked.folder} --seeds {asked.seeds} --out {asked.out}"
    drawn(found, asked.out.with_suffix(""))
    write_report(Report("Sigmoid attention against softmax", described, tables, []), asked.out, command)


if __name__ == "__main__":
    main()
