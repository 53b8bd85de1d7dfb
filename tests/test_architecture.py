"""The boundaries of the package: who may import whom, what is exported, and what stays unloaded."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import recipe_ckpt

PACKAGE = Path(recipe_ckpt.__file__).parent

LAYERS = {
    "errors": 0,
    "remote_url": 0,
    "layout": 0,
    "manifest": 0,
    "retention": 0,
    "config": 0,
    "drift": 0,
    "policies": 0,
    "checks": 0,
    "checkpoint_rules": 0,
    "validation": 0,
    "rank_env": 0,
    "storage": 1,
    "remote": 1,
    "remote_failures": 1,
    "remote_trees": 1,
    "remote_fsspec": 1,
    "remote_worker": 1,
    "remote_client": 1,
    "pulse": 1,
    "coordination": 1,
    "engines.base": 1,
    "lease": 2,
    "survey": 2,
    "sealing": 2,
    "directories": 2,
    "recovery": 2,
    "store": 2,
    "resume": 3,
    "transfer": 3,
    "branches": 3,
    "mirror": 3,
    "step_sender": 3,
    "node_mirror": 3,
    "uploader": 3,
    "mirror_session": 3,
    "nodes": 3,
    "node_probe": 3,
    "node_session": 3,
    "node_commit": 3,
    "session": 3,
    "data_state": 3,
    "captured": 3,
    "contents": 3,
    "saving": 3,
    "loading": 3,
    "preemption": 4,
    "handler": 4,
    "build": 4,
    "tensors": 5,
    "engines": 6,
    "sft": 7,
    "messages": 8,
    "help_text": 8,
    "command_line": 8,
    "hydra_side": 8,
    "job": 8,
    "launch": 8,
    "sweeps": 8,
}
SEES_PORTS_ONLY = {"tensors": 1}
"""Layers that import nothing between these and themselves: an engine of another package may use them alone."""

USERS = {
    "torch": ["coordination", "data_state", "handler", "tensors", "engines", "sft", "launch"],
    "hydra": ["command_line", "help_text", "hydra_side", "job", "launch", "messages", "sweeps"],
    "omegaconf": ["help_text", "hydra_side", "launch", "messages", "sweeps"],
    "yaml": ["messages"],
    "fsspec": ["remote_trees"],
    "hdfs_native": ["remote_trees"],
    "ray": [],
    "transformers": ["sft"],
    "datasets": ["sft"],
}


def name_module(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def find_row(module, table):
    """The longest name of the table that the module is or lies in."""
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if name in table), None)


def list_imports(path):
    """Every imported name of a file, also those inside functions; without those for type checkers only."""
    tree = ast.parse(path.read_text())
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=name_module)
def test_module_imports_lower_layers_only(path):
    module = name_module(path)
    row = find_row(module, LAYERS)
    assert row is not None, f"{module} has no layer: add it to the table here and in the design"
    for imported in list_imports(path):
        if not imported.startswith("recipe_ckpt."):
            continue
        other = find_row(imported.removeprefix("recipe_ckpt."), LAYERS)
        if other != row and other is not None:
            assert LAYERS[other] <= SEES_PORTS_ONLY.get(row, LAYERS[row]), f"{module} imports {imported}"


def test_modules_of_one_layer_import_each_other_in_one_direction():
    edges = set()
    for path in FILES:
        known = {name_module(other) for other in FILES} - {name_module(path)}
        names = (name.removeprefix("recipe_ckpt.") for name in list_imports(path) if name.startswith("recipe_ckpt."))
        edges |= {(name_module(path), found) for name in names if (found := find_row(name, known))}
    assert find_cycle(edges) is None


def find_cycle(edges):
    """Take away what imports nothing that is left; what can't be taken away stands in a circle."""
    left = {name for edge in edges for name in edge}
    while free := {name for name in left if not any(a == name and b in left for a, b in edges)}:
        left -= free
    return sorted(left) or None


@pytest.mark.parametrize("library", USERS)
def test_library_is_imported_by_its_users_only(library):
    users = [name_module(path) for path in FILES if any(name.split(".")[0] == library for name in list_imports(path))]
    assert [name for name in users if find_row(name, USERS[library]) is None] == []


def test_exported_names_are_these():
    names = [
        "CheckpointHandler",
        "LoadPolicy",
        "MirrorPolicy",
        "NoCheckpoints",
        "OrchestrationMode",
        "ResumePoint",
        "Retention",
        "SavePolicy",
        "build_handler",
    ]
    assert sorted(recipe_ckpt.__all__) == names
    assert [getattr(recipe_ckpt, name).__name__ for name in names] == names
    with pytest.raises(AttributeError, match="has no attribute 'CheckpointManager'"):
        _ = recipe_ckpt.CheckpointManager


@pytest.mark.parametrize(
    "modules",
    [
        "recipe_ckpt",
        "recipe_ckpt.config",
        "recipe_ckpt.remote_client",
        "recipe_ckpt.session, recipe_ckpt.lease",
        "recipe_ckpt.coordination",
    ],
)
def test_import_loads_no_torch_and_no_hydra(modules):
    script = (
        f"import sys, {modules}; print([n for n in ('torch', 'hydra', 'omegaconf', 'fsspec', 'ray') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_import_changes_no_signal_and_starts_no_thread():
    script = """if True:
        import signal, threading
        before = [signal.getsignal(number) for number in signal.valid_signals()]
        from recipe_ckpt import build_handler
        assert before == [signal.getsignal(number) for number in signal.valid_signals()]
        assert not [t for t in threading.enumerate() if t.name.startswith("recipe")]
    """
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize("path", FILES, ids=name_module)
def test_module_prints_nothing_and_unpickles_nothing(path):
    tree = ast.parse(path.read_text())
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not {"print", "pickle.load", "pickle.loads", "eval", "exec"} & set(calls)
    loads = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"]
    assert all("weights_only=True" in ast.unparse(node) for node in loads)
