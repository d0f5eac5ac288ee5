"""What `lowering` raises."""


class LoweringError(RuntimeError):
    """An op call that no allowed kernel takes, or a kernel, target or policy that does not exist."""


class CaptureError(RuntimeError):
    """A function that cannot be captured, or captured code that was called in a way it cannot serve."""


class RecaptureWarning(UserWarning):
    """A call that could have replayed was captured again, or not at all. Given once for each reason."""


class CollectiveError(ConnectionError):
    """A rank of a process group that did not take part in a collective."""
