"""`compile_for`: a Triton kernel through Ascend's compiler on any machine, for a named target.

Three programs follow each other: Triton's front end (a Python process of its own), triton-ascend's adapter, and
BiSheng, with the options that triton-ascend 3.2.0 gives them (compiler.py of its Ascend backend). The last step,
`hivmc`, which makes machine code, comes with CANN alone: a program that does nothing stands in for it.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..cache import cache_directory
from ..errors import LoweringError
from ..target import ASCEND, Target, named
from . import front_end
from .outcome import Compiled, Outcome, Overflow, Refused
from .packages import VERSIONS, Toolchain, fetched
from .program import buffer_bits, library_calls, planned_bits

ATTEMPTS = 3
"""How often a step that a signal has ended is begun: the adapter dies now and then, and goes through the next time."""
SECONDS, TIMED_OUT = 120, 124
"""After which a step has not ended: all kernels known to end do so in a quarter of that."""
TTIR, LINALG = "kernel.ttir", "kernel.linalg"
MAKERS = ("compile", "front_end", "outcome", "program")
OUTCOMES = {kind.__name__: kind for kind in (Compiled, Overflow, Refused)}


@dataclass(frozen=True)
class Chip:
    """What the compiler knows a target as: a name, and a program of the suffix. `wide` is the family from 950 on."""

    name: str
    suffix: str
    wide: bool

    @property
    def bisheng(self) -> list[str]:
        """Options that only one of the two programs knows."""
        if self.wide:
            return ["--enable-auto-bind-sub-block=false", "--enable-print-memory-allocated-size"]
        return ["--enable-auto-bind-sub-block=true", "--enable-hivm-compile=true"]


CHIPS = {
    "ascend910b": Chip("Ascend910B3", "", False),
    "ascend910_93": Chip("Ascend910_9392", "", False),
    "ascend950": Chip("Ascend950PR_9589", "-a5", True),
}
"""One machine of each target. Others of the same target differ in the number of cores alone, in what is used here."""


@dataclass(frozen=True)
class TritonSource:
    """A kernel by the file that it stands in and its name: what Triton compiles, without Triton to import it.

    The file imports Triton alone, so that its text is all that the kernel depends on.
    """

    path: Path
    name: str

    @classmethod
    def of(cls, kernel: TritonSource | Callable[..., Any]) -> TritonSource:
        """The source of a function, decorated by `triton.jit` or not; a source as it is."""
        if isinstance(kernel, TritonSource):
            return kernel
        function = getattr(kernel, "fn", kernel)
        return cls(Path(inspect.getfile(function)), function.__name__)

    def text(self) -> str:
        """The file. `LoweringError` where it imports more than Triton, or has no such function."""
        text = self.path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text)))
        found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        found |= {"." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)}
        foreign = sorted(name for name in found if name.partition(".")[0] not in ("triton", "__future__"))
        if foreign:
            raise LoweringError(
                f"{self.path.name} imports {', '.join(foreign)}; a file of kernels imports triton alone"
            )
        if self.name not in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}:
            raise LoweringError(f"{self.path.name} defines no function {self.name!r}")
        return text

    def ordered(self, signature: Mapping[str, str], constants: Mapping[str, Any]) -> dict[str, str]:
        """The signature in the order of the function's arguments. `LoweringError` where the two do not fit."""
        nodes = ast.walk(ast.parse(self.text()))
        function = next(node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == self.name)
        names = [argument.arg for argument in function.args.args]
        if sorted(names) != sorted([*signature, *constants]):
            raise LoweringError(f"{self.name} takes {', '.join(names)}; found {', '.join([*signature, *constants])}")
        return {name: signature[name] for name in names if name in signature}


