"""A checkpoint's way in and out: its weights, its tokenizer, the ranks that share it."""
