"""What may import what, and what nobody may do: read from the source with `ast`, without running it.

Imports inside functions and under TYPE_CHECKING count too: they are dependencies all the same.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Import direction: a module imports from its own row and the rows before; docs/architecture.md lists the same. A
# name stands for the module and, where no longer name matches, for everything in it. A package's own __init__ belongs
# to the first row that names something in the package, because importing that runs the __init__ first.
RANKS: tuple[tuple[str, ...], ...] = (
    ("megavlm.errors", "megavlm.paths", "megavlm.files", "megavlm.json_files", "megavlm.program", "megavlm.world"),
    ("megavlm.resilience", "megavlm.storage"),
    ("megavlm.config",),
    ("megavlm.arch",),
    ("megavlm.rules",),
    ("megavlm.planner",),
    ("megavlm.backend",),
    ("megavlm.parallel",),
    ("megavlm.precision",),
    ("megavlm.inputs", "megavlm.extension"),
    ("megavlm.families",),
    ("megavlm.data",),
    ("megavlm.demo",),
    ("megavlm.objective",),
    ("megavlm.model",),
    ("megavlm.optim",),
    ("megavlm.pipeline",),
    ("megavlm.checkpoint", "megavlm.weights"),
    ("megavlm.html",),
    ("megavlm.metrics",),
    ("megavlm.train",),
    ("megavlm.inference",),
    ("megavlm.command_line",),
    ("megavlm.programs.history",),
    ("megavlm.programs.doctor", "megavlm.programs.preview", "megavlm.programs.model_options"),
    ("megavlm.programs.evaluation", "megavlm.programs.launch"),
    ("megavlm.programs.sweep",),
    ("megavlm.programs", "megavlm.__main__"),
    ("pretrain_vlm", "tools", "benchmarks"),
)
TORCH_FREE = tuple(name for row in RANKS[: RANKS.index(("megavlm.planner",)) + 1] for name in row)
# They may compute with torch, but neither communicate nor touch a GPU.
_COMPUTING = "data.sampler data.collate data.costs model.rotary model.vision_ops optim.matrix_plan optim.rules"
DEVICE_FREE = tuple(f"megavlm.{name}" for name in _COMPUTING.split())
# What computes a step follows plans, but makes no estimates.
WITHOUT_PLANNER = tuple(
    f"megavlm.{name}" for name in ("parallel", "precision", "data", "objective", "model", "optim", "pipeline")
)
PARALLEL_STATE = ("megatron.core.parallel_state", "megatron.core.mpu")
GROUPS = "megavlm.parallel.groups"  # the only module that touches megatron-core's parallel_state
BACKEND = "megavlm.backend"  # the only package that assigns into torch or megatron-core …
CPU_BACKEND = "megavlm.backend.cpu"  # … through this module, which a GPU run must not import
SETTINGS = "torch.backends."  # switches that torch documents: to set one is no patch
# Packages that only extras install (pyproject.toml).
OPTIONAL = (
    *("huggingface_hub", "transformers", "tokenizers", "pyarrow", "sklearn", "wandb", "mlflow"),
    *("google", "gcsfs", "s3fs", "transformer_engine"),
)
OF_A_MODULE = re.compile(r"megavlm(\.\w+)+(:\w+)?")  # "package.module:name" names what is in it
TORCH_BY_NAME = ("megavlm.arch.connectors",)  # declarations of extensions say so where their torch half is
REACHED = 219  # modules that train/loop.py reaches
IMPORTERS = ("import_module", "importlib.import_module", "__import__")
RUNS_CODE = ("pickle", "cloudpickle", "dill", "shelve", "marshal")  # reading these formats runs what they say


Finding = tuple[int, str]  # line, what is there


@dataclass(frozen=True)
class Import:
    line: int
    target: str  # a module, or a name in one: `from a import b` gives "a.b"
    local: str  # the name it is bound to, "" if none
    meaning: str  # what that name stands for: `import a.b` binds "a"
    deferred: bool  # inside a function


@dataclass(frozen=True)
class Module:
    name: str
    source: str
    is_package: bool = False

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.source)))

    @cached_property
    def imports(self) -> list[Import]:
        functions = [node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        deferred = {id(node) for function in functions for node in ast.walk(function)}
        found = []
        for node in self.nodes:
            late = id(node) in deferred
            match node:
                case ast.Import():
                    for alias in node.names:
                        first = alias.name.partition(".")[0]
                        local, meaning = (alias.asname, alias.name) if alias.asname else (first, first)
                        found.append(Import(node.lineno, alias.name, local, meaning, late))
                case ast.ImportFrom():
                    base = self._absolute(node)
                    for alias in node.names:
                        target = base if alias.name == "*" else f"{base}.{alias.name}"
                        found.append(Import(node.lineno, target, alias.asname or alias.name, target, late))
                case ast.Call(args=[ast.Constant(value=str(target)), *_]) if name_of(node.func) in IMPORTERS:
                    found.append(Import(node.lineno, target, "", target, late))
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        base = package[: len(package) - node.level + 1] if node.level else []
        return ".".join([*base, *([node.module] if node.module else [])])

    @cached_property
    def foreign(self) -> dict[str, str]:
        """Local names that stand for something of torch or megatron."""
        return {
            i.local: i.meaning for i in self.imports if i.local and i.meaning.split(".")[0] in ("torch", "megatron")
        }

    @cached_property
    def mentions(self) -> list[Finding]:
        """Where the module names something by an import or by an attribute of something imported."""
        attributes = [node for node in self.nodes if isinstance(node, ast.Attribute)]
        return [(i.line, i.target) for i in self.imports] + [(a.lineno, self.meaning(a)) for a in attributes]

    def meaning(self, node: ast.AST) -> str:
        """Full name of an expression that begins at such an import: `nn.x[0].y` → "torch.nn.x.y"; else ""."""
        match node:
            case ast.Name():
                return self.foreign.get(node.id, "")
            case ast.Attribute():
                base = self.meaning(node.value)
                return f"{base}.{node.attr}" if base else ""
            case ast.Subscript():
                return self.meaning(node.value)
        return ""


def name_of(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def rank_of(module: str) -> int | None:
    inside = [row for row, names in enumerate(RANKS) for name in names if within(name, module)]
    holding = [(len(name), row) for row, names in enumerate(RANKS) for name in names if within(module, name)]
    return min(inside) if inside else max(holding)[1] if holding else None


def import_direction(module: Module) -> Iterator[Finding]:
    own = rank_of(module.name)
    for i in module.imports:
        its = rank_of(i.target)
        if own is not None and its is not None and its > own:
            yield i.line, f"imports {i.target}, which comes later in RANKS"


def strings(module: Module) -> Iterator[Finding]:
    """Yield names of modules in strings, by which a module would depend on a later one without an import."""
    own = rank_of(module.name)
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and OF_A_MODULE.fullmatch(node.value):
            its = rank_of(node.value.partition(":")[0])
            if own is not None and its is not None and its > own and not within(module.name, *TORCH_BY_NAME):
                yield node.lineno, f"names {node.value}, which comes later in RANKS, by a string"


def forbidden_names(module: Module) -> Iterator[Finding]:
    for line, name in module.mentions:
        if within(name, *PARALLEL_STATE) and module.name != GROUPS:
            yield line, f"touches parallel_state: only {GROUPS} does, others take Groups"
        if within(name, "torch", "megatron") and within(module.name, *TORCH_FREE):
            yield line, "uses torch, but is pure Python"
        if within(name, "megavlm.planner") and within(module.name, *WITHOUT_PLANNER):
            yield line, "uses the planner: types and constants that both need are in megavlm.arch"
        if within(name, "torch.distributed", "torch.cuda") and within(module.name, *DEVICE_FREE):
            yield line, "uses torch.distributed or torch.cuda, but is a pure calculation"
        if within(name, *RUNS_CODE):
            yield line, "uses a format that runs code out of data and checkpoints"


def cpu_backend(module: Module) -> Iterator[Finding]:
    for i in module.imports:
        if within(i.target, CPU_BACKEND) and not within(module.name, CPU_BACKEND):
            if module.name != BACKEND:
                yield i.line, f"imports {CPU_BACKEND}: only {BACKEND} does, where a CPU run is certain"
            elif not i.deferred:
                yield i.line, f"imports {CPU_BACKEND} on every device: import it where a CPU run is certain"


def code_out_of_files(module: Module) -> Iterator[Finding]:
    for node in module.nodes:
        if isinstance(node, ast.Call):
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if module.meaning(node.func) in ("torch.load", "torch.serialization.load"):
                if keywords.get("weights_only") != "True":
                    yield node.lineno, "torch.load without weights_only=True runs code out of the file"
            elif keywords.get("allow_pickle", "False") != "False":
                yield node.lineno, "allow_pickle runs code out of the file"


def patches(module: Module) -> Iterator[Finding]:
    if within(module.name, BACKEND):
        return
    for node in module.nodes:
        targets: list[ast.expr] = []
        match node:
            case ast.Call(args=[target, *_]) if name_of(node.func) in ("setattr", "delattr"):
                targets = [target]
            case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                targets = [node]
        for target in targets:
            meaning = module.meaning(target)
            if meaning and not meaning.startswith(SETTINGS):
                yield target.lineno, f"changes {meaning}: only {BACKEND} patches torch and megatron-core"


def helpers(module: Module) -> Iterator[Finding]:
    """Yield imports of a test module or a conftest.py: changing one test must not break another."""
    for i in module.imports:
        within_tests = i.target.split(".")[1:] if within(i.target, "tests") else []
        if any(part.startswith("test_") or part == "conftest" for part in within_tests):
            yield i.line, f"imports {i.target}: what tests share is in tests/support, fixtures are in a conftest.py"


def everywhere(module: Module) -> Iterator[Finding]:
    for node in module.nodes:
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}: pass it as an argument"
    for i in module.imports:
        if within(i.target, "megatron.training"):
            yield i.line, "imports megatron.training, which the megatron-core of PyPI does not have"


def source_kinds(module: Module) -> Iterator[Finding]:
    """Yield where a module asks which kind of source it has: a source answers for itself (`megavlm/data/source.py`)."""
    for node in module.nodes:
        match node:
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                names = [each.id for each in ast.walk(kinds) if isinstance(each, ast.Name)]
                for name in names:
                    if name.endswith("Source") and name != "Source":
                        yield node.lineno, f"asks for a {name}: give `Source` a method that answers"


Rule = Callable[[Module], Iterator[Finding]]
RULES: tuple[Rule, ...] = (
    everywhere,
    import_direction,
    strings,
    forbidden_names,
    cpu_backend,
    code_out_of_files,
    patches,
    helpers,
    source_kinds,
)
TEST_RULES: tuple[Rule, ...] = (everywhere, helpers)


def findings(module: Module, rules: tuple[Rule, ...] = RULES) -> list[str]:
    found = {finding for rule in rules for finding in rule(module)}
    return [f"{module.name}, line {line}: {what}" for line, what in sorted(found)]


def modules_in(*places: str) -> list[Module]:
    files = [file for place in places for file in (ROOT / place).glob("**/*.py")]
    files += [ROOT / place for place in places if place.endswith(".py") and (ROOT / place).exists()]
    return [
        Module(
            name=".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"),
            source=file.read_text(encoding="utf-8"),
            is_package=file.name == "__init__.py",
        )
        for file in sorted(files)
    ]


SHIPPED = modules_in("megavlm", "pretrain_vlm.py", "tools", "benchmarks")


def test_the_shipped_code_keeps_the_rules() -> None:
    assert len(SHIPPED) > 20
    found = [line for module in SHIPPED for line in findings(module)]
    assert not found, "\n".join(found)


def test_the_tests_keep_their_rules() -> None:
    # To parse all of them takes seconds.
    suspected = re.compile(r"(?m)\bglobal\b|megatron\.training|^ *from \.|^ *(from|import) tests\b.*\b(test_|conftest)")
    modules = [module for module in modules_in("tests") if suspected.search(module.source)]
    found = [line for module in modules for line in findings(module, TEST_RULES)]
    assert not found, "\n".join(found)


# How many modules of the trainer programs import, and how many names of them: they may only fall.
SURFACE = {"modules": 60, "names": 132}


def test_programs_use_few_names_of_the_trainer() -> None:
    """What programs import of the trainer is its public surface: who changes it has to look at both."""
    modules = {module.name for module in SHIPPED}
    used = {
        i.target
        for module in SHIPPED
        if within(module.name, "megavlm.programs")
        for i in module.imports
        if within(i.target, "megavlm") and not within(i.target, "megavlm.programs")
    }
    owners = {name if name in modules else name.rpartition(".")[0] for name in used}
    found = {"modules": len(owners), "names": len(used)}
    assert all(found[name] <= most for name, most in SURFACE.items()), f"{found} are more than {SURFACE}"


def test_every_module_has_a_rank() -> None:
    assert [module.name for module in SHIPPED if rank_of(module.name) is None] == []


def test_packages_form_no_circle() -> None:
    """A package is in one row, so that the order of rows is one of packages; `programs` is ordered within."""
    row_of: dict[str, set[int]] = {}
    for row, names in enumerate(RANKS):
        for name in names:
            row_of.setdefault(".".join(name.split(".")[:2]), set()).add(row)
    assert {name for name, rows in row_of.items() if len(rows) > 1} <= {"megavlm.programs"}


def test_every_name_of_a_rule_is_a_module() -> None:
    """A rule about a module that was renamed or removed would never fire."""
    modules = {module.name for module in SHIPPED}
    named = {name for row in RANKS for name in row}.union(
        TORCH_FREE, DEVICE_FREE, WITHOUT_PLANNER, TORCH_BY_NAME, (GROUPS, BACKEND, CPU_BACKEND)
    )
    folders = {"tools", "benchmarks"}  # without an __init__
    assert sorted(named - modules - folders) == []
    assert all(any(within(module, folder) for module in modules) for folder in folders)


def test_the_documentation_draws_the_same_order() -> None:
    """The list under "Which part may import which" names the rows, first to last."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = text.partition("\n## Which part may import which\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^ *\d+\. (.+?):", section, re.MULTILINE)
    drawn = [tuple(re.findall(r"`([^`]+)`", row)) for row in rows]
    assert drawn == [tuple(name.removeprefix("megavlm.") for name in row) for row in RANKS]


