"""The transformers configuration that a GGUF file implies, key by key, and its tensors as transformers has them.

transformers' own reader takes few of a file's keys and silently drops the others: RoPE scaling, windows, soft-caps,
head sizes. Here every key of the architecture is followed by name, known to change nothing, or refused.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError, plural, reason
from ..families import check_sizes, spec_of
from ..initialization import ASSUMED
from .header import Header

# A configuration's field by the file's key, without its architecture.
FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "feed_forward_length": "intermediate_size",
        "context_length": "max_position_embeddings",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    }
)
# Soft-caps where the file does not say; 0 is none.
CAPS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        "gemma3": {"final_logit_softcapping": 0.0},
    }
)
GEMMA2_WINDOW = 4096
# The one with so many has logits scaled by its width per head, not the head's.
BLOCKS_27B = {"gemma2": 46, "gemma3": 62}
PERIOD, LOCAL = "attention.sliding_window_pattern", "rope.freq_base_swa"  # Gemma 3's alone
GEMMA3_PERIOD, GEMMA3_LOCAL = 6, 10_000.0  # every sixth block is full; the rotary base in the others
# By the format's name, transformers': a window makes a Mistral of a Llama.
ARCHITECTURES = {"llama": {"llama", "mistral"}, "gemma3": {"gemma3_text"}}
ARCHITECTURES |= {name: {name} for name in ("qwen2", "qwen3", "gemma", "gemma2")}
# Keys that are followed although no field has their name.
ROTATING = (
    *("attention.sliding_window", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
)
# Keys that change nothing, or that tensors' shapes say anyway.
IDLE = ("rope.scaling.finetuned", "tensor_data_layout", "vocab_size", "attention.value_length")
# Keys that change nothing at these values.
NEUTRAL = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "use_parallel_residual": False,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
}
TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}

ROPE_FACTORS = "rope_freqs.weight"  # what each rotation's frequency is divided by
# The rest of Llama 3.1's and 3.2's RoPE scaling, of which a file keeps what comes out
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROUNDING = 1e-4  # relative: a file keeps factors in float32, and their ratios are taken in it again
LARGEST = 2**31  # of a size


def config_of(header: Header) -> Any:
    """The configuration of a GGUF file."""
    from transformers import AutoConfig

    if header.architecture not in ARCHITECTURES:
        raise header.refuse(
            f"has the architecture '{header.architecture!s:.40}', which is not read; give the checkpoint's own folder "
            f"(read are {', '.join(ARCHITECTURES)})"
        )
    stated = _Stated(header)
    fields = _fields(stated)
    try:
        config = AutoConfig.for_model(**fields)
        check_sizes(config)
    except Exception as error:  # transformers checks fields with errors of several libraries
        raise header.refuse(
            f"describes no {fields['model_type']} model ({reason(error)}); convert the model again"
        ) from None
    window, windows = stated.values.get("attention.sliding_window"), set(spec_of(config).windows)
    beyond = windows == {None} and window is not None and window >= config.max_position_embeddings
    if window is not None and window not in windows and not beyond:
        raise stated.wrong(
            "attention.sliding_window", "which blocks have it is not said; give the checkpoint's own folder"
        )
    config.tie_word_embeddings = "output.weight" not in header.tensors
    setattr(config, ASSUMED, True)  # a GGUF file holds no deviation of fresh weights
    return config


class _Stated:
    """The keys of the file's architecture."""

    def __init__(self, header: Header) -> None:
        self.header, self.kind = header, header.architecture
        prefix = f"{self.kind}."
        self.values = {key.removeprefix(prefix): v for key, v in header.values.items() if key.startswith(prefix)}
        own = (PERIOD, LOCAL) if self.kind == "gemma3" else ()
        followed = (*FIELDS, *ROTATING, *IDLE, *CAPS.get(str(self.kind), ()), *own)
        for key, value in sorted(self.values.items()):
            if key not in followed and (key not in NEUTRAL or value != NEUTRAL[key]):  # it may change what is computed
                raise self.wrong(key, "headwater does not know how to follow it; give the checkpoint's own folder")

    def number(self, key: str, default: float | int | None = None, *, least: float = 0.0, whole: bool = False) -> Any:
        """A number of at least `least`."""
        value: Any = self.values.get(key, default)
        if value is None:
            raise self.header.refuse(f"does not state {self.kind}.{key}; convert the model again")
        kind, most = (int, LARGEST) if whole else (int | float, math.inf)
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < most:
            raise self.wrong(key, f"{'a whole number of at least 1' if whole else 'another number'} belongs there")
        return value if whole else float(value)

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        return self.number(key, default, least=1.0, whole=True)

    def wrong(self, key: str, why: str) -> InputError:
        return self.header.refuse(f"states {self.kind}.{key}={self.values.get(key)!s:.40}; {why}")


