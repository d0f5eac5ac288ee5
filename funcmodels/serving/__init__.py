"""Prompts in, results out: requests, the rows that they get in turn, and the programs that run them."""
