"""Fresh weights of a configuration: what a rule of initialization means for it, and models drawn by that rule."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..errors import InputError, reason
from .families import SINK_LOGITS, family_of, spec_of
from .initialization import ASSUMED, CONFIG, KINDS, Initialization, Rule, by_depth, resolve
from .view import Birth

NO_SINK = -1e30  # a learned sink logit of weight 0 beside any other, and finite as weights of checkpoints have to be


def initialization_of(config: Any, rule: Rule = CONFIG) -> Initialization:
    """What a rule means for a configuration."""
    if rule != CONFIG:
        return resolve(rule, config.num_hidden_layers, config.hidden_size)
    default: Any = AutoConfig.for_model(config.model_type).initializer_range
    sigma, stated = config.initializer_range or default, bool(config.initializer_range)  # 0 is as if nothing were said
    if sigma == default and (getattr(config, ASSUMED, False) or not stated):
        source = ", transformers' default: the config names none"
    else:
        source = " of the config" + (", also transformers' default" if sigma == default else "")
    deviations: dict[str, float] = dict.fromkeys(KINDS, sigma)
    if family_of(config).depth_scaled:
        source += "; output and down projections divided by sqrt(2L)"
        deviations = by_depth(sigma, config.num_hidden_layers)
    return Initialization(f"initializer_range {sigma:g}{source}", **deviations)


def _made(config: Any) -> Any:
    """A configuration's model, drawn by transformers in float32."""
    config = copy.deepcopy(config)
    config._attn_implementation = None
    try:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # whatever sizes and names lead to
        raise InputError(
            f"no model can be made of this {config.model_type} config ({reason(error)}); check it"
        ) from None


def without_weights(config: Any) -> Any:
    """The same on the device "meta": all of it but numbers."""
    with torch.device("meta"):
        return _made(config)


def birth_of(config: Any, rule: Initialization) -> Birth:
    """What fresh weights of this configuration are drawn from under a rule."""
    family, decoder = family_of(config), without_weights(config).get_decoder()
    if family.parts is None:
        raise InputError(
            f"blocks of {config.model_type} run whole, and the theory takes them apart; give another family"
        )
    every = [family.parts(block) for block in getattr(decoder, family.blocks)]
    parts, norm = every[0], every[0].attention_norm or every[0].post_attention_norm
    assert norm is not None
    if len({block.routing is None for block in every}) > 1:
        raise InputError(
            "some blocks have experts, others none: theory from the config alone needs them in every block; give the model"
        )
    drawn = {kind: getattr(rule, kind) for kind in ("embedding", "positions", "v", "o", "gate", "up", "down")}
    drawn |= {} if parts.gate is not None else {"gate": None}
    drawn |= {} if family.learned is not None else {"positions": 0.0}
    if family.root_scaled:
        drawn["embedding"] *= config.hidden_size**0.5
    if (route := parts.routing) is not None:
        chosen = {"chosen": route.chosen, "among_chosen": route.among_chosen}
        drawn |= {"router": rule.up, "experts": len(route.weight)} | chosen
    return Birth(
        spec_of(config),
        **drawn,
        features=parts.down.weight.shape[-1],
        activation=parts.activation,
        up_activation=parts.up_activation,
        norm=norm.kind,
        eps=norm.eps,
        parallel=parts.parallel,
        pre_norm=parts.attention_norm is not None,
        initialization=rule.name,
    )


def fresh_model(config: Any, seed: int, rule: Initialization, *, positional: bool = True) -> PreTrainedModel:
    """Fresh float32 weights from a configuration, drawn on the CPU so that a seed means the same on every device.

    They are drawn as transformers draws them. All entries are normal with mean zero, so that multiplying a matrix by the
    ratio of its deviations is a draw by another rule, from the same noise; by the configuration's own nothing is touched.

    Without `positional`: rotations are replaced by the identity (times the scaling that some RoPE types apply to the
    logits), learned positions by zeros.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _made(config)
    hold_sink_logits(model)
    _rescale(model, rule)
    family, decoder = family_of(config), model.get_decoder()

    def unrotated(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):  # cos + i sin
            return output.abs().to(output.dtype)
        cos, sin = output
        return torch.sqrt(cos**2 + sin**2), torch.zeros_like(sin)

    if not positional and family.learned is not None:
        nn.init.zeros_(getattr(decoder, family.learned).weight)
    elif not positional:
        decoder.rotary_emb.register_forward_hook(unrotated)
    return model


def start_of(folder: Path, seed: int) -> dict[str, Tensor]:
    """The weights that training a folder's configuration begins with, as its files name them: fresh, rounded to bfloat16."""
    config = AutoConfig.from_pretrained(folder)
    model = fresh_model(config, seed, initialization_of(config))
    tied = (model._tied_weights_keys or ()) if config.tie_word_embeddings else ()
    return {name: weight.bfloat16().contiguous() for name, weight in model.state_dict().items() if name not in tied}


@torch.no_grad()
def hold_sink_logits(model: Any) -> None:
    """Make learned sink logits of no weight, for good, where the config says `sink_logits: false`: heads without them."""
    for name, parameter in model.named_parameters():
        if not getattr(model.config, SINK_LOGITS, True) and name.endswith(".sinks"):
            parameter.fill_(NO_SINK).requires_grad_(False)


@torch.no_grad()
def _rescale(model: Any, rule: Initialization) -> None:
    """Matrices as drawn by the model's configuration become those of `rule`, in place."""
    drawn_by, family, decoder = initialization_of(model.config), family_of(model.config), model.get_decoder()
    if family.parts is None:
        if rule != drawn_by:
            raise InputError(
                f"fresh weights of {model.config.model_type} are drawn as its config says; give initialization 'config'"
            )
        return
    matrices = [("embedding", model.get_input_embeddings().weight)]
    if model.get_output_embeddings().weight is not matrices[0][1]:
        matrices.append(("unembedding", model.get_output_embeddings().weight))
    if family.learned is not None:
        matrices.append(("positions", getattr(decoder, family.learned).weight))
    for block in getattr(decoder, family.blocks):
        parts = family.parts(block)
        linear = {kind: getattr(parts, kind, None) for kind in KINDS}
        matrices += ({k: x.weight for k, x in linear.items() if x is not None} | family.fused(block)).items()
        if parts.routing is not None:  # a router's deviation is that of the first matrices behind it
            matrices.append(("up", parts.routing.weight))
    for kind, matrix in matrices:
        if getattr(rule, kind) != getattr(drawn_by, kind):
            matrix.mul_(getattr(rule, kind) / getattr(drawn_by, kind))
