"""The CPU references of the npu operators against formulas in float64, and against every limit they document."""
