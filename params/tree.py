"""Typed trees: frozen dataclasses that PyTorch sees as pytrees.

Everything a model takes or returns is such a tree: parameters, state, batch, output. `@tree` makes a class one;
a field declared with `static()` is a fact (a size, a name) and never a leaf; a field declared with `off_tree()`
travels with the tree but takes no part in its structure, so two states with different host bookkeeping still map
together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, Union

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from typing_extensions import dataclass_transform

from params.spec import TensorSpec

try:
    import optree
    from optree.registry import __GLOBAL_NAMESPACE as _EVERYWHERE
except ImportError:
    optree = None

T = TypeVar("T")


def static(**kwargs: Any) -> Any:
    """A dataclass field that belongs to the tree's structure: hashable, compared, never a leaf."""
    return dataclasses.field(metadata={"tree": "static"}, **kwargs)


def off_tree(**kwargs: Any) -> Any:
    """A dataclass field that rides along: `tree_map` keeps it, and it equals any other when structures are compared."""
    return dataclasses.field(metadata={"tree": "off"}, **kwargs)


class _Rider:
    """Carries off-tree values through a pytree context, equal to any other rider."""

    __slots__ = ("values",)

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rider)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "off_tree"


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(static, off_tree, dataclasses.field))
def tree(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass and a registered pytree.

    A field whose annotation names a tensor takes a `TensorSpec` too: so are trees made of which there are no values
    yet. Unflattening does not run the constructor, so a tree may hold anything while it is being mapped. `==` compares
    structure and leaves; `repr` shows shapes and bytes, never contents.

    A class with fields may be given more of them by a subclass only if it says `by_kind`: whoever reads one of these
    asks which it is. Anyone else would take the subclass and not read what it adds, so that is a `TypeError`.

    A class whose off-tree fields belong to certain leaves has a method `mapped`: of a node that mapping or `put` made,
    with fields carried along, it gives the one to use.
    """
    cls.__eq__ = equal
    cls.__hash__ = None  # type: ignore[assignment]
    if "__repr__" not in vars(cls):
        cls.__repr__ = summary  # type: ignore[method-assign]
    cls = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    _check_extended(cls)
    _accept_specs(cls)
    kinds: dict[str, list[str]] = {"leaf": [], "static": [], "off": []}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        kinds[field.metadata.get("tree", "leaf")].append(field.name)
    mapped = getattr(cls, "mapped", None)
    children, facts, riders = (tuple(kinds[kind]) for kind in ("leaf", "static", "off"))

    def flatten(node: Any) -> tuple[list[Any], Any]:
        # PyTorch takes None for a leaf; here an absent child is part of the structure.
        present = tuple(name for name in children if getattr(node, name) is not None)
        rider = (_Rider(tuple(getattr(node, name) for name in riders)),) if riders else ()
        values = tuple(getattr(node, name) for name in facts)
        return [getattr(node, name) for name in present], (present, values, *rider)

    def flatten_with_keys(node: Any) -> tuple[list[Any], Any]:
        leaves, context = flatten(node)
        return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(context[0], leaves, strict=True)], context

    def unflatten(leaves: Any, context: Any) -> T:
        present, values, *rider = context
        carried = rider[0].values if rider else ()
        absent = dict.fromkeys(children)
        given = zip((*present, *facts, *riders), (*leaves, *values, *carried), strict=True)
        made = unchecked(cls, **absent | dict(given))
        return made if mapped is None else mapped(made)

    def dumped(context: Any) -> Any:
        """The context as JSON, for `torch.export.save`."""
        present, values, *rider = context
        named = [(facts, values), *((riders, one.values) for one in rider)]
        return [list(present), *([_dumped(cls, *field) for field in zip(*each, strict=True)] for each in named)]

    def undumped(dump: Any) -> Any:
        present, values, *carried = (_undumped(part) for part in dump)
        return (present, values, *(_Rider(values) for values in carried))

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=dumped,
        from_dumpable_context=undumped,
        flatten_with_keys_fn=flatten_with_keys,
    )
    # A tree is plain data: it may be unpickled without trust, which `torch.load` and `torch.export.load` ask for.
    torch.serialization.add_safe_globals([cls])
    if optree is not None:
        register: Any = optree.register_pytree_node  # any class will do, whatever its annotation says
        register(cls, flatten, lambda context, leaves: unflatten(leaves, context), namespace=_EVERYWHERE)
    return cls


def _accept_specs(cls: Any) -> None:
    """Let type checks of the constructor take a `TensorSpec` for a tensor."""
    for name, kind in cls.__init__.__annotations__.items():
        if "Tensor" in str(kind):
            cls.__init__.__annotations__[name] = Union[kind, TensorSpec]  # noqa: UP007 (a string on the left)


def _check_extended(cls: type) -> None:
    bases: list[Any] = [base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]
    for base in bases:
        known = {field.name for field in dataclasses.fields(base)}
        added = [field.name for field in dataclasses.fields(cls) if field.name not in known]
        if added and not getattr(base, "by_kind", False):
            raise TypeError(
                f"{cls.__name__}: what reads a {base.__name__} would not read {', '.join(added)}; make it a tree of "
                f"its own, with a {base.__name__} among its fields, and a function that reads it"
            )


def exactly(node: Any, kind: type[T]) -> T:
    """`node`, which must be a `kind` and nothing more special: for whoever reads the fields of a `kind` alone.

    Raises `TypeError` for another node, a subclass among them: its further fields, or what it means, would go unread.
    """
    if type(node) is not kind:
        raise TypeError(
            f"{_with_fields(type(node))} stands where {_with_fields(kind)} is read, and no more than that; put "
            f"a {kind.__name__} in its place"
        )
    return node


def _with_fields(kind: type) -> str:
    names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    return f"a {kind.__name__}" + (f" ({', '.join(names)})" if names else "")


def _dumped(cls: type, name: str, value: Any) -> Any:
    """A fact in JSON: tuples as lists, and a dtype as an object with its name."""
    if isinstance(value, tuple):
        return [_dumped(cls, name, one) for one in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"{cls.__name__}.{name} is a {type(value).__name__}, which a saved program cannot hold; export a function that "
        f"takes no {cls.__name__}"
    )


def _undumped(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_undumped(one) for one in value)
    return getattr(torch, value["dtype"]) if isinstance(value, dict) else value


def unchecked(cls: type[T], **fields: Any) -> T:
    """A node whose constructor is not run, and so no type check either.

    For what maps trees or stands in for one: a node may then hold anything, such as text.
    """
    node = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(node, name, value)
    return node


def tree_map(function: Callable[..., Any], first: T, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> T:
    """Apply `function` to corresponding leaves of trees with one structure."""
    return pytree.tree_map(function, first, *rest, is_leaf=is_leaf)


def leaves(value: Any) -> list[Any]:
    """The leaves of a tree, in the order of its fields."""
    return pytree.tree_leaves(value)


def items(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[tuple[str, Any]]:
    """Pairs of readable path (`layers.3.attn.qkv.weight`) and leaf."""
    for path, leaf in pytree.tree_flatten_with_path(value, is_leaf=is_leaf)[0]:
        yield dotted(path), leaf


def dotted(path: tuple[Any, ...]) -> str:
    """A pytree key path as dotted words."""
    return ".".join(str(getattr(key, "name", getattr(key, "idx", getattr(key, "key", key)))) for key in path)


def at(value: Any, path: str) -> Any:
    """The node or leaf at a dotted path; `KeyError` names the first word that does not fit."""
    node = value
    for word in path.split("."):
        try:
            if isinstance(node, (tuple, list)):
                node = node[int(word)]
            else:
                node = node[word] if isinstance(node, dict) else getattr(node, word)
        except (AttributeError, IndexError, KeyError, ValueError):
            raise KeyError(_absent(node, word, path)) from None
    return node


def _absent(node: Any, word: str, path: str) -> str:
    """What to say of a word of a path that names no part of `node`."""
    if isinstance(node, (tuple, list)):
        has = f"has {len(node)} items" + (f", 0..{len(node) - 1}" if node else "")
    else:
        names = list(node) if isinstance(node, dict) else _fields(node)
        has = (
            f"has {', '.join(str(name) for name in names[:12])}{', ...' if len(names) > 12 else ''}"
            if names
            else "has no parts"
        )
    return f"no {word!r:.100} in {path!r:.100}: {type(node).__name__} {has}"


def _fields(node: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(node)] if dataclasses.is_dataclass(node) else []


def put(value: T, path: str, new: Any) -> T:
    """The tree with the node or leaf at `path` replaced; everything else is shared with the old tree.

    `KeyError` names the first word that does not fit.
    """
    at(value, path)
    return _put(value, path.split("."), new, path)


def _put(value: Any, words: list[str], new: Any, path: str) -> Any:
    word, *rest = words
    inner = _put(at(value, word), rest, new, path) if rest else new
    if isinstance(value, (tuple, list)):
        items = list(value)
        items[int(word)] = inner
        return type(value)(items)
    if isinstance(value, dict):
        return {**value, word: inner}
    fields = {name: getattr(value, name) for name in _fields(value)}
    if word not in fields:
        raise KeyError(_absent(value, word, path))
    made = unchecked(type(value), **(fields | {word: inner}))
    return made.mapped() if hasattr(made, "mapped") else made


def to(value: T, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> T:
    """Move every tensor to `device`, and floating-point ones to `dtype`.

    A node whose class says `exact` keeps its dtypes: its tensors are the encoding of a value.
    """

    def move(leaf: Any) -> Any:
        if getattr(leaf, "exact", False):
            return tree_map(lambda inner: inner.to(device), leaf)
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device=device, dtype=dtype if leaf.is_floating_point() else None)

    return tree_map(move, value, is_leaf=lambda node: getattr(node, "exact", False))


def num_bytes(value: Any) -> int:
    """Bytes of all tensors in a tree, each storage counted once."""
    seen: dict[int, int] = {}
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            seen[id(leaf)] = leaf.numel() * leaf.element_size()
    return sum(seen.values())


def equal(first: Any, second: object) -> bool:
    """Same type, same structure, same leaf values (NaN equals NaN)."""
    if type(first) is not type(second):
        return NotImplemented
    one, structure = pytree.tree_flatten(first)
    two, other = pytree.tree_flatten(second)
    return structure == other and all(_same(a, b) for a, b in zip(one, two, strict=True))


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        # Floats of eight bits have no comparison of their own.
        a, b = (x.float() if x.is_floating_point() and x.element_size() == 1 else x for x in (a, b))
        return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b


_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16", torch.int8: "i8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


def describe(leaf: Any) -> str:
    """`bf16[2,16]` for a tensor or a spec, `repr` for anything else."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        kind = _SHORT.get(leaf.dtype, str(leaf.dtype).removeprefix("torch."))
        return f"{kind}[{','.join(str(size) for size in leaf.shape)}]"
    return repr(leaf)


def size(count: int | float) -> str:
    """Bytes for people: `7.4 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def summary(node: Any) -> str:
    """One line: the class, its static facts, its tensors' shapes (or their count), and the bytes of all of them."""
    facts = [
        f"{field.name}={getattr(node, field.name)!r}"
        for field in dataclasses.fields(node)
        if field.metadata.get("tree") == "static"
    ]
    found = list(items(node))
    shown = [f"{path}={describe(leaf)}" for path, leaf in found] if len(found) <= 8 else [f"{len(found)} leaves"]
    return f"{type(node).__name__}({', '.join(facts + shown)}, {size(num_bytes(node))})"
