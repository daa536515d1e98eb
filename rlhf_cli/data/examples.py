"""Rows of a file to token rows: examples for SFT, pairs for the reward model, prompts for PPO and evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli.data import texts
from rlhf_cli.data.forms import BadRow, DataFile
from rlhf_cli.data.tokens import Conversation, encode_many
from rlhf_cli.errors import RLHFError

SFT_FORMS = (("prompt", "completion"), ("messages",), ("text",))
PAIR_FORMS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
PROMPT_FORMS = (*PAIR_FORMS, ("prompt",), ("messages",))


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, the text or conversation as given, and the line it stands on."""

    ids: list[int]
    text: str | Conversation
    line: int


def is_plain_text(path: Path | str, *, columns: Mapping[str, str] | None = None, where: str | None = None) -> bool:
    """Whether the first row of an SFT file is {text}, without a prompt. Raises RLHFError D01-D06, D12."""
    file = DataFile(path, columns or {}, SFT_FORMS, where)
    first = next(file.rows(), None)
    if first is None:
        file.finish(usable=0)
    return first is not None and first[1] == ("text",)


def sft_rows(
    path: Path | str,
    tokenizer: Any,
    *,
    columns: Mapping[str, str] | None = None,
    max_length: int | None,
    on_long: str = "drop",
    where: str | None = None,
) -> list[dict[str, list[int]]]:
    """{input_ids, completion_mask} of each example; the mask is 1 on the tokens that the model has to write.

    Takes {prompt, completion}, {text} (no prompt: all of it is completion) and {messages} (one example per assistant
    turn). Raises RLHFError D01-D10, D12, D14 with file and line.
    """
    file = DataFile(path, columns or {}, SFT_FORMS, where)
    found: list[texts.Example] = []
    for line, form, row in file.rows():
        try:
            found += texts.examples(line, form, row)
        except BadRow as bad:
            file.note(line, bad)
    encoded = _encode(file, tokenizer, [(example.line, example.prompt, example.response) for example in found])
    rows = []
    for example, (prompt, response) in zip(found, encoded, strict=True):
        if example.prompt:
            _check_prompt(file, example.line, prompt)
        _check_response(file, example.line, "completion", response)
        if _fits(file, example.line, len(prompt) + len(response), max_length, on_long):
            rows.append({"input_ids": prompt + response, "completion_mask": [0] * len(prompt) + [1] * len(response)})
    _finish(file, len(rows), max_length)
    return rows


