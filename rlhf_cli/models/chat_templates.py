"""Defaults of a chat template's variables, written into the template, so that every later use of the model has them."""

import json
import re
from collections.abc import Mapping
from datetime import date
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.data.tokens import GENERATION_PROMPT, fitting_variables
from rlhf_cli.errors import RLHFError

# A template that writes today's date gets this one, Llama 3.1's own default, so that all stages have equal prompts.
DEFAULT_DATE = "2024-07-26"
DATE_CALL = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
# Ends the line of defaults. Its newline keeps trim_blocks from removing one of the template.
MARK = "{# data.chat_template_kwargs #}"
# The template itself writes no generation prompt any more; after END_MARK stands the one that takes its place.
WITHOUT_PROMPT = (
    "{% set prompts_answer = add_generation_prompt is defined and add_generation_prompt %}"
    "{% set add_generation_prompt = false %}"
)
END_MARK = "{#+ data.chat_template_kwargs: generation_prompt #}"


def set_template_variables(tokenizer: Any, variables: Mapping[str, Any] | None, *, where: str) -> None:
    """Write the variables' values into the chat template as defaults, in place of those that were written before.

    `date` is what the template's `strftime_now` returns. Without it a template that calls `strftime_now` gets
    DEFAULT_DATE, with warning T07. `generation_prompt` takes the place of what the template writes before an answer.
    Raises RLHFError C17 at `where` if the template does not use a variable.
    """
    template = tokenizer.chat_template
    given = dict(variables or {})
    if not isinstance(template, str):
        if given:
            text = "data.chat_template_kwargs is set, but the tokenizer has no chat template"
            raise RLHFError("C17", text, where=where, hint="remove it, or set model.chat_template")
        return

    defaults, _, rest = template.partition("\n")
    if defaults.endswith(MARK):
        if not given:
            return
        template, _, prompt_before = rest.partition(END_MARK)
        template += _last_newline(prompt_before)

    formats = {match[2] for match in DATE_CALL.finditer(template)}
    for name in given:
        if not _has_variable(template, name):
            text = f"data.chat_template_kwargs: the chat template has no variable `{name}`"
            raise RLHFError("C17", text, where=where, hint="remove it: it would have no effect")

    day = given.pop("date", None)
    prompt = given.pop(GENERATION_PROMPT, None)
    lines = []  # Jinja that sets each variable, unless who renders the template passes it
    for name, value in given.items():
        lines.append(f"{{% if {name} is not defined %}}{{% set {name} = {json.dumps(value)} %}}{{% endif %}}")
    if formats:
        if day is None and "date_string" not in given:
            text = f"the chat template writes today's date: {DEFAULT_DATE} stands there in all stages"
            terminal.warn("T07", text, where=where, hint="set data.chat_template_kwargs: {date: ...} to another one")
        # a Jinja macro that takes the place of transformers' function of the same name
        written_day = date.fromisoformat(day or DEFAULT_DATE)
        texts = {each: written_day.strftime(each) for each in sorted(formats)}
        lines.append(f"{{% macro strftime_now(format) %}}{{{{ {json.dumps(texts)}[format] }}}}{{% endmacro %}}")
    if prompt is not None:
        lines.append(WITHOUT_PROMPT)
        written = f"{{% if prompts_answer %}}{{{{ {json.dumps(prompt, ensure_ascii=False)} }}}}{{% endif %}}"
        template = template.removesuffix("\n") + END_MARK + written + _last_newline(template)
    if lines:
        tokenizer.chat_template = "".join((*lines, MARK, "\n", template))


def _last_newline(template: str) -> str:
    """Return the newline at the end of a template, which Jinja does not write, or ""."""
    return "\n" if template.endswith("\n") else ""


def _has_variable(template: str, name: str) -> bool:
    if name == "date":
        return bool(DATE_CALL.search(template))
    return name == GENERATION_PROMPT or bool(re.search(rf"\b{re.escape(name)}\b", template))


def variables_for_answers(tokenizer: Any, *, thoughts: bool = False) -> dict[str, Any]:
    """Return the variables to set for training on answers: a date that stays, and no thoughts unless they have them.

    With `thoughts` the answers bring their own, and the generation prompt must not close one.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str) or template.partition("\n")[0].endswith(MARK):
        return {}
    closing = {}
    if "enable_thinking" in template and not thoughts:
        closing["enable_thinking"] = False
    variables = fitting_variables(tokenizer, thoughts=thoughts, first=closing) or {}
    if GENERATION_PROMPT in variables and "add_generation_prompt" not in template:  # answers begin with what opens them
        variables = {}
    if DATE_CALL.search(template):
        variables = {**variables, "date": DEFAULT_DATE}
    return variables
