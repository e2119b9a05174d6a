"""The handler for texts: cleans them and turns words and n-grams into numbers."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from torch_py_backend.errors import ArtifactError, summarize
from torch_py_backend.torchserve.context import Context, current_config
from torch_py_backend.torchserve.handlers import BaseHandler, Data, map_class_to_label, request_body

_MARKUP = re.compile(r"<.*?>|&(?:[a-z0-9]+|#[0-9]{1,6}|#x[0-9a-f]{1,6});")

_HAVE = "could i might must should so they to we what when where who why will would you"
_NOT = "are could did does do had has have is may might must need ought should was were would"
_IS = "he how it she that there what when where who why"
# English contractions: endings, their meanings, and the words that they follow.
_ENDINGS = {
    "n't": (" not", _NOT),
    "'ve": (" have", _HAVE),
    "'d": (" would", "he i it she that there they we you"),
    "'ll": (" will", "he how i it she they we what who you"),
    "'s": (" is", _IS),
    "'re": (" are", "they we what you"),
    "'m": (" am", "i"),
}
_IRREGULAR = {
    "ain't": "is not",
    "can't": "cannot",
    "shan't": "shall not",
    "sha'n't": "shall not",
    "won't": "will not",
    "let's": "let us",
    "so's": "so as",
    "how'd": "how did",
    "where'd": "where did",
    "ma'am": "madam",
    "o'clock": "of the clock",
    "y'all": "you all",
}
_CONTRACTIONS = _IRREGULAR | {
    word + ending: word + meaning
    for ending, (meaning, words) in _ENDINGS.items()
    for word in words.split()
}
_CONTRACTION = re.compile(
    rf"(?<![a-z])(?:{'|'.join(sorted(_CONTRACTIONS, key=len, reverse=True))})", re.IGNORECASE
)


Tokenizer: TypeAlias = "Callable[[str], list[str]]"


def ngrams_iterator(token_list: Sequence[str], ngrams: int) -> Iterator[str]:
    """Yield the tokens, then all runs of two tokens, and so on up to `ngrams`."""
    for size in range(1, ngrams + 1):
        for start in range(len(token_list) - size + 1):
            yield " ".join(token_list[start : start + size])


def get_tokenizer(tokenizer: str | Tokenizer | None, language: str = "en") -> Tokenizer:
    """Return a tokenizer: str.split for None, `basic_english`, or the given function.

    Raises:
        ValueError: there is no tokenizer of this name.
    """
    if tokenizer is None:
        return str.split
    if tokenizer == "basic_english" and language == "en":
        return _basic_english
    if callable(tokenizer):
        return tokenizer
    raise ValueError(f"there is no tokenizer {tokenizer!r} for {language!r}, only basic_english")


def _basic_english(text: str) -> list[str]:
    """Split a text into lower-case words and punctuation marks."""
    text = re.sub(r"<br />|[;:]", " ", text.lower()).replace('"', "")
    return re.sub(r"(['.,()!?])", r" \1 ", text).split()


class Vocabulary(dict[str, int]):
    """Numbers by token; unknown tokens have the number of `<unk>`."""

    def __missing__(self, token: str) -> int:
        if "<unk>" not in self:
            raise KeyError(token)
        return self["<unk>"]


class TextHandler(BaseHandler):
    """Handles texts with the vocabulary of the archive."""

    def __init__(self) -> None:
        super().__init__()
        self.source_vocab = Vocabulary()
        self.tokenizer = get_tokenizer("basic_english")

    def initialize(self, context: Context) -> None:
        super().initialize(context)
        self.initialized = False
        name = self.manifest["model"].get("sourceVocab")
        folder = context.system_properties["model_dir"]
        path = Path(folder, name) if name else Path(self.get_source_vocab_path(context))
        try:
            vocabulary = torch.load(path, weights_only=True)
            problem = (
                "" if isinstance(vocabulary, dict) else f"it holds a {type(vocabulary).__name__}"
            )
        except Exception as error:  # a missing or damaged file, or objects of torchtext
            problem = summarize(error)
        if problem:
            raise ArtifactError(
                current_config.get().name,
                f"the vocabulary {path.name} cannot be read: {problem}",
                expected="a dict of numbers by token",
                cure="Save one with torch.save; of torchtext's Vocab, what get_stoi() returns.",
            )
        self.source_vocab = Vocabulary(vocabulary)
        self.initialized = True

    def get_source_vocab_path(self, ctx: Context) -> str:
        return str(Path(ctx.system_properties["model_dir"], "source_vocab.pt"))

    def _expand_contractions(self, text: str) -> str:
        return _CONTRACTION.sub(_expand, text).replace("'", "")

    def _remove_accented_characters(self, text: str) -> str:
        return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()

    def _remove_html_tags(self, text: str) -> str:
        return _MARKUP.sub("", text)

    def _remove_punctuation(self, text: str) -> str:
        return text.translate(str.maketrans("", "", string.punctuation))

    _remove_puncutation = _remove_punctuation  # TorchServe's spelling

    def _tokenize(self, text: str) -> list[str]:
        return self.tokenizer(text)


def _expand(match: re.Match[str]) -> str:
    words = _CONTRACTIONS[match[0].lower()]
    return words[0].upper() + words[1:] if match[0][0].isupper() else words


class TextClassifier(TextHandler):
    """Returns the probability of each class, for one text at a time."""

    ngrams = 2

    def preprocess(self, data: Data) -> Data:
        """Return the numbers of the text's words and n-grams, and its words."""
        text = request_body(data[0])
        if isinstance(text, bytes | bytearray):
            text = text.decode("utf-8")
        text = self._expand_contractions(self._remove_html_tags(text).lower())
        text = self._remove_punctuation(self._remove_accented_characters(text))
        tokens = self._tokenize(text)
        numbers = [self.source_vocab[token] for token in ngrams_iterator(tokens, self.ngrams)]
        return torch.as_tensor(numbers, device=self.device), tokens

    def inference(self, data: Data, *args: Any, **kwargs: Any) -> Data:
        offsets = torch.as_tensor([0], device=self.device)
        return super().inference(data[0], offsets, *args, **kwargs)

    def postprocess(self, data: Data) -> Data:
        return map_class_to_label(torch.softmax(data, dim=-1).tolist(), self.mapping)
