"""The Ascend kernels, through CPU references of the operators they call."""
