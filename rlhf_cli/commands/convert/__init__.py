"""`rlhf convert FILE DIR`: write a ppo.yaml from TRL PPO settings. FILE is parsed, never executed; no torch."""
