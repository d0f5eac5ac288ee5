"""Everything that `funcmodels` offers, loaded when the first of its names is used."""

from params.errors import CheckpointError, ConfigError

from .checkpoint.calibration import input_ranges
from .checkpoint.loading import load
from .checkpoint.parallel import ranks_of
from .checkpoint.saving import save
from .drafts.named import draft, load_draft
from .drafts.protocol import (
    Carry,
    Draft,
    Proposal,
    Verdict,
    next_tokens,
    verify,
)
from .drafts.round import Round
from .errors import OutOfPages, StaleStateError, StateError
from .model import Model, build
from .output import Output
from .sampling.draws import CoupledNoise, DraftNoise, law, noise, sample
from .sampling.penalties import TokenCounts
from .sampling.settings import RowSampling, Sampling
from .serving.engine import Engine, generate, serve
from .serving.requests import Event, Request, Result, requests_of
from .state.batch import Batch, check
from .state.rows import fork, fork_into, release, select
from .state.state import State, commit, logical, read_lengths
from .testing.shape_checks import disable_shape_checks, enable_shape_checks, shape_checked

__all__ = [
    "Batch", "Carry", "CheckpointError", "ConfigError", "CoupledNoise", "Draft", "DraftNoise", "Engine", "Event",
    "Model", "OutOfPages", "Output", "Proposal", "Request", "Result", "Round", "RowSampling", "Sampling",
    "StaleStateError", "State", "StateError", "TokenCounts", "Verdict", "build", "check", "commit",
    "disable_shape_checks", "draft", "enable_shape_checks", "fork", "fork_into", "generate", "input_ranges", "law",
    "load", "load_draft", "logical", "next_tokens", "noise", "ranks_of", "read_lengths", "release", "requests_of",
    "sample", "save", "select", "serve", "shape_checked", "verify",
]  # fmt: skip