def compile_for(
    kernel: TritonSource | Callable[..., Any],
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    target: str | Target,
    *,
    multi_buffer: bool | None = None,
) -> Outcome:
    """What Ascend's compiler makes of a kernel: a `Compiled` program, an `Overflow`, or a `Refused` kernel.

    `signature` gives Triton's type of each argument (`"*bf16"`, `"i32"`), `constants` the values of those that are
    `tl.constexpr`. `multi_buffer` asks for second buffers, so that transfers and work overlap; by default as
    triton-ascend does it, on 910 and not on 950. Nothing runs on a device, and Triton is not imported here.
    Outcomes are kept in the cache directory, by source, arguments and versions; threads may call at the same time.

    Raises `LoweringError` for a target that is no Ascend, for a source that is not self-contained, for arguments that
    it does not take, and where the compiler was not fetched (`python -m lowering fetch-ascend-compiler`).
    """
    asked = named(target).name
    if asked not in CHIPS:
        raise LoweringError(f"Ascend's compiler makes programs for {', '.join(ASCEND)}; target is {asked}")
    chip, source = CHIPS[asked], TritonSource.of(kernel)
    buffers = not chip.wide if multi_buffer is None else multi_buffer
    asking = Asking(source, source.ordered(signature, constants), dict(constants), chip, buffers)
    kept = cache_directory() / "compiled" / f"{asking.key()}.json"
    with contextlib.suppress(FileNotFoundError):
        found = json.loads(kept.read_text(encoding="utf-8"))
        return OUTCOMES[found.pop("kind")](**found)
    outcome = _compiled(fetched(), asking)
    if not isinstance(outcome, Refused) or outcome.sure:
        _keep(kept, outcome)
    return outcome


