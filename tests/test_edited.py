"""Views of a changed model against changes made by hand, in double precision, on both backends and on toys."""

import re
from typing import Any

import families
import numpy as np
import pytest
import torch
from measured import EVERY, SOME, close, drawn_tokens, refused, view, watched
from torch import Tensor

import probes
from probes.models.ablate import ablated, reweighed
from probes.models.behind import continues
from probes.models.swap import swapped
from probes.models.view import Edit
from probes.models.words import Intervention, Word, intervention

TOKENS = drawn_tokens(3, 12, least=3, first=0)
BLOCKS, HEADS = families.BLOCKS, families.HEADS
CHANGES: dict[str, Any] = {
    "stream": lambda model: swapped(model, "mean", layer=1, dose=0.6, reference=TOKENS),
    "keys": lambda model: swapped(model, 17, layer=1, part="keys"),
    "zero": lambda model: ablated(model, [(0, 1), (2, 0)]),
    "mean": lambda model: ablated(model, [(1, 2)], "mean", reference=TOKENS),
    "without-0": lambda model: reweighed(model, "without-0", layer=1),
    "held-log-z": lambda model: reweighed(model, "held-log-z", reference=TOKENS),
    "erased": lambda model: probes.erased(model, "direction", reference=TOKENS),
}


def run(model: Any, tokens: Tensor = TOKENS, **options: Any) -> Tensor:
    """The last stream."""
    with torch.no_grad():
        return model.residual(model.embed(tokens), **options)


def doubled(name: str, backend: str = "transformers") -> Any:
    return view(name, backend, dtype="float64")


def outputs_of(model: Any, layer: int) -> Tensor:
    """What the heads of a block give, before W_O."""
    kept: list[Tensor] = []
    run(model, edits=[Edit("output", layer, lambda x: (kept.append(x.clone()), x)[1])])
    return kept[0]


def put(model: Any, layer: int, outputs: Tensor) -> Tensor:
    """The last stream where the heads of a block give these."""
    return run(model, edits=[Edit("output", layer, lambda _: outputs)])


def averaged(outputs: Tensor, head: int) -> Tensor:
    """With the mean of one head, at position 0 and at all others, in its place."""
    made = outputs.clone()
    made[:, head, 0], made[:, head, 1:] = outputs[:, head, 0].mean(0), outputs[:, head, 1:].mean((0, 1))
    return made


def first(model: Any) -> Any:
    """What block 0's attention multiplies."""
    return watched(model, model.embed(TOKENS))[0][1]


@pytest.mark.parametrize("backend", ["transformers", "transformer_lens"])
def test_a_head_at_zero_is_one_without_its_rows_of_w_o(backend):
    models = [families.model("llama", dtype=torch.float64) for _ in range(2)]
    with torch.no_grad():
        families.attention(families.blocks(models[1])[1]).o_proj.weight[
            :, 2 * families.HEAD_DIM : 3 * families.HEAD_DIM
        ] = 0
    model, other = (probes.load(one, backend, tokenizer=families.tokenizer()) for one in models)
    close(run(ablated(model, [(1, 2)])), run(other), 1e-12)


@pytest.mark.parametrize(("name", "backend"), SOME)
def test_heads_at_their_mean_by_their_outputs(name, backend):
    model = doubled(name, backend)
    found = ablated(model, [(1, 2)], "mean", reference=TOKENS)
    close(run(found), put(model, 1, averaged(outputs_of(model, 1), 2)), 1e-9, 1e-9)


