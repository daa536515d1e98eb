"""Write the folder of a run: `rlhf init`."""
