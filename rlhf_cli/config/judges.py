"""Sections of judges that are neither a model nor a function: a language model behind an OpenAI-compatible endpoint."""

from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from rlhf_cli.config.machinery.section import Section, invalid

RUBRIC_FIELDS = ("{prompt}", "{first}", "{second}")
OWN_PARAMETERS = ("model", "messages", "response_format", "stream", "n")


class OpenAIJudge(Section):
    """A language model that compares two answers, asked over an OpenAI-compatible endpoint."""

    # Keys that say how it is asked, and not what it answers.
    OF_TRANSPORT: ClassVar = ("url", "key_env", "concurrency", "max_calls", "timeout", "max_wait", "probe")

    url: str
    model: str = Field(min_length=1)
    rubric: str | None = None
    key_env: str | None = Field("OPENAI_API_KEY", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    concurrency: int = Field(8, gt=0)
    max_calls: int = Field(2000, gt=0)
    timeout: float = Field(60.0, gt=0)
    max_wait: float = Field(300.0, ge=0)
    parameters: dict[str, Any] = Field(default_factory=dict)
    probe: bool = True

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        hint = "e.g. http://localhost:8000/v1, the address before /chat/completions"
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_address = False
        if not is_address or parts.path.rstrip("/").endswith("/completions"):
            raise invalid("not the base address of an OpenAI-compatible endpoint", hint)
        return url

    @field_validator("rubric")
    @classmethod
    def _check_rubric(cls, rubric: str | None) -> str | None:
        missing = [field for field in RUBRIC_FIELDS if rubric is not None and field not in rubric]
        if missing:
            text = f"lacks {', '.join(missing)}: the judge would not see what it compares"
            raise invalid(text, "write {prompt}, {first} and {second} where the texts belong")
        return rubric

    @field_validator("parameters")
    @classmethod
    def _check_parameters(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        for name in OWN_PARAMETERS:
            if name in parameters:
                raise invalid(f"`{name}` is set by the judge itself", "remove it")
        return parameters
