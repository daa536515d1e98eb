"""All stable codes of errors and warnings; `rlhf explain CODE` prints them."""

from rlhf_cli.error_codes.code import Code
from rlhf_cli.error_codes.config import CONFIG
from rlhf_cli.error_codes.data import DATA
from rlhf_cli.error_codes.machine import MACHINE_AND_RUN
from rlhf_cli.error_codes.models import TOKENS_AND_MODELS

CODES: dict[str, Code] = {**CONFIG, **DATA, **TOKENS_AND_MODELS, **MACHINE_AND_RUN}
