"""`rlhf verify RUN`: repeat one PPO update with the trainer and with a naive reference, and compare them.

The update runs three times from a checkpoint: by the trainer as in the run, by the trainer in float64, and by
`reference`, plain loops in float64. The first must repeat the run's values, the last two must agree to 1e-6.
"""
