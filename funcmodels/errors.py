"""What `funcmodels` raises."""


class StateError(RuntimeError):
    """A state used in a way its kind forbids: pending, released, donated, or with rows that do not match."""


class StaleStateError(StateError):
    """A held state whose tail another continuation has overwritten."""


class OutOfPages(MemoryError):
    """The page pool of a state has no room for the tokens asked for."""
