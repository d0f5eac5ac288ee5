"""Parameter trees and the checkpoints they come from.

    headers = params.tensor_names(directory)                 # names, shapes, dtypes; no weights
    tree = params.load(directory, spec, names, dtype=torch.bfloat16)
    params.save(tree, directory, spec, names, config)        # transformers loads it; no tokenizer, no vision tower
    tree = params.init(spec, seed=0)
    small = params.quantize(tree, "W8A8_DYNAMIC")            # saved as ModelSlim writes it

`spec` is the parameter tree of a model with a `TensorSpec` at every leaf, `names` the table of its family
(`params.names.<family>.NAMES`). This package knows no model and no kernel.
"""

from params.checkpoint import from_checkpoint, load, to_checkpoint
from params.errors import CheckpointError, ConfigError
from params.files import StoredTensor, read_config, resolve, tensor_names
from params.init import init
from params.inspection import Inspection, inspect
from params.mapped import MappedRows
from params.quant.recipes import dequantize, quantize
from params.quant.schemes import quantized_spec
from params.saving import save
from params.sharded import shard, sharded
from params.sharding import Ranks
from params.single import load_projection
from params.spec import TensorSpec
from params.tree import (
    at,
    describe,
    equal,
    items,
    leaves,
    num_bytes,
    off_tree,
    put,
    static,
    summary,
    to,
    tree_map,
    unchecked,
)
from params.unread import Unread

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Inspection",
    "MappedRows",
    "Ranks",
    "StoredTensor",
    "TensorSpec",
    "Unread",
    "at",
    "dequantize",
    "describe",
    "equal",
    "from_checkpoint",
    "init",
    "inspect",
    "items",
    "leaves",
    "load",
    "load_projection",
    "num_bytes",
    "off_tree",
    "put",
    "quantize",
    "quantized_spec",
    "read_config",
    "resolve",
    "save",
    "shard",
    "sharded",
    "static",
    "summary",
    "tensor_names",
    "to",
    "to_checkpoint",
    "tree_map",
    "unchecked",
]
