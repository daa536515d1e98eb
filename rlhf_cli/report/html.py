"""HTML pages of the report, rendered from templates."""

import base64
import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from rlhf_cli import __version__
from rlhf_cli.jsonl import is_number
from rlhf_cli.report.formats import number, percent, unbroken, visible

if TYPE_CHECKING:
    from jinja2 import Environment

# Identifies our own pages: no other file is ever replaced.
GENERATOR_TAG = Markup('<meta name="generator" content="rlhf report">')
WORDS = {
    "good": "good",
    "early": "too early to tell",
    "stale": "out of date",
    "look": "worth a look",
    "bad": "bad",
    "open": "incomplete",
}


def render_template(template: str, **values: Any) -> str:
    """Render a page. Every printed value is escaped and made visible, except our own script, style and figures."""
    environment = _environment()
    assert environment.loader is not None
    script, style = (environment.loader.get_source(environment, name)[0] for name in ("page.js", "style.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        generator=GENERATOR_TAG,
        version=__version__,
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        style=Markup(style),
        **values,
    )


def with_reload(page: str, seconds: float) -> str:
    """Return a page that the browser reloads every `seconds`."""
    return page.replace(GENERATOR_TAG, f'{GENERATOR_TAG}\n<meta http-equiv="refresh" content="{seconds:g}">', 1)


@cache
def _environment() -> "Environment":
    """Return the environment of all templates: compiling one takes longer than rendering it."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rlhf_cli.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if value is None or hasattr(value, "__html__") else visible(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["unbroken"] = unbroken
    environment.globals.update(number=number, percent=percent, is_number=is_number, words=WORDS)
    return environment
