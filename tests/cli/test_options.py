"""Heavy imports of a command: what is imported is frozen for the garbage collector."""

import pytest
from run_cli import python


@pytest.mark.full
def test_imported_objects_are_frozen_for_the_garbage_collector() -> None:
    script = (
        "import gc; from rlhf_cli.cli.options import heavy_imports; runs = []\n"
        "gc.callbacks.append(lambda phase, about: runs.append(phase)); runs.clear()\n"
        "with heavy_imports():\n    import torch\n"
        "assert runs == [] and gc.isenabled() and gc.get_freeze_count() > len(torch.__dict__)\n"
    )
    assert python("-c", script).stderr == ""
