"""What `lowering` raises."""


class LoweringError(RuntimeError):
    """An op call that no allowed kernel takes, or a kernel, target or policy that does not exist."""
