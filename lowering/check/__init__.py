"""The device check: kernels beside their op's reference on the machine at hand."""