@pytest.mark.parametrize("layer", [0, 1, BLOCKS - 1])
@pytest.mark.parametrize("backend", ["transformers", "transformer_lens"])
def test_keys_and_values_are_all_that_others_read_of_position_0(layer, backend):
    model = doubled("gemma2", backend)
    given: dict[str, Any] = {"layer": layer, "dose": 0.7, "reference": TOKENS}
    stream, both, keys, values = (
        run(swapped(model, "mean", part=part, **given)) for part in ("stream", "both", "keys", "values")
    )
    close(both[:, 1:], stream[:, 1:], 1e-9, 1e-9)
    assert not torch.allclose(both[:, 0], stream[:, 0], rtol=1e-3)
    assert torch.equal(both[:, 0], run(model)[:, 0])
    for one in (keys, values):
        assert not torch.allclose(one[:, 1:], both[:, 1:], rtol=1e-4)


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_doses_and_tokens_from_a_block_on(name, backend):
    model = doubled(name, backend)
    assert torch.equal(run(swapped(model, 17, layer=1, dose=0.0)), run(model))
    own, other = model.embed(TOKENS), TOKENS.clone()
    for token in (0, 17):  # id 0, which stands there, is an id like any other
        other[:, 0] = token
        assert torch.equal(swapped(model, token).embed(TOKENS), model.embed(other))
    for replacement in ("mean", "zero", "random"):
        found = swapped(model, replacement).embed(TOKENS)
        assert torch.equal(found[:, 1:], own[:, 1:])
        assert not torch.equal(found[:, 0], own[:, 0])
        assert bool(found[:, 0].any()) == (replacement != "zero")
    streams = [m.trace(m.embed(t)).residual[1] for m, t in ((model, TOKENS), (model, other))]
    half = streams[0].clone()
    half[:, 0] = (streams[0] + streams[1])[:, 0] / 2
    by_hand = run(model, edits=[Edit("residual", 1, lambda _: half)])
    close(run(swapped(model, 17, layer=1, dose=0.5)), by_hand, 1e-9, 1e-9)
    close(run(swapped(model, 17, dose=1.0)), run(model, other), 1e-12)


def test_drawn_tokens_are_each_prompt_s_own():
    together = swapped(doubled("llama"), "drawn").embed(TOKENS)
    alone = torch.cat([swapped(doubled("llama"), "drawn").embed(row[None]) for row in TOKENS])
    assert torch.equal(together, alone)
    assert len({tuple(row.tolist()) for row in together[:, 0]}) == len(TOKENS)
    assert not torch.equal(swapped(doubled("llama"), "drawn", seed=1).embed(TOKENS), together)


@pytest.mark.parametrize(("name", "backend"), SOME)
def test_without_key_0_rows_are_normalized_anew_and_without_its_value_they_are_not(name, backend):
    model = doubled(name, backend)
    own = first(model)
    expected = own.pattern()
    expected[:, 2, 1:, 0] = 0
    close(first(reweighed(model, "without-value-0", heads=[(0, 2)])).pattern(), expected, 1e-9, 1e-12)
    expected[..., 1:, 0] = 0
    close(first(reweighed(model, "without-value-0")).pattern(), expected, 1e-9, 1e-12)
    learned = 0 if own.sink is None else (own.sink[:, None, None] - own.weighed()[1]).exp()  # it takes its share
    expected /= expected.sum(-1, keepdim=True) + learned
    close(first(reweighed(model, "without-0")).pattern(), expected, 1e-9, 1e-12)


@pytest.mark.parametrize(("name", "backend"), SOME)
@pytest.mark.parametrize("key", [0, 2])
def test_brake_and_bias_by_whole_patterns(name, backend, key):
    model = doubled(name, backend)
    own = first(model)
    pattern, later = own.pattern(), slice(key + 1, None)
    logits = own.logits()
    if own.sink is not None:
        logits = torch.cat([logits, own.sink[:, None, None].expand(*logits.shape[:-1], 1)], -1)
    hidden = logits[:, :, later].clone()
    hidden[..., key] = -torch.inf
    # Of the weight, what is left for others; by logits, since some heads park: 1 - A_i0 is 0.
    left = hidden.logsumexp(-1) - logits[:, :, later].logsumexp(-1)
    released = pattern.clone()
    released[:, :, later] = hidden.softmax(-1)[..., : pattern.shape[-1]]
    released[:, :, later, key] = pattern[:, :, later, key]
    close(first(probes.edited(model, f"released-{key}")).pattern(), released, 1e-9, 1e-12)
    without = first(probes.edited(model, f"without-{key}")).pattern()
    close(first(probes.edited(model, f"released-{key}+without-value-{key}")).pattern(), without, 1e-9, 1e-12)
    for word, factor in (("gain", 1 / left.exp().mean((0, 2))[:, None, None]), ("gain", 1.5)):
        gained = pattern.clone()
        gained[:, :, later] *= factor
        gained[:, :, later, key] = pattern[:, :, later, key]
        written = f"{word}-{key}" + ("" if isinstance(factor, Tensor) else f"*{factor}")
        close(first(probes.edited(model, written, reference=TOKENS)).pattern(), gained, 1e-9, 1e-12)


