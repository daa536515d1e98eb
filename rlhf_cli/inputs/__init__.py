"""What each stage starts from: tokenizer, rows, models. A stage takes it, `rlhf check` looks whether it could."""
