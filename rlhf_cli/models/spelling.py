"""Whether two tokenizers of one vocabulary make the same ids of every text.

Where all parts that make ids are the same, they do. Parts that are written otherwise may still do the same: a version
of the library writes more fields, or one rule is said in two ways. Then ids are compared, of three kinds of texts:
- short ones that normalizers and pre-tokenizers are known to differ in, and added tokens inside of texts;
- each character of Unicode, beside letters, digits and spaces: what a normalizer changes, it changes in one of these;
- each token of the vocabulary as a text: where a rule cuts a text and another does not, the ids differ only if some
  token reaches across that cut, and then the text of that token shows it.
"""

import json
import unicodedata
from functools import lru_cache
from typing import Any

from rlhf_cli.errors import RLHFError, panics_as

TEXTS = (
    "Tell me about the Sun.", "TELL ME", "tell me", "CamelCase snake_case kebab-case",
    "don't DON'T we'll I'M it\u2019s", " leading", "  two leading", "trailing ", "trailing  ", "two  spaces   three",
    " ", "  ", " " * 50, "\t", "a\tb", "\n", "\n\n", "\n\n\n", "a\nb", "a \n b", " \n \n", "a\r\nb", "\r",
    "line.\n\nHuman: Hi\n\nAssistant: Yes?", "1", "12", "123", "1234", "1234567890123", "3.14159", "1,000,000",
    "1 2 3", "a1b2", "v1.2.3", "10%", "$5.00", "...", "?!", "----", "\u2014", "a.b.c", "(a) [b] {c}", "#a @b &c",
    "https://a.org/b?c=d&e=f", "a/b\\c", "<b>x</b>", "caf\u00e9 na\u00efve", "cafe\u0301 nai\u0308ve",
    "\u00c5 \u212b A\u030a", "\ufb01 \u2460 \u00bd \u2122", "\u1e9e stra\u00dfe STRASSE", "\u0130 i\u0307 I\u0131",
    "\u03a3\u03a3 \u03c3\u03c2", "\u041f\u0440\u0438\u0432\u0435\u0442", "\u0645\u064f\u0631\u062d\u0628\u0627",
    "\u05e9\u05b8\u05dc\u05d5\u05b9\u05dd", "\u0939\u093f\u0928\u094d\u0926\u0940", "\u0e44\u0e17\u0e22",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8", "\u4f60\u597d\uff0c\u4e16\u754c\u3002", "\ud55c\uad6d\uc5b4",
    "\u1112\u1161\u11ab", "\uff21\uff22\uff23\uff11\uff12 \uff76\uff9e", "a\u65e5b", "\U0001f642", "a\U0001f642b",
    "\U0001f469\u200d\U0001f4bb", "\U0001f1e9\U0001f1ea", "\u2764\ufe0f", "a\u00a0b", "a\u200bb", "a\u2028b",
    "\ufeffa", "a\u00adb", "a\x00b", "a\x1bb", "a\x7fb", "a\ufffdb", "\u2581a \u2581", "\u0120a", "x" * 300,
    "ab" * 150, "9" * 60, "def f(x):\n    return x + 1\n\n\n\tif x:", '{"a": [1, 2.5, null]}',
)  # fmt: skip
# The characters that are tried: some of the Han and Hangul blocks, each of one class; of the planes behind, tags alone.
TRIED = (
    range(0x3400), range(0x3400, 0xA000, 101), range(0xA000, 0xAC00), range(0xAC00, 0xD7A4, 101),
    range(0xD7A4, 0x20000), range(0x20000, 0x32400, 101), range(0xE0000, 0xE0200),
)  # fmt: skip
NO_CHARACTERS = ("Cs", "Cn", "Co")  # surrogates, what has no meaning yet, private use
AT_ONCE = 64  # characters or tokens in a text


def difference(first: Any, other: Any, own_pad: str) -> str | None:
    """What shows that two tokenizers with the same vocabulary make other ids; None where they do not.

    `own_pad` is the token that we add for padding, which no text holds.
    """
    if _begins(first) != _begins(other):
        return f"one begins a text with {_begins(first) or 'nothing'}, the other one with {_begins(other) or 'nothing'}"
    if first.is_fast and other.is_fast and _parts(first, own_pad) == _parts(other, own_pad):
        return None
    for texts in (_short(first, own_pad), _every_character(), _every_token(first)):
        try:
            found = list(zip(texts, _ids(first, texts), _ids(other, texts), strict=True))
        except RLHFError:
            raise
        except Exception as error:  # nothing is proven by texts that one of them cannot read
            return f"their rules are written differently, and one fails on a text ({error})"
        for text, ours, theirs in found:
            if ours != theirs:
                return f"{_where(text, ours, theirs, first)!r} becomes other tokens"
    return None


def _parts(tokenizer: Any, own_pad: str) -> dict[str, Any]:
    """What makes ids of a text, but vocabulary and merges.

    Left out: padding, truncation and decoder; the template of special tokens, which `_begins` tells; what an added
    token is shown as.
    """
    told = json.loads(tokenizer.backend_tokenizer.to_str())
    names = ("id", "content", "single_word", "lstrip", "rstrip", "normalized")
    added = [{name: token.get(name) for name in names} for token in told["added_tokens"] if token["content"] != own_pad]
    model = {name: value for name, value in told["model"].items() if name != "merges"}
    if isinstance(model.get("vocab"), dict):  # a list also holds a score for each token
        del model["vocab"]
    return {
        "normalizer": told["normalizer"],
        "pre_tokenizer": told["pre_tokenizer"],
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "model": model,
        "split_special_tokens": tokenizer.split_special_tokens,
    }


def _begins(tokenizer: Any) -> list[int]:
    """The special tokens that a tokenizer puts before a text."""
    try:
        bare, full = _ids(tokenizer, ["a"])[0], tokenizer("a").input_ids
    except Exception:  # no such letter, and no token for what is unknown
        return tokenizer("").input_ids
    starts = (i for i in range(len(full)) if full[i : i + len(bare)] == bare)
    return full[: next(starts, 0)]


def _ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    with panics_as("M01", "the tokenizer fails on a text"):
        return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _short(tokenizer: Any, own_pad: str) -> list[str]:
    """Texts that rules are known to differ in, and the added tokens inside of texts."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content != own_pad]
    frames = ("{}", "a{}b", "a {} b", "  {}  ", "{0}{0}", "\n{}\n")
    return [*TEXTS, *(frame.format(token) for token in added for frame in frames)]


@lru_cache(maxsize=1)
def _every_character() -> list[str]:
    """Each character of Unicode beside letters, digits, spaces, and itself; of large uniform blocks some."""
    characters = (chr(code) for codes in TRIED for code in codes)
    tried = [one for one in characters if unicodedata.category(one) not in NO_CHARACTERS]
    return _together([f"x{one}X {one}{one}1" for one in tried])


def _every_token(tokenizer: Any) -> list[str]:
    """The text of each token, alone and inside of a word."""
    texts = tokenizer.batch_decode([[token] for token in sorted(tokenizer.get_vocab().values())])
    return _together([f"{text} a{text}b" for text in texts])


def _together(pieces: list[str]) -> list[str]:
    return ["\n".join(pieces[first : first + AT_ONCE]) for first in range(0, len(pieces), AT_ONCE)]


def _where(text: str, ours: list[int], theirs: list[int], tokenizer: Any) -> str:
    """About the place of a long text from which on the tokens are others."""
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    start = max(0, min(len(tokenizer.decode(ours[:same])), len(text)) - 10)
    return text if len(text) <= 40 else text[start : start + 20]
