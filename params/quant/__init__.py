"""Quantised weights: their values, how float weights become them, and how a checkpoint describes its own.

| file | it holds |
|---|---|
| `values` | the types that stand in a parameter tree |
| `rounding` | float to int8, int4 and MXFP8, for weights and for activations |
"""
