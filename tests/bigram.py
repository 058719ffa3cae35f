"""A small toy that reads text, for what concerns text, tokens and results only."""

from probes.data.documents import Document
from probes.models.checks import first_ids
from toy.corpus import train_tokenizer
from toy.model import Architecture, initial
from toy.view import Toy

TEXT = "the cat sat on a mat and one dog ran over some red hill while two birds sang of rain in early spring"
WORDS = TEXT.split()


def bigram(*, bos: bool, max_length: int = 512, vocabulary: int | None = None, name: str = "bigram") -> Toy:
    """Its byte-level tokenizer knows `WORDS`; BOS, if there is one, has id 0."""
    tokenizer = train_tokenizer([Document("words", " ".join(WORDS * 3))], vocabulary=300, bos=bos)
    a = Architecture(length=max_length, vocabulary=vocabulary or len(tokenizer))
    toy = Toy(a, initial(a, 99), name=name)
    toy.tokenizer, toy.first_ids = tokenizer, first_ids(tokenizer)
    return toy
