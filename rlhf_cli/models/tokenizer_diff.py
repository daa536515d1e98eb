"""Compare two tokenizers with the same vocabulary: find a text that they encode to different ids.

If all settings that affect ids are equal, so are the ids. Different settings may still be equivalent: a newer version
of the library writes more fields, or a rule can be written in two ways. Then the ids of three kinds of texts decide:
- short texts in which normalizers and pre-tokenizers are known to differ, and added tokens inside texts;
- each Unicode character next to letters, digits and spaces: any change that a normalizer makes shows in one of these;
- the text of each token in the vocabulary: if only one pre-tokenizer splits a text at some point, the ids differ only
  if a token spans that point, and then that token's own text is encoded differently.
"""

import json
import unicodedata
from functools import lru_cache
from typing import Any

from rlhf_cli.errors import RLHFError, translate_rust_panics

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
# Code points to test: a sample of the large uniform blocks (Han, Hangul); of the higher planes only the tags.
CODE_POINTS = (
    range(0x3400), range(0x3400, 0xA000, 101), range(0xA000, 0xAC00), range(0xAC00, 0xD7A4, 101),
    range(0xD7A4, 0x20000), range(0x20000, 0x32400, 101), range(0xE0000, 0xE0200),
)  # fmt: skip
SKIPPED_CATEGORIES = ("Cs", "Cn", "Co")  # surrogates, unassigned, private use
PIECES_PER_TEXT = 64  # characters or tokens


def first_difference(first: Any, second: Any, added_pad: str) -> str | None:
    """Describe a text that two tokenizers with the same vocabulary encode differently; None if there is none.

    `added_pad` is the pad token that `tokenizers.ensure_pad_token` adds, which no text contains.
    """
    starts = _start_ids(first), _start_ids(second)
    if starts[0] != starts[1]:
        return f"one begins a text with {starts[0] or 'nothing'}, the other one with {starts[1] or 'nothing'}"
    if first.is_fast and second.is_fast and _settings(first, added_pad) == _settings(second, added_pad):
        return None
    for texts in (_short_texts(first, added_pad), _character_texts(), _token_texts(first)):
        try:
            encodings = list(zip(texts, _encode(first, texts), _encode(second, texts), strict=True))
        except RLHFError:
            raise
        except Exception as error:  # texts that a tokenizer cannot encode prove nothing
            return f"their rules are written differently, and one fails on a text ({error})"
        for text, ids, other_ids in encodings:
            if ids != other_ids:
                return f"{_excerpt(text, ids, other_ids, first)!r} becomes other tokens"
    return None


def _settings(tokenizer: Any, added_pad: str) -> dict[str, Any]:
    """Return the settings that affect ids, except vocabulary and merges.

    Padding, truncation, the decoder and the display of added tokens do not affect ids. `_start_ids` covers the
    template of special tokens.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    names = ("id", "content", "single_word", "lstrip", "rstrip", "normalized")
    tokens = [token for token in backend["added_tokens"] if token["content"] != added_pad]
    added = [{name: token.get(name) for name in names} for token in tokens]
    model = {name: value for name, value in backend["model"].items() if name != "merges"}
    if isinstance(model.get("vocab"), dict):  # a list also contains a score for each token
        del model["vocab"]
    return {
        "normalizer": backend["normalizer"],
        "pre_tokenizer": backend["pre_tokenizer"],
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "model": model,
        "split_special_tokens": tokenizer.split_special_tokens,
    }


def _start_ids(tokenizer: Any) -> list[int]:
    """Return the special tokens that a tokenizer puts before a text."""
    try:
        text_ids, full = _encode(tokenizer, ["a"])[0], tokenizer("a").input_ids
    except Exception:  # the vocabulary has neither this letter nor an unknown token
        return tokenizer("").input_ids
    starts = (i for i in range(len(full)) if full[i : i + len(text_ids)] == text_ids)
    return full[: next(starts, 0)]


def _encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    with translate_rust_panics("M01", "the tokenizer fails on a text"):
        return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _short_texts(tokenizer: Any, added_pad: str) -> list[str]:
    """Return texts in which tokenizers are known to differ, and the added tokens inside texts."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content != added_pad]
    frames = ("{}", "a{}b", "a {} b", "  {}  ", "{0}{0}", "\n{}\n")
    return [*TEXTS, *(frame.format(token) for token in added for frame in frames)]


@lru_cache(maxsize=1)
def _character_texts() -> list[str]:
    """Return the characters of CODE_POINTS, each next to letters, digits, spaces and itself."""
    characters = (chr(code) for codes in CODE_POINTS for code in codes)
    tested = [char for char in characters if unicodedata.category(char) not in SKIPPED_CATEGORIES]
    return _join_lines([f"x{char}X {char}{char}1" for char in tested])


def _token_texts(tokenizer: Any) -> list[str]:
    """Return the text of each token, alone and inside a word."""
    texts = tokenizer.batch_decode([[token] for token in sorted(tokenizer.get_vocab().values())])
    return _join_lines([f"{text} a{text}b" for text in texts])


def _join_lines(pieces: list[str]) -> list[str]:
    return ["\n".join(pieces[start : start + PIECES_PER_TEXT]) for start in range(0, len(pieces), PIECES_PER_TEXT)]


def _excerpt(text: str, ids: list[int], other_ids: list[int], tokenizer: Any) -> str:
    """Return the part of a long text around the first token that differs."""
    differing = (i for i, (a, b) in enumerate(zip(ids, other_ids, strict=False)) if a != b)
    same = next(differing, min(len(ids), len(other_ids)))
    start = max(0, min(len(tokenizer.decode(ids[:same])), len(text)) - 10)
    return text if len(text) <= 40 else text[start : start + 20]
