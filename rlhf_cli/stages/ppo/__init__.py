"""`rlhf ppo`."""
