"""Imports only point down, and the lowest layer needs no torch."""

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "mpc_dist"

# From the bottom up; a module may import from its own layer and from those above it in this list.
LAYERS = [
    {"validation", "document", "new_folder", "plain_value", "task", "windows", "schedule"},
    {"planner"},
    {"precision", "readout", "models", "data", "gradient", "profile"},
    {"runtime"},
    {"training"},
    {"report", "commands", "cli", "bench", "study"},
]
PURE = LAYERS[0]
# Within the third layer too, imports have one direction.
ORDER = ["precision", "data", "readout", "models", "gradient", "profile"]


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: write imports in full, so that they can be checked"  # noqa: PT018
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def parts_imported_by(path: Path) -> set[str]:
    inner = {name.split(".")[1] for name in imports_of(path) if name.startswith("mpc_dist.")}
    return inner & set().union(*LAYERS)


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_point_down(path: Path):
    layer_of = {part: index for index, layer in enumerate(LAYERS) for part in layer}
    own = part_of(path)
    assert own in layer_of, f"{own} has no layer: add it to LAYERS"
    for other in parts_imported_by(path):
        assert layer_of[other] <= layer_of[own], f"{own} imports {other} from a higher layer"
        if own in ORDER and other in ORDER:
            assert ORDER.index(other) <= ORDER.index(own), f"{own} imports {other}, which builds on it"


@pytest.mark.parametrize("path", [path for path in MODULES if part_of(path) in PURE], ids=lambda path: path.name)
def test_the_lowest_layer_is_pure_python(path: Path):
    assert not {name.split(".")[0] for name in imports_of(path)} & {"torch", "numpy", "rich", "matplotlib"}


@pytest.mark.parametrize("path", [path for path in MODULES if part_of(path) == "planner"], ids=lambda path: path.name)
def test_the_planner_needs_no_torch(path: Path):
    assert not {name.split(".")[0] for name in imports_of(path)} & {"torch", "rich", "matplotlib"}


def test_a_forbidden_import_is_seen(tmp_path: Path):
    source = tmp_path / "windows.py"
    source.write_text("def f():\n    from mpc_dist.training import config\n    import torch.nn\n")
    assert parts_imported_by(source) == {"training"}
    assert "torch.nn" in imports_of(source)
