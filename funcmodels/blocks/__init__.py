"""Blocks that model families share: parameter nodes, their specs, and the functions over them."""
