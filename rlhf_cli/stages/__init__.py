"""One module per stage, with `run(config, options)`. A stage never imports another one: it reads its folder."""

import rlhf_cli.models  # noqa: F401  (before trl and transformers are loaded: it keeps them quiet)