def preference_rows(
    path: Path | str,
    tokenizer: Any,
    *,
    columns: Mapping[str, str] | None = None,
    max_length: int | None,
    on_long: str = "drop",
    on_identical: str = "error",
    where: str | None = None,
) -> list[dict[str, Any]]:
    """{prompt_ids, chosen_ids, rejected_ids[, margin]} of each pair; chosen_ids = prompt + response + stop token.

    Takes {prompt, chosen, rejected} and {chosen, rejected}, where the prompt is what the two begin with.
    Raises RLHFError D01-D10, D12, D14 with file and line.
    """
    file = DataFile(path, columns or {}, PAIR_FORMS, where)
    pairs = _pairs(file, on_identical)
    encoded = _encode(file, tokenizer, [(p.line, p.prompt, text) for p in pairs for text in (p.chosen, p.rejected)])
    rows = []
    for number, pair in enumerate(pairs):
        (prompt, chosen), (_, rejected) = encoded[2 * number : 2 * number + 2]
        _check_prompt(file, pair.line, prompt)
        _check_response(file, pair.line, "chosen", chosen)
        _check_response(file, pair.line, "rejected", rejected)
        if _fits(file, pair.line, len(prompt) + max(len(chosen), len(rejected)), max_length, on_long):
            row = {"prompt_ids": prompt, "chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected}
            rows.append(row if pair.margin is None else {**row, "margin": pair.margin})
    _finish(file, len(rows), max_length)
    return rows


def prompt_rows(
    path: Path | str,
    tokenizer: Any,
    *,
    columns: Mapping[str, str] | None = None,
    max_length: int | None,
    on_long: str = "drop",
    where: str | None = None,
) -> list[Prompt]:
    """The prompts of a file: {prompt}, {messages} (up to the last assistant turn), or the distinct prompts of pairs.

    Raises RLHFError D01-D06, D08, D10, D12, D14 with file and line.
    """
    file = DataFile(path, columns or {}, PROMPT_FORMS, where)
    found = _distinct_prompts(file)
    encoded = _encode(file, tokenizer, [(line, prompt, None) for line, prompt in found])
    prompts = []
    for (line, text), (ids, _) in zip(found, encoded, strict=True):
        _check_prompt(file, line, ids)
        if _fits(file, line, len(ids), max_length, on_long):
            prompts.append(Prompt(ids, text, line))
    _finish(file, len(prompts), max_length)
    return prompts


def _pairs(file: DataFile, on_identical: str) -> list[texts.Pair]:
    pairs: list[texts.Pair] = []
    for line, form, row in file.rows():
        try:
            pair = texts.pair(line, form, row)
            if pairs and (pair.margin is None) != (pairs[0].margin is None):
                raise BadRow("D12", f'"margin" stands in some rows only; compare line {pairs[0].line}')
            pairs.append(pair)
        except BadRow as bad:
            if bad.code == "D07" and on_identical == "drop":
                file.drop(line, texts.IDENTICAL)
            else:
                file.note(line, bad)
    return pairs


def _distinct_prompts(file: DataFile) -> list[tuple[int, str | Conversation]]:
    found: list[tuple[int, str | Conversation]] = []
    seen: set[str] = set()
    for line, form, row in file.rows():
        try:
            prompt = texts.pair(line, form, row).prompt if "chosen" in form else texts.bare_prompt(form, row)
        except BadRow as bad:
            if bad.code != "D07":  # the reward stage judges the answers; here only the prompt counts
                file.note(line, bad)
            continue
        if "chosen" not in form or repr(prompt) not in seen:
            seen.add(repr(prompt))
            found.append((line, prompt))
    return found


def _encode(
    file: DataFile, tokenizer: Any, rows: list[tuple[int, str | Conversation, str | None]]
) -> list[tuple[list[int], list[int]]]:
    """Tokens of all rows at once; where the chat template refuses one, row by row to find which."""
    if file.problems:
        file.finish(usable=0)
    try:
        return encode_many(tokenizer, [prompt for _, prompt, _ in rows], [text for _, _, text in rows])
    except RLHFError:
        for line, prompt, text in rows:
            try:
                encode_many(tokenizer, [prompt], [text])
            except RLHFError as error:
                problem = error.problems[0]
                file.note(line, BadRow(problem.code, problem.text, problem.hint))
                if problem.code != "D06":  # the template's own fault, the same in every row
                    break
        file.finish(usable=0)
        raise


def _check_prompt(file: DataFile, line: int, ids: list[int]) -> None:
    if not ids:
        file.note(line, BadRow("D08", "the tokenizer leaves nothing of the prompt"))


def _check_response(file: DataFile, line: int, column: str, ids: list[int]) -> None:
    if len(ids) <= 1:
        file.note(line, BadRow("D09", f'nothing is left of "{column}" but the stop token'))


def _fits(file: DataFile, line: int, length: int, max_length: int | None, on_long: str) -> bool:
    if max_length is None or length <= max_length:
        return True
    if on_long == "drop":
        file.drop(line, f"longer than {max_length} tokens")
    else:
        hint = "set data.on_long: drop, or raise the token limit"
        file.note(line, BadRow("D10", f"{length} tokens, at most {max_length} are allowed", hint))
    return False


def _finish(file: DataFile, usable: int, max_length: int | None) -> None:
    file.finish(usable)
    file.warn_dropped("D10", f"longer than {max_length} tokens", "raise the token limit, or shorten the rows")
    file.warn_dropped("D07", texts.IDENTICAL, "take the rows out of the file")
