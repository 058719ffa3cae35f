"""The tokenizer of a GGUF file: transformers' reader builds it, and what it leaves out is put in place here.

It knows the splitting rules of some byte-level vocabularies and takes GPT-2's for all others; it never looks whether BOS
stands first, whether a whole word that is a token is merged at all (Llama 3's is not), or whether texts get a space in
front; and it adds special tokens of its own that the vocabulary has no ids for.
"""

from __future__ import annotations

import json
from typing import Any

from ...errors import reason
from .header import Header

# By what a file calls the rules that split its texts, as llama.cpp understands these names:
AS_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo")
DIGITS_ALONE = ("smollm", "starcoder", "refact", "codeshell", "command-r", "minerva-7b")  # digit by digit, then GPT-2's
# A word that is a token is one whatever its merges; and BOS comes first where `add_bos_token` does not say.
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"  # vocabularies by the file's name for them
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
SENTENCEPIECE_BOS = 1  # the usual id, where the file does not say
REMEDY = "put the model's tokenizer.json and tokenizer_config.json beside the file"


def tokenizer_of(header: Header) -> Any | None:
    """The tokenizer, or None where the file has none.

    Raises:
        InputError: it splits texts by unknown rules, or is damaged.
    """
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
    from tokenizers import Tokenizer
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
    built = json.loads(convert_gguf_tokenizer(header.architecture, read)[0].to_str())
    built["added_tokens"] = [token for token in built["added_tokens"] if token["id"] < len(tokens)]
    if rules in WHOLE_WORDS:
        built["model"]["ignore_merges"] = True
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
    made = Tokenizer.from_str(json.dumps(built | {"post_processor": None}))
    if first is not None:
        made.post_processor = TemplateProcessing([tokens[first], "$A"], None, [(tokens[first], first)])
    template = values.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        chat_template=template if isinstance(template, str) else None,
        **{f"{name}_token": None if token is None else tokens[token] for name, token in ids.items()},
    )