def test_a_brake_is_released_where_a_head_parks():
    """Key 0's weight rounds to 1 in float32: what others would have without it is in the logits still."""
    model = view("llama")
    far = Edit(
        "logits", 0, lambda s, log_z, i, j: (s.masked_fill((j == 0) & (i > 0), 200.0), log_z.where(i < 1, 200.0))
    )
    kept: list[Tensor] = []
    other = probes.edited(model, "released").edits(model.embed(TOKENS))[0]
    look = Edit("logits", 0, lambda s, log_z, i, j: (kept.append((s - log_z).exp()), (s, log_z))[1])
    run(model, edits=[far, look, other, look])
    before, after = kept[0], kept[1]
    assert (before[:, :, 1:, 0] == 1).all()
    close(after[..., 1:].sum(-1)[..., 1:], torch.ones_like(after[..., 1:, 0]), 1e-5)
    close(after[:, :, 1:, 0], torch.ones_like(after[:, :, 1:, 0]), 1e-4)


def test_groups_are_the_heads_whose_mean_weight_is_above_the_threshold():
    model, tokens = doubled("llama"), TOKENS[:, :4]  # so few that uniform attention is at the threshold
    weights = torch.cat([a.pattern()[:, :, 2:, 1].mean((0, 2)) for _, a in watched(model, model.embed(tokens))])
    places = [(n // HEADS, n % HEADS) for n in range(len(weights))]
    sinks = [place for place, weight in zip(places, weights.tolist(), strict=True) if weight > 0.3]
    others = [place for place in places if place not in sinks]
    assert sinks
    assert others
    for group, heads in (("sinks", sinks), ("others", others)):
        found = run(probes.edited(model, f"without-1:{group}", reference=tokens))
        close(found, run(reweighed(model, "without-1", heads=heads)), 1e-9, 1e-9)


@pytest.mark.parametrize(("name", "backend"), SOME)
def test_other_values_at_position_0_by_hand(name, backend):
    model = doubled(name, backend)
    if model.spec.sink_logits:
        with refused("learned sink"):
            probes.edited(model, "value-mean", reference=TOKENS)
        return
    tokens = torch.from_numpy(np.random.default_rng(0).choice(TOKENS[:, 1:].flatten(), 100))[:, None]
    own, means = values_of_0(model), [values.mean(0) for values in values_of_0(model, (), tokens)]
    for word in ("value-mean@1", "value-random@1"):
        edits = probes.edited(model, word, reference=TOKENS).edits(model.embed(TOKENS))
        first_read, *read = values_of_0(model, edits)
        assert torch.equal(run(model, edits=edits)[:, 0], run(model)[:, 0])
        assert torch.equal(first_read, own[0])
        for one, other, mean in zip(read, own[1:], means[1:], strict=True):
            assert not torch.allclose(one, other, rtol=1e-3)
            if word.startswith("value-random"):
                close(one.norm(dim=-1), other.norm(dim=-1), 1e-9)
            else:
                close(one, mean.expand_as(one), 1e-9)


def values_of_0(model: Any, edits: Any = (), tokens: Tensor = TOKENS) -> list[Tensor]:
    """What other positions read of position 0, by block."""
    kept: list[Tensor] = []

    def look(values: Tensor) -> Tensor:
        kept.append(values[:, :, 0].clone())
        return values

    run(model, tokens, edits=[*edits, *(Edit("value", n, look) for n in range(BLOCKS))])
    return kept


def test_a_constant_sink_is_the_mean_logit():
    model = doubled("llama")
    expected = first(model).logits()
    expected[:, :, 1:, 0] = expected[:, :, 1:, 0].mean((0, 2))[:, None]
    close(first(reweighed(model, "constant-sink", reference=TOKENS)).logits(), expected, 1e-9)


@pytest.mark.parametrize(("name", "most"), [("llama", 12), ("gemma3_text", families.WINDOW)])  # keys that a query sees
def test_log_z_loses_its_trend(name, most):
    model = doubled(name)
    own = first(model)
    log_z = own.logits().logsumexp(-1)[:, :, 1:]
    x = np.log(np.minimum(np.arange(2, 13), most))
    slopes = np.array([[np.polyfit(x, values, 1)[0] for values in prompt] for prompt in log_z.numpy()]).mean(0)
    trend = torch.from_numpy(slopes[:, None] * (x - x.mean()))
    expected = own.pattern()
    expected[:, :, 1:] *= trend.exp()[..., None]
    close(first(reweighed(model, "held-log-z", reference=TOKENS)).pattern(), expected, 1e-9, 1e-12)


@pytest.mark.parametrize("change", CHANGES)
def test_derivatives_pass_through_a_change(change):
    model = CHANGES[change](doubled("gpt2"))
    embedded = model.embed(TOKENS[:1])[0]
    whole = torch.autograd.functional.jacobian(lambda x: model.residual(x[None])[0, -1], embedded)
    expected = whole.pow(2).sum((0, 2)).div(len(embedded[0])).sqrt()
    close(probes.jacobian(model, TOKENS[:1], method="exact").sensitivity[0], expected, 1e-6)


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
@pytest.mark.parametrize("change", [*CHANGES, "embedding"])
def test_what_follows_a_context_is_changed_as_in_a_plain_pass(name, change):
    model = swapped(doubled(name), "zero") if change == "embedding" else CHANGES[change](doubled(name))
    assert continues(model)
    ahead = model.behind(model.embed(TOKENS[:1, :7]))
    found = ahead(TOKENS[:1, 7:].tolist())
    close(found.detach(), run(model, TOKENS[:1])[:, 7:], 1e-6, 1e-9)
    assert not continues(CHANGES["zero"](doubled("llama", "transformer_lens")))


@pytest.mark.parametrize("change", CHANGES)
def test_changes_leave_the_model_alone_and_hold_for_fresh_weights(change):
    model = doubled("llama")
    before, found = run(model), CHANGES[change](model)
    assert len(watched(found, found.embed(TOKENS))) == BLOCKS  # a change's own passes are not heard
    assert torch.equal(run(model), before)
    assert not torch.equal(run(found), before)
    assert found.identity.name.endswith(f"({found.said})")
    assert found.identity.weights == model.identity.weights
    fresh = model.reinitialized(3)
    assert torch.equal(run(found.reinitialized(3)), run(CHANGES[change](fresh)))
    trace = found.trace(found.embed(TOKENS[:1]), attention=True)
    stream = trace.residual[0]
    for block in trace.blocks:
        stream = block(stream)
    close(stream.detach(), trace.residual[-1], 1e-12)


def test_changes_add_up():
    model = doubled("llama")
    both = ablated(swapped(model, "zero", layer=1), [(2, 1)])
    other = swapped(ablated(model, [(2, 1)]), "zero", layer=1)
    assert torch.equal(run(both), run(other))
    assert swapped(both, "mean").said == "2.1 zero"  # a swap takes the place of another
    edit = Edit("residual", 2, torch.neg)
    found = run(both, edits=[edit])
    close(found, run(ablated(model, [(2, 1)]), edits=[*both.edits(model.embed(TOKENS)), edit]), 1e-12)


def test_each_change_is_found_under_those_before_it():
    before = ablated(doubled("llama"), [(0, 1)])
    found = ablated(before, [(1, 2)], "mean", reference=TOKENS)
    close(run(found), put(before, 1, averaged(outputs_of(before, 1), 2)), 1e-9, 1e-9)
    whole, read = (run(swapped(before, 17, part=part))[:, 1:] for part in ("stream", "both"))
    close(read, whole, 1e-9, 1e-9)  # the keys and values that others read are those of the ablated model


def test_what_cannot_be_changed_is_refused():
    model = doubled("llama")
    ablate, swap = ablated, swapped
    for call, words in (
        (lambda: ablate(model, [(BLOCKS, 0)]), (f"head {BLOCKS}.0 ", f"blocks 0 to {BLOCKS - 1}")),
        (lambda: ablate(model, [(0, 1), (0, 1)]), ("head 0.1 is named twice",)),
        (lambda: swap(model, "mean", layer=1), ("reference",)),
        (lambda: swap(model, "zero", layer=BLOCKS), (f"layer={BLOCKS} ", f"0 to {BLOCKS - 1}")),
        (lambda: swap(model, "zero", dose=1.5), ("dose=1.5 ", "0 to 1")),
        (lambda: probes.edited(model, "value-mean"), ("reference",)),
        (lambda: intervention("18-8"), ("'18-8'", "18.8")),
        (lambda: intervention("realeased@8"), ("did you mean released?",)),
    ):
        with refused(*words):
            call()


def test_interventions_by_name():
    for name, made in (
        ("mean*1", [Word("mean")]),
        ("17@8:both*0.2", [Word(17, 8, "both", 0.2)]),
        (" without-3@2", [Word("without-3", 2)]),
        ("5", [Word(5)]),
        (" released@8:sinks + zero@8:values", [Word("released", 8, "sinks"), Word("zero", 8, "values")]),
        ("gain-1*1.5+18.8+value-mean@2", [Word("gain-1", 0, "", 1.5), Word("18.8"), Word("value-mean", 2)]),
    ):
        made = Intervention(tuple(made))
        assert intervention(name) == made
        assert intervention(str(made)) == made
        assert intervention(made.label) == made
    assert intervention(5).label == 5
    bad = "means Mean -1 ² mean@x zero:keys@1 mean:half mean*a without-0:keys released*2 zero:sinks 18.8@2 value-mean:keys"
    for name in ("", *bad.split(), "mean+", "mean+zero", "zero+value-mean", "1 7", "9" * 5000):
        with refused(re.escape(f"'{name}'")):
            intervention(name)


def test_behaviour_of_a_changed_model_is_measured_against_its_own():
    model = ablated(doubled("llama"), [(0, 1), (1, 0)])
    tokens = drawn_tokens(6, 24, least=3, first=0)
    options: dict[str, Any] = {"bootstrap": 20, "profile_prompts": 0, "lags": (1, 2)}
    for name in ("zero@1:keys", "without-0"):
        found = probes.bos_swap(model, tokens, replacement=name, **options)
        models = (model, intervention(name).on(model, tokens))
        one, two = (m.unembed(m.norm(run(m, tokens))).log_softmax(-1).detach() for m in models)
        close(found.kl_by_prompt, (one.exp() * (one - two)).sum(-1)[:, 1:-1].mean(1), 1e-4)
        assert found.attrs["replacement"] == name
        assert "sensitivity_after" not in found
        assert np.isnan(found.component_after.sel(definition="V(X)")).all() == (name == "without-0")


def test_recall_is_that_of_the_changed_model():
    model = probes.load("tiny-llama", dtype="float64")
    tokens = probes.prompts(model, n=4, length=40)
    options: dict[str, Any] = {"bootstrap": 0, "profile_prompts": 0, "bands": ((9, 31),), "recall": 4}
    found = probes.bos_swap(model, tokens, replacement="without-0@2", **options)
    changed = reweighed(model, "without-0", layer=2)
    after, before = (probes.retrieval(m, pairs=12, contexts=4) for m in (changed, model))
    for name in ("log_p", "exact"):
        change = (after - before)[name]
        close(found[f"recall_{name}_after_by_list"], after[name].mean("depth"), 1e-9, 1e-9)
        close(found[f"recall_{name}_change"], change.mean(), 1e-9, 1e-9)
        by_couple = change.values.reshape(2, -1).mean(1)
        reach = 12.706 * np.abs(by_couple[0] - by_couple[1]) / 2  # of two couples: Student's t, one degree of freedom
        close(found[f"recall_{name}_change_high"] - found[f"recall_{name}_change"], reach, 1e-3, 1e-9)
