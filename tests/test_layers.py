"""The package's shape, from its source: imports point down, vendors and environment stay in their files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "acceler8"

# Low to high; a module imports from its own row or a row above it. One row holds layers that share a level.
LAYERS = (
    ("errors",),
    ("costs",),
    ("formats",),
    ("scaling",),
    ("kernels",),
    ("recipes",),
    ("functional",),
    ("nn",),
    ("backends",),
    ("conversion",),
    ("optim",),
    ("levels",),
    ("comm",),
    ("parallel",),
    ("checkpoint",),
    ("health",),
    ("config",),
    ("accelerator",),
    ("launch",),
    ("the public names",),
    ("bench", "compat", "demo", "logging", "utils"),
    ("cli",),
)
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}
# `import acceler8`: what a script sees, so the demo may use it and no layer below.
PUBLIC = LEVEL["the public names"]
TOP = len(LAYERS)  # __init__ and __main__ themselves may import anything

VENDORS = {"deepspeed", "lightning", "peft", "torchao", "transformer_engine", "transformers", "triton"}
TRITON_GUARD = "kernels/_triton.py"
# Files that subclass a vendor's classes: only they import it, and nothing imports them but on use.
SUBCLASSES = {"backends/torchao/_layer.py": "torchao", "backends/transformer_engine/_modules.py": "transformer_engine"}
COSTS = "costs.py"  # plans read the user's tables, from where XDG_DATA_HOME says, and stand below config


def imported_modules(node: ast.Import | ast.ImportFrom, module: str, is_package: bool) -> list[str]:
    """Absolute dotted names that an import inside ``module`` reads; ``from a import b`` gives ``a.b``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        base = ".".join([*parts, base] if base else parts)
    return [f"{base}.{alias.name}" for alias in node.names]