def test_the_loop_reaches_a_bounded_part_of_the_package() -> None:
    """What one may have to read to follow a step: by imports, those inside functions included. It may only fall."""
    modules = {module.name: module for module in SHIPPED if within(module.name, "megavlm")}
    reached: set[str] = set()
    waiting = ["megavlm.train.loop"]
    while waiting:
        name = waiting.pop()
        if name in modules and name not in reached:
            reached.add(name)
            targets = [each.target for each in modules[name].imports]
            waiting += [each if each in modules else each.rpartition(".")[0] for each in targets]
    assert len(reached) <= REACHED, len(reached)


# What is imported before the backend is active.
EARLY = (
    *("megavlm.checkpoint.hf.pretrained", "megavlm.programs.convert", "megavlm.programs.train"),
    *("megavlm.command_line.parsing", "megavlm.programs.preview", "pretrain_vlm"),
)
# They take most of a second each, and no step of a run on CPUs needs them.
HEAVY = (
    *("torch._dynamo", "torch._inductor", "torch.onnx", "transformers", "sklearn", "scipy", "pandas"),
    *("wandb", "multistorageclient", "boto3", "pydantic", "datasets", "torchvision", "matplotlib"),
)
AROUND = ("megavlm.programs", "megavlm.train", "megavlm.inference")  # they start without the extras
# In one process, because imports take seconds: each stage imports more than the one before.
STAGES = """
import importlib, sys
from megavlm.command_line.parsing import parse
from megavlm.rules.check import check

def bring(*names):
    found = [name for name in names if name in sys.modules]
    assert not found, f"{stage} imports {found}"

stage = "parsing"
check(parse([]), world=1)
bring("torch", "megatron", "sklearn", "yaml")
stage = "a pure module, or a list of published models,"
list(map(importlib.import_module, [*PURE, "megavlm.families"]))
bring("torch")
stage = "what runs before the backend is active"
list(map(importlib.import_module, EARLY))
bring("megatron.core")
stage = "a run"
importlib.import_module("megavlm.programs.train").train(RUN)
bring(*HEAVY)
for name in [name for name in sys.modules if name.startswith(AROUND)]:
    del sys.modules[name]
sys.modules.update(dict.fromkeys(OPTIONAL))  # as without the extras: they cannot be imported
list(map(importlib.import_module, PROGRAMS))
"""


