"""Quantised weights: their values, how float weights become them, and how a checkpoint describes its own.

| file | it holds |
|---|---|
| `values` | the types that stand in a parameter tree |
| `rounding` | float to int8, int4 and MXFP8, for weights and for activations |
| `description` | the file that names each tensor's scheme |
| `schemes` | which projections of a checkpoint are quantised, and how; what is refused |
| `stored` | the tensors that a quantised weight is in a checkpoint: spec and names made from the float model's |
| `recipes` | whole trees from float to quantised and back |
| `single` | one module of a checkpoint |
"""