def layer_of(dotted: str) -> str | None:
    """The layer that ``acceler8.<layer>...`` names; None for the package itself and its re-exports."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL else None


def upward_imports(source: str, relative: str) -> Iterator[str]:
    """One line for each import that points up; a late import that dodges a cycle counts too."""
    parts = Path(relative).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    module = ".".join(("acceler8", *(parts[:-1] if is_package else parts)))
    own = LEVEL.get(parts[0], TOP)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [name for name in imported_modules(node, module, is_package) if name.split(".")[0] == "acceler8"]
        layers = {layer_of(name) for name in names if not name.endswith(".__version__")}
        for layer in sorted(layers, key=str):
            if (LEVEL[layer] if layer else PUBLIC) > own:
                what = f"layer {layer}" if layer else "the public names, which stand above all layers"
                yield f"{relative}:{node.lineno}: {parts[0]} imports {what}; move the shared piece down: " + (
                    ast.unparse(node)
                )


def module_level_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Everything that runs on import: all nodes outside functions and ``if TYPE_CHECKING`` blocks."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from module_level_nodes(node)


def vendor_imports(source: str, relative: str) -> Iterator[str]:
    """One line for each vendor package that importing the file would import."""
    if relative == TRITON_GUARD:
        return
    for node in module_level_nodes(ast.parse(source)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for name in imported_modules(node, "acceler8", is_package=True):
            if any(name.startswith(f"acceler8.{path[:-3].replace('/', '.')}") for path in SUBCLASSES):
                yield f"{relative}:{node.lineno}: imports {name} at module level, and so a vendor's package"
            if name.split(".")[0] in VENDORS and name.split(".")[0] != SUBCLASSES.get(relative):
                yield f"{relative}:{node.lineno}: imports {name} at module level; import it on use" + (
                    f", or take it from {TRITON_GUARD}" if name.startswith("triton") else ""
                )


def environment_reads(source: str, relative: str) -> Iterator[str]:
    """One line for each use of the process environment outside the files that own it."""
    if relative.startswith("config/") or relative in (TRITON_GUARD, COSTS):
        return
    names = {"environ", "environb", "getenv", "getenvb"}
    for node in ast.walk(ast.parse(source)):
        used = isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
        named = isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}
        if used or named:
            yield f"{relative}:{node.lineno}: reads the environment; read it in config/ and pass the value"


CHECKS = (upward_imports, vendor_imports, environment_reads)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package_keeps_to_its_layers(check):
    files = sorted(PACKAGE.rglob("*.py"))
    assert files, f"no source under {PACKAGE}"
    found = [line for path in files for line in check(path.read_text(), path.relative_to(PACKAGE).as_posix())]
    assert not found, "\n".join(found)


def test_every_part_of_the_package_has_a_level():
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    unknown = sorted(part for part in parts if part not in LEVEL and not part.startswith("__"))
    assert not unknown, f"{unknown} are in no layer; place them in LAYERS or move them into one"


PLANTED = [
    (upward_imports, "kernels/a.py", "import acceler8.nn", "kernels imports layer nn"),
    (upward_imports, "scaling/a.py", "from acceler8.kernels.amax import X", "layer kernels"),
    (upward_imports, "scaling/a.py", "from acceler8 import kernels", "layer kernels"),
    (upward_imports, "kernels/a.py", "from acceler8 import convert_model", "the public names"),
    (upward_imports, "kernels/a.py", "import acceler8", "the public names"),
    (upward_imports, "scaling/a.py", "from ..kernels import amax", "layer kernels"),
    (upward_imports, "scaling/__init__.py", "from ..kernels import amax", "layer kernels"),
    (upward_imports, "nn/a.py", "def f():\n    from acceler8.cli import main", "nn/a.py:2"),
    (vendor_imports, "nn/a.py", "import triton.language as tl", TRITON_GUARD),
    (vendor_imports, "nn/a.py", "try:\n    import torchao\nexcept ImportError:\n    pass", "torchao"),
    (vendor_imports, "nn/a.py", "class A:\n    from transformers import B", "transformers.B"),
    (vendor_imports, "backends/torchao/_layer.py", "import transformers", "transformers"),
    (vendor_imports, "backends/a.py", "from acceler8.backends.torchao._layer import A", "a vendor's package"),
    (vendor_imports, "backends/a.py", "from acceler8.backends.torchao import _layer", "a vendor's package"),
    (environment_reads, "nn/a.py", "import os\nx = os.environ['A']", "nn/a.py:2"),
    (environment_reads, "nn/a.py", "import os\nx = os.getenv('A')", "nn/a.py:2"),
    (environment_reads, "nn/a.py", "from os import environ", "nn/a.py:1"),
]


@pytest.mark.parametrize(("check", "relative", "source", "expected"), PLANTED)
def test_a_planted_fault_is_found(check, relative, source, expected):
    found = list(check(source, relative))
    assert len(found) == 1
    assert expected in found[0]


ALLOWED = [
    (
        upward_imports,
        "scaling/a.py",
        "from acceler8.formats import E4M3\nfrom . import clock\nfrom ..errors import X",
    ),
    (upward_imports, "checkpoint/__init__.py", "from .store import save\nfrom acceler8 import __version__"),
    (upward_imports, "accelerator/a.py", "from acceler8.config import merge"),
    (upward_imports, "demo/a.py", "import acceler8\nfrom acceler8 import Accelerator"),
    (upward_imports, "__init__.py", "from acceler8.cli import main"),
    (vendor_imports, "nn/a.py", "def f():\n    import transformers"),
    (vendor_imports, "nn/a.py", "if TYPE_CHECKING:\n    import transformers"),
    (vendor_imports, TRITON_GUARD, "import triton"),
    (vendor_imports, "backends/torchao/_layer.py", "from torchao.float8.float8_linear import Float8Linear"),
    (vendor_imports, "backends/a.py", "def f():\n    from acceler8.backends.torchao import _layer"),
    (environment_reads, "config/a.py", "import os\nos.environ['A']"),
    (environment_reads, "nn/a.py", "self.environ['A']"),
]


@pytest.mark.parametrize(("check", "relative", "source"), ALLOWED)
def test_what_is_allowed_passes(check, relative, source):
    assert list(check(source, relative)) == []
