"""How many processes a launcher was asked to start: this version runs in one."""

import os

from rlhf_cli.errors import RLHFError

ALONE = "start it without a launcher: this version trains in one process, on one GPU where there is one"


def refuse_several() -> None:
    """Raises RLHFError E04 where a launcher (torchrun, accelerate, srun) was asked for more than one process.

    Each of them would train the same and write the same files. `accelerate launch --cpu` leaves MASTER_ADDR alone,
    without WORLD_SIZE: it starts one process, whatever it was asked for.
    """
    asked = os.environ.get("WORLD_SIZE")
    if asked is None and "MASTER_ADDR" in os.environ:
        text = "MASTER_ADDR is set without WORLD_SIZE: a launcher was asked for several processes, and 1 came up"
        raise RLHFError("E04", text, where="MASTER_ADDR", hint=f"{ALONE}; or unset MASTER_ADDR")
    if asked is not None and asked.strip() != "1":
        text = f"{asked} processes were asked for, 1 is all that this version runs in"
        raise RLHFError("E04", text, where="WORLD_SIZE", hint=ALONE)
