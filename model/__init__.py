"""The trunk and everything that belongs to a model: weights, tokenizer, chat template."""