@dataclass(frozen=True)
class Asking:
    """What a kernel is compiled for."""

    source: TritonSource
    signature: dict[str, str]
    constants: dict[str, Any]
    chip: Chip
    multi_buffer: bool

    def key(self) -> str:
        """A hash of all that the outcome depends on, the text of the files that make it included."""
        files = (Path(__file__).with_name(f"{name}.py") for name in MAKERS)
        here = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
        given = [self.source.text(), self.source.name, self.signature, self.constants, self.multi_buffer]
        text = json.dumps([*given, self.chip.name, VERSIONS, here], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _keep(path: Path, outcome: Outcome) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump({"kind": type(outcome).__name__, **asdict(outcome)}, file)
    # Renaming last, so that no other process reads half of it.
    Path(file.name).rename(path)


def _compiled(tools: Toolchain, asking: Asking) -> Outcome:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ttir = _ttir(tools, asking, folder)
        linalg = _linalg(tools, asking.chip, ttir, folder) if isinstance(ttir, str) else ttir
        return _program(tools, asking, folder) if isinstance(linalg, str) else linalg


def _ttir(tools: Toolchain, asking: Asking, folder: Path) -> str | Refused:
    chip, source = asking.chip.name, asking.source
    question = {"signature": asking.signature, "constants": asking.constants, "chip": chip}
    question |= {"path": str(source.path.resolve()), "name": source.name, "triton": str(tools.triton)}
    done = _run([sys.executable, "-I", front_end.__file__], folder, json.dumps(question))
    if done.returncode:
        words = f"the front end ended with code {done.returncode}: {_last(done.stderr)}"
        return Refused(chip, words, None, 0 < done.returncode != TIMED_OUT)
    answer = json.loads(done.stdout)
    return answer["ttir"] if "ttir" in answer else Refused(chip, answer["reason"], answer["line"])


def _linalg(tools: Toolchain, chip: Chip, ttir: str, folder: Path) -> str | Refused:
    given, made = folder / TTIR, folder / LINALG
    given.write_text(ttir, encoding="utf-8")
    wide = f"compile-on-910-95={chip.wide}"
    command = [
        str(tools.adapter),
        str(given),
        f"--discrete-mask-access-conversion={wide} force-simt-template=False",
        "--triton-to-annotation",
        f"--triton-to-unstructure={wide} force-simt-template=False",
        "--triton-to-hivm",
        "--triton-to-hfusion",
        "--triton-to-llvm",
        "--bubble-up-operation",
        "--triton-to-linalg=global-kernel=false named-ops=True enable-nd2nz-on-vector=False "
        f"enable-select-analysis={chip.wide} {wide}",
        "--mlir-print-debuginfo",
        "-o",
        str(made),
    ]
    done = _run(command, folder)
    if done.returncode:
        return _refused(chip, "the adapter", done)
    return made.read_text(encoding="utf-8")


def _program(tools: Toolchain, asking: Asking, folder: Path) -> Outcome:
    chip, given, made = asking.chip, folder / "kernel.mlir", folder / "made"
    ttir, linalg = ((folder / name).read_text(encoding="utf-8") for name in (TTIR, LINALG))
    given.write_text(re.sub(r', mix_mode\s*=\s*"\w+"', "", linalg), encoding="utf-8")
    command = [
        str(tools.compiler(chip.suffix)),
        str(given),
        f"--target={chip.name}",
        "--enable-hfusion-compile=true",
        "--enable-triton-kernel-compile=true",
        f"--enable-auto-multi-buffer={str(asking.multi_buffer).lower()}",
        *chip.bisheng,
        f"--save-temps={made}",
        "-o",
        str(folder / "out"),
    ]
    done = _run(command, folder)
    said, program = done.stderr + done.stdout, made / "module.hivm.opt.mlir"
    overflow = re.findall(r"(\w+) overflow, requires (\d+) bits while (\d+) bits available", said)
    if overflow:
        space, needs, has = overflow[-1]
        return Overflow(chip.name, space, int(needs), int(has))
    if done.returncode or not program.exists():
        return _refused(chip, "the compiler", done)
    text = program.read_text(encoding="utf-8")
    told = re.findall(r"Allocated UB size = (\d+) bits", said)
    used, mix = int(told[-1]) if told else planned_bits(text), 'mix_mode = "mix"' in linalg
    figures = used, buffer_bits(text), library_calls(text), mix, asking.multi_buffer
    return Compiled(chip.name, *figures, list(asking.signature), ttir, linalg, text)


def _run(command: Sequence[str], folder: Path, sent: str = "") -> subprocess.CompletedProcess[str]:
    """One step, begun again where a signal ends it; one that does not end has the code of `timeout`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON", "MLIR"))}
    environment["PATH"] = os.pathsep.join([str(_stand_in(folder)), environment.get("PATH", os.defpath)])
    for _ in range(ATTEMPTS):
        try:
            done = subprocess.run(
                command,
                input=sent,
                env=environment,
                cwd=folder,
                timeout=SECONDS,
                capture_output=True,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, TIMED_OUT, "", f"error: has not ended after {SECONDS} s")
        if done.returncode >= 0:
            break
    return done


def _stand_in(folder: Path) -> Path:
    """A directory with programs called as those that make machine code; they do nothing."""
    made = folder / "bin"
    for name in ("hivmc", "hivmc-a5"):
        made.mkdir(exist_ok=True)
        (made / name).write_text("#!/bin/sh\n", encoding="utf-8")
        (made / name).chmod(0o755)
    return made


def _refused(chip: Chip, step: str, done: subprocess.CompletedProcess[str]) -> Refused:
    """Why a step ended: its first error with a line of the source where it gives one."""
    if done.returncode < 0:
        words = re.search(r"(?:LLVM ERROR: |Assertion )(.*)", done.stderr)
        ended = f"{step} was ended {ATTEMPTS} times by signal {-done.returncode}"
        return Refused(chip.name, ended if words is None else f"{ended}: {words[1]}", None, sure=False)
    found = re.search(r'(?:"[^"]*":(\d+):\d+\)?.*?)?\berror: (.*)', done.stderr + done.stdout)
    if found is None:
        return Refused(chip.name, f"{step} ended with code {done.returncode}: {_last(done.stderr)}", None)
    line = int(found[1]) if found[1] else None
    return Refused(chip.name, f"{step}: {found[2]}", line, done.returncode != TIMED_OUT)


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["without a word"])[-1]
