"""What the stages share: start and end, models, rows, reward models, and training by TRL."""
