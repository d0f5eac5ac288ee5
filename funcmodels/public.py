"""Everything that `funcmodels` offers, loaded when the first of its names is used."""

from params.errors import CheckpointError, ConfigError

from .batch import Batch, check
from .calibration import input_ranges
from .drafts import draft
from .errors import OutOfPages, StaleStateError, StateError
from .generation import generate, requests_of, serve
from .loading import load
from .model import Model, build
from .output import Output
from .parallel import ranks_of
from .penalties import TokenCounts
from .requests import Event, Request, Result
from .round import Round
from .rows import fork, fork_into, release, select
from .sampling import CoupledNoise, DraftNoise, RowSampling, Sampling, sample
from .saving import save
from .shape_checks import disable_shape_checks, enable_shape_checks, shape_checked
from .speculative import Carry, Draft, Proposal, Verdict, next_tokens, verify
from .state import State, commit, logical, read_lengths

__all__ = [
    "Batch", "Carry", "CheckpointError", "ConfigError", "CoupledNoise", "Draft", "DraftNoise", "Event", "Model",
    "OutOfPages", "Output", "Proposal", "Request", "Result", "Round", "RowSampling", "Sampling", "StaleStateError",
    "State", "StateError", "TokenCounts", "Verdict", "build", "check", "commit", "disable_shape_checks", "draft",
    "enable_shape_checks", "fork", "fork_into", "generate", "input_ranges", "load", "logical", "next_tokens",
    "ranks_of", "read_lengths", "release", "requests_of", "sample", "save", "select", "serve", "shape_checked",
    "verify",
]  # fmt: skip
