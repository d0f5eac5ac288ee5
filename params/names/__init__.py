"""Checkpoint spellings: the rule types, and one table of strings a model family."""
