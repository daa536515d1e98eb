"""Variables of a chat template: defaults, fixed values, and those without effect."""

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rlhf_cli.errors import RLHFError
from rlhf_cli.models import chat_templates

# As Qwen3's and Llama 3.2's, in short.
THINKING = (
    "\nBelow.{%- for m in messages %}<{{ m.role }}>{{ m.content }}<end>{%- endfor %}"
    "{%- if add_generation_prompt %}<assistant>"
    "{%- if enable_thinking is defined and enable_thinking is false %}<no thoughts>{%- endif %}{%- endif %}"
)
DATE = (
    "{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
    '{{ date_string }} {{ strftime_now("%Y") }}{% macro ask(m) %}{{ date_string }}{{ m.content }}{% endmacro %}'
    "{%- for m in messages %}{{ ask(m) }}{%- endfor %}"
)
TURNS = [{"role": "user", "content": "hi"}]


def tokenizer(template):
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0})), chat_template=template)


def rendered(template, variables, **passed):
    made = tokenizer(template)
    chat_templates.set_template_variables(made, variables, where="here")
    once = made.chat_template
    chat_templates.set_template_variables(made, variables, where="here")
    assert made.chat_template == once, "set twice is set once"
    return made.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True, **passed)


def test_values_are_defaults_of_the_template():
    plain = tokenizer(THINKING).apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert rendered(THINKING, None) == plain and plain.startswith("\n")
    assert rendered(THINKING, {"enable_thinking": True}) == plain
    assert rendered(THINKING, {"enable_thinking": False}) == f"{plain}<no thoughts>"
    assert rendered(THINKING, {"enable_thinking": False}, enable_thinking=True) == plain


@pytest.mark.parametrize("value", [True, 3, 0.5, 'it\'s "so"\n{{ x }} é'])
def test_values_arrive_as_they_are(value):
    assert rendered("{{ name }}|{{ messages[0].content }}", {"name": value}) == f"{value}|hi"


def test_a_date_is_fixed(capsys):
    assert rendered(DATE, None) == "26 Jul 2024 202426 Jul 2024hi"
    assert "T07" in capsys.readouterr().err
    assert rendered(DATE, {"date": "2025-01-31"}) == "31 Jan 2025 202531 Jan 2025hi"
    assert "T07" not in capsys.readouterr().err
    assert rendered(DATE, {"date": "2025-01-31", "date_string": "never"}) == "never 2025neverhi"


@pytest.mark.parametrize("end", ["", "\n", " \n\n", "\n  "])
def test_a_generation_prompt_takes_the_place_of_the_templates(end):
    written, plain = '<say "it">\n{{ x }} \uff5c', tokenizer(THINKING + end)
    whole = plain.apply_chat_template(TURNS, tokenize=False)
    made = tokenizer(THINKING + end)
    for variables in ({"generation_prompt": "other"}, {"generation_prompt": written, "enable_thinking": False}):
        chat_templates.set_template_variables(made, variables, where="here")
    assert made.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True) == whole + written
    assert made.apply_chat_template(TURNS, tokenize=False) == whole
    chat_templates.set_template_variables(made, {"enable_thinking": False}, where="here")
    without_thoughts = plain.apply_chat_template(
        TURNS, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert made.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True) == without_thoughts


@pytest.mark.parametrize("template,variables", [(THINKING, {"enable_thinkng": 1}), (THINKING, {"date": "2025-01-31"}),
                                                (None, {"enable_thinking": False})])  # fmt: skip
def test_a_variable_without_effect_is_refused(template, variables):
    with pytest.raises(RLHFError, match="chat_template_kwargs") as error:
        chat_templates.set_template_variables(tokenizer(template), variables, where="x.yaml:3")
    assert error.value.problems[0].code == "C17" and error.value.problems[0].where == "x.yaml:3"