def _fields(stated: _Stated) -> dict[str, Any]:
    """The configuration's fields."""
    header, kind = stated.header, stated.kind
    if "token_embd.weight" not in header.tensors:
        raise header.refuse("has no matrix token_embd.weight; convert the model again")
    rows = header.shape("token_embd.weight")[0]
    width, heads = map(stated.size, ("embedding_length", "attention.head_count"))
    head_dim = stated.size("attention.key_length", max(1, width // heads))
    if stated.size("rope.dimension_count", head_dim) != head_dim:
        raise stated.wrong("rope.dimension_count", f"keys have {head_dim} entries, of which all are rotated here")
    defaults = {"attention.head_count_kv": heads, "attention.key_length": head_dim}
    fields: dict[str, Any] = {"model_type": kind, "vocab_size": rows, "rope_parameters": _rope(stated, head_dim)}
    for key, field in FIELDS.items():
        fields[field] = stated.number(key) if field == "rms_norm_eps" else stated.size(key, defaults.get(key))
    for field, name in TOKENS.items():
        token = header.values.get(f"tokenizer.ggml.{name}_token_id")
        fields[field] = token if isinstance(token, int) else None
    windowed, biased = "attention.sliding_window" in stated.values, "blk.0.attn_q.bias" in header.tensors
    if kind == "llama" and windowed:
        return fields | {"model_type": "mistral", "sliding_window": stated.size("attention.sliding_window")}
    if kind in CAPS:
        scale = width // heads if fields["num_hidden_layers"] == BLOCKS_27B[kind] else head_dim
        window = stated.size("attention.sliding_window", GEMMA2_WINDOW)
        fields |= {cap: stated.number(cap, usual) or None for cap, usual in CAPS[kind].items()}
        fields |= {"query_pre_attn_scalar": scale, "sliding_window": window}
        return fields | (_two_kinds(stated, fields["rope_parameters"]) if kind == "gemma3" else {})
    if kind == "qwen2":
        usual = head_dim == width // heads  # then it stands in none of Qwen2's own configurations
        return {field: value for field, value in fields.items() if field != "head_dim" or not usual}
    more = {"mlp_bias": "blk.0.ffn_gate.bias" in header.tensors} if kind == "llama" else {}
    return fields | {"attention_bias": biased} | more


def _two_kinds(stated: _Stated, rope: dict[str, Any]) -> dict[str, Any]:
    """Gemma 3's: every sixth block is full, the others have windows, and rotations by a base of their own, never scaled."""
    period = stated.size(PERIOD, GEMMA3_PERIOD) if "attention.sliding_window" in stated.values else 1
    local = {"rope_type": "default", "rope_theta": stated.number(LOCAL, GEMMA3_LOCAL, least=1.0)}
    rotations = {"full_attention": rope, "sliding_attention": local}
    return {"model_type": "gemma3_text", "sliding_window_pattern": period, "rope_parameters": rotations}


def _rope(stated: _Stated, head_dim: int) -> dict[str, Any]:
    usual_base = None if stated.kind == "gemma3" else 10_000.0  # of which its readers take different ones
    header, base = stated.header, stated.number("rope.freq_base", usual_base, least=1.0)
    kind = stated.values.get("rope.scaling.type", "linear")
    factor = stated.number("rope.scaling.factor", 0.0) or 1.0  # 0 says nothing
    usual = {"rope_type": "default", "rope_theta": base}
    if ROPE_FACTORS in header.tensors and stated.kind == "llama":
        if kind not in ("none", "linear") or factor != 1:
            raise header.refuse(f"scales its rotations twice, by {ROPE_FACTORS} and by {kind!s:.20}; convert it again")
        return _by_frequency(header, usual, head_dim)
    if kind == "none" or (kind == "linear" and factor == 1):
        return usual
    if kind == "linear":
        return usual | {"rope_type": "linear", "factor": factor}
    if kind != "yarn" or stated.kind == "gemma3":  # of which it is not said in which blocks
        known = "linear" if stated.kind == "gemma3" else "linear and yarn"
        raise stated.wrong("rope.scaling.type", f"{known} can be followed; give the checkpoint's own folder")
    original = stated.size("rope.scaling.original_context_length", stated.size("context_length"))
    betas = {beta: stated.values.get(f"rope.scaling.yarn_{beta}") for beta in ("beta_fast", "beta_slow")}
    scaled = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return usual | scaled | {beta: float(value) for beta, value in betas.items() if value is not None}


def _by_frequency(header: Header, usual: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, of which the file keeps what each frequency is divided by."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = header.read(ROPE_FACTORS).ravel()
    if (factors == 1).all():
        return usual
    scaled = usual | LLAMA3 | {"factor": float(factors.max())}
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=scaled)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = usual["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
    if len(factors) != len(plain) or not torch.allclose(plain / factors, frequencies, rtol=ROUNDING, atol=0):
        raise header.refuse(
            f"scales its rotations by {ROPE_FACTORS} in another way than Llama 3; give the checkpoint's own folder"
        )
    return scaled


@dataclass(frozen=True)
class Unread:
    """A tensor that is read when transformers takes it out of what it loads: some at a time, and none twice in memory."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    def __getitem__(self, whole: Any) -> Tensor:
        return self.read()


def tensors_of(header: Header, config: Any, device: torch.device) -> dict[str, Unread]:
    """The file's tensors in float32 on a device, as the configuration's model has them; some may be missing."""
    import gguf

    from ..fresh import without_weights

    try:
        wanted = without_weights(config).state_dict()
    except InputError as error:
        raise header.refuse(f"cannot be followed: {error}") from None
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture)
    known = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    names = {known.get_name(own, try_suffixes=(".weight", ".bias")) or own: own for own in wanted}
    applied = {ROPE_FACTORS} if header.architecture == "llama" else set()  # in the configuration instead
    if unread := sorted(set(header.tensors) - set(names) - applied):
        raise header.refuse(
            f"has {plural(len(unread), 'tensor')} that a {config.model_type} model has no place for ({unread[0]:.60}); "
            "give the checkpoint's own folder"
        )
    tensors = {}
    for name in header.tensors:
        if name in applied:
            continue
        own, shape = wanted[names[name]].shape, header.shape(name)
        if shape != own:
            raise header.refuse(f"has {name} in the shape {list(shape)}, and its model in {list(own)}; get it again")
        header.check(name)
        tensors[names[name]] = Unread(shape, partial(_tensor, header, config, name, device))
    return tensors


def _tensor(header: Header, config: Any, name: str, device: torch.device) -> Tensor:
    tensor = header.read(name, device)
    if config.model_type.startswith("gemma") and name.endswith("norm.weight"):  # stored with 1 added
        tensor = tensor - 1
    heads = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
    for part, count in heads.items() if header.architecture == "llama" else ():
        if part in name:
            tensor = tensor.unflatten(0, (count, -1, 2)).transpose(1, 2).reshape(tensor.shape)
    return tensor


# By what a file calls the rules that split its texts, as llama.cpp understands these names:
AS_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo")
DIGITS_ALONE = ("smollm", "starcoder", "refact", "codeshell", "command-r", "minerva-7b")  # digit by digit, then GPT-2's
# A word that is a token is one whatever its merges; and BOS comes first where `add_bos_token` does not say.
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"  # vocabularies by the file's name for them
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
NO_WORDS = {"type": "BPE", "vocab": {}, "merges": []}  # in JSON
SENTENCEPIECE_BOS = 1  # the usual id, where the file does not say
REMEDY = "put the model's tokenizer.json and tokenizer_config.json beside the file"


def tokenizer_of(header: Header) -> Any | None:
    """The tokenizer, or None where the file has none."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    values = header.values
    kind, rules = values.get("tokenizer.ggml.model", "none"), values.get("tokenizer.ggml.pre")
    if kind in ("none", "no_vocab"):
        return None
    if kind not in (BYTE_LEVEL, SENTENCEPIECE):
        raise header.refuse(f"has a tokenizer of the kind '{kind!s:.40}', which is not supported; {REMEDY}")
    if kind == BYTE_LEVEL and rules not in (*AS_GPT2, *DIGITS_ALONE, *GGUF_PRE_TOKENIZER_SPLITS):
        how = "does not say how its texts are split" if rules is None else f"splits its texts as '{rules!s:.40}'"
        raise header.refuse(f"{how}, which headwater does not know how to do; {REMEDY}")
    tokens = values.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens) or not tokens:
        raise header.refuse(f"has no list of tokens; {REMEDY}")
    try:
        return _built(header, tokens, kind, rules)
    except Exception as error:  # tokenizers raises plain exceptions, transformers whatever it runs into
        raise header.refuse(f"has a tokenizer that cannot be built ({reason(error)}); {REMEDY}") from None


def _built(header: Header, tokens: list[str], kind: str, rules: str | None) -> Any:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    values = header.values
    ids = {name: values.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL.items()}
    if kind == SENTENCEPIECE and ids["bos"] is None:
        ids["bos"] = SENTENCEPIECE_BOS
    for name, token in ids.items():
        if token is not None and not (isinstance(token, int) and 0 <= token < len(tokens)):
            raise ValueError(f"{SPECIAL[name]}_token_id={token!s:.40} is none of {len(tokens)} tokens")
    keys = {key: f"tokenizer.{key}" for key in GGUF_TOKENIZER_MAPPING["tokenizer"]}
    read = {name: values[keys[key]] for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items() if keys[key] in values}
    converted = convert_gguf_tokenizer(header.architecture, read)[0]
    built, model = json.loads(converted.to_str()), converted.model
    if rules in WHOLE_WORDS:
        model.ignore_merges = True
    if rules in DIGITS_ALONE:
        digit = {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated", "invert": False}
        built["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digit, built["pre_tokenizer"]]}
    if kind == SENTENCEPIECE and not values.get("tokenizer.ggml.add_space_prefix", True):
        # No space in front of texts, and none taken away in decoding
        if (built["pre_tokenizer"] or {}).get("type") == "Metaspace":
            built["pre_tokenizer"]["prepend_scheme"] = "never"
        if (built["decoder"] or {}).get("type") == "Sequence":
            decoders = built["decoder"]["decoders"]
            built["decoder"]["decoders"] = [decoder for decoder in decoders if decoder["type"] != "Strip"]
    # As far as the file says, whether the model was trained with BOS in front; else as llama.cpp takes it.
    stated, usual = values.get("tokenizer.ggml.add_bos_token"), kind == SENTENCEPIECE or rules in WHOLE_WORDS
    first = ids["bos"] if (stated if isinstance(stated, bool) else usual) else None
    # All but the words and merges, of which there are many, by way of JSON.
    added = [AddedToken(**token) for token in built["added_tokens"] if token.pop("id") < len(tokens)]
    made = Tokenizer.from_str(json.dumps(built | {"model": NO_WORDS, "added_tokens": [], "post_processor": None}))
    made.model = model
    made.add_tokens(added)
    if first is not None:
        made.post_processor = TemplateProcessing([tokens[first], "$A"], None, [(tokens[first], first)])
    template = values.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        chat_template=template if isinstance(template, str) else None,
        **{f"{name}_token": None if token is None else tokens[token] for name, token in ids.items()},
    )
