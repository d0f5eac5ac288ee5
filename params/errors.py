"""What `params` raises."""


class CheckpointError(ValueError):
    """A checkpoint directory, file, name, shape or dtype that cannot be loaded or saved as asked."""


class ConfigError(ValueError):
    """A model configuration with a missing, unknown or contradictory field."""