def test_programs_import_only_what_they_need(tmp_path: Path) -> None:
    names = [module.name for module in SHIPPED]
    given = {
        "PURE": [name for name in names if within(name, *TORCH_FREE)],
        "EARLY": EARLY,
        "RUN": ["--recipe", "demo", "--train-iters", "1", "--run-dir", str(tmp_path / "run")],
        "HEAVY": HEAVY,
        "OPTIONAL": OPTIONAL,
        "AROUND": AROUND,
        "PROGRAMS": [name for name in names if within(name, *AROUND)],
    }
    program = "".join(f"{name} = {value!r}\n" for name, value in given.items()) + STAGES
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # for a GPU, megatron-core compiles
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True)


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("megavlm.data.loader", "from megavlm.train import loop", "later in RANKS"),
        ("megavlm.data.loader", "from ..train.loop import fit", "later in RANKS"),
        ("megavlm.config.derived", "from megavlm.arch.dims import Dims", "later in RANKS"),
        ("megavlm.config.registry", "found = load('megavlm.arch.connectors:ALL')", "by a string"),
        ("megavlm.train.build", "import importlib\nimportlib.import_module('tools.plan')", "later in RANKS"),
        ("megavlm.arch.plan", "import torch", "pure Python"),
        ("megavlm.optim.stores", "from megavlm.planner.memory import HOST_PIECE", "uses the planner"),
        ("megavlm.data.costs", "import torch\ntorch.cuda.Event()", "pure calculation"),
        ("megavlm.data.costs", "from torch import cuda", "pure calculation"),
        ("megavlm.model.vlm", "from megatron.training import get_args", "megatron.training"),
        ("megavlm.model.vlm", "from megatron.core import parallel_state as ps", "only megavlm.parallel.groups"),
        ("megavlm.model.vlm", "import megatron.core as core\ncore.parallel_state.f()", "only megavlm.parallel.groups"),
        ("megavlm.train.build", "from megavlm.backend.cpu import install", "where a CPU run is certain"),
        ("megavlm.backend", "from megavlm.backend import cpu", "on every device"),
        ("megavlm.data.text", "import pickle", "runs code"),
        ("megavlm.data.text", "import torch\ntorch.load(f)", "weights_only"),
        ("megavlm.data.text", "from torch import load\nload(f, weights_only=False)", "weights_only"),
        ("megavlm.data.text", "import numpy as np\nnp.load(f, allow_pickle=True)", "allow_pickle"),
        ("megavlm.model.vlm", "from megatron.core.x import Layer\nLayer.forward, y = f, 1", "patches"),
        ("megavlm.model.vlm", "import megatron.core.x as m\nm.table['k'] += 1", "patches"),
        ("megavlm.model.vlm", "import torch.nn as nn\nsetattr(nn, 'Linear', f)", "patches"),
        ("megavlm.model.vlm", "import torch\nfor torch.x in y: pass", "patches"),
        ("tools.plan", "def f():\n    global x\n    x = 1", "global x"),
        ("megavlm.train.build", "isinstance(source, FilesSource | list)", "asks for a FilesSource"),
        ("tests.dist.test_a", "from tests.dist.test_b import train", "tests/support"),
        ("tests.gpu.model", "def f():\n    from tests.gpu.conftest import world", "tests/support"),
    ],
)
def test_the_checker_catches(name: str, source: str, message: str) -> None:
    found = findings(Module(name, source, is_package=name == BACKEND))
    assert len(found) == 1, found
    assert message in found[0]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("megavlm.model.vlm", "from megavlm.parallel.groups import Groups\nfrom . import flops"),
        (GROUPS, "from megatron.core import parallel_state\nparallel_state.initialize_model_parallel()"),
        (BACKEND, "def f():\n    from megavlm.backend import cpu"),
        (CPU_BACKEND, "import torch\ntorch.cuda.current_device = f"),
        ("megavlm.model.vlm", "import torch\ntorch.backends.cuda.matmul.allow_tf32 = False"),
        ("megavlm.model.vlm", "import torch\nx = torch.zeros(2)\nx[0] = 1\nself.torch = x"),
        ("megavlm.model.vlm", "import torch\ntorch.load(f, weights_only=True)"),
        ("tests.dist.test_a", "from tests.support.training import train\nfrom tests.fake import device"),
    ],
)
def test_the_checker_lets_pass(name: str, source: str) -> None:
    assert findings(Module(name, source, is_package=name == BACKEND)) == []
