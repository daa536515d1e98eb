"""Chat templates that do not end, or fail: found before this process renders them."""

from pathlib import Path

import pytest
from bad_inputs import check

from rlhf_cli import jsonl
from rlhf_cli.data import tokens
from tests.security.test_hostile_models import LOOPS, TOO_LARGE, TOO_LONG, TURNS

GROW = "{%% set n = namespace(x=%s, y=%s) %%}{%% for a in range(99999) %%}%s{%% endfor %%}"


TOO_DEEP = "the chat template calls itself without end, or is nested too deeply"


@pytest.mark.full
@pytest.mark.parametrize(
    ("template", "code", "says"),
    [
        (LOOPS, "M01", TOO_LONG),
        (GROW % (7, 0, "{% set n.x = n.x * 7 + n.x %}"), "M01", TOO_LONG),
        # Python handles no signal while it compares nested lists.
        (
            GROW.replace("99999", "60") % ("[1]", "[1]", "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}")
            + "{{ n.x == n.y }}",
            "M01",
            TOO_LONG,
        ),
        (LOOPS + "{% generation %}x{% endgeneration %}{{ messages | tojson(ensure_ascii=False) }}", "M01", TOO_LONG),
        ("{{ 'x' * 10**11 }}", "M01", TOO_LARGE),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "M01", TOO_DEEP),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "M01", TOO_DEEP),
        ("{{ messages | length // 0 }}", "D06", "rejects the conversation: integer division or modulo by zero"),
    ],
    ids=["loops", "number", "comparison", "generation", "text", "macro", "brackets", "raises"],
)
def test_a_chat_template_that_does_not_end_or_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, template: str, code: str, says: str
) -> None:
    """The first conversation is an error, with any data.on_bad."""
    monkeypatch.setattr(tokens, "RENDER_TIMEOUT", 0.3)
    jsonl.write_jsonl(folder / "rows.jsonl", [{"messages": TURNS}] * 8)
    (folder / "model/chat_template.jinja").write_text(template)
    result = check("sft.yaml", "-s", "data.on_bad=drop")
    assert f"error[{code}]: " in result.stderr and says in result.stderr, result.stderr
    assert result.exit_code == 2 and result.stderr.count("error[") == 1, result.stderr
