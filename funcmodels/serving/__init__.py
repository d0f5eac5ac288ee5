"""Prompts in, results out: an engine, the scheduler of its rows, and what runs them on the device."""
