"""Oracles: models of transformers with random weights, and their caches in the layout of our logical state."""
