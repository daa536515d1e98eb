"""One module a stage, each with `run(config, options)`. None imports another: what lies on disk is their contract."""

import rlhf_cli.models  # noqa: F401  (before trl and transformers are loaded: it keeps them quiet)
