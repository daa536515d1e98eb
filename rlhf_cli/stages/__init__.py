"""One module a stage, each with `run(config, options)`. None imports another: they share only files."""

import rlhf_cli.models  # noqa: F401  (before trl and transformers are loaded: it keeps them quiet)
