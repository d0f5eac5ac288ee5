"""Language models as pure functions: `forward(params, state, batch) -> (output, state)`."""

from params.errors import CheckpointError, ConfigError

from .batch import Batch
from .errors import OutOfPages, StaleStateError, StateError
from .model import Model, build
from .output import Output
from .state import State, commit, fork, logical, release, select

__all__ = [
    "Batch", "CheckpointError", "ConfigError", "Model", "OutOfPages", "Output", "StaleStateError", "State",
    "StateError", "build", "commit", "fork", "logical", "release", "select",
]  # fmt: skip
