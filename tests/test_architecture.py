"""What holds over the whole source: which module may import which, what an import loads, and that
nothing newer than the declared versions is used.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.versions import require

import itrloss

HOME = Path(itrloss.__file__).parent
PATHS = {
    ".".join(path.relative_to(HOME).with_suffix("").parts).removesuffix(".__init__"): path
    for path in HOME.rglob("*.py")
    if path != HOME / "__init__.py"
}
TREES = {name: ast.parse(path.read_text()) for name, path in PATHS.items()}

# ------------------------------------------------------------------------------------------ imports

# The layers from the bottom up: a module imports from its own layer and those below.
FLOORS = [
    {"torch_versions"},
    {"checks", "files"},
    {"engine"},
    {"distributed", "anchors", "terms"},
    {"similarity"},
    {
        "functional",
        "sets",
        "memory",
        "kmeans",
        "metrics",
        "rerank",
        "mining",
    },
    {"losses", "compat", "training"},
    {"testing", "integrations"},
    {"cli"},
    {"__main__"},
]
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def package_of(name: str) -> list[str]:
    """Return the parts of the package that relative imports of a module start from."""
    parts = ["itrloss", *name.split(".")]
    if PATHS[name].name == "__init__.py":
        return parts
    return parts[:-1]


def running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those that are there for type checkers alone."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from running_nodes(child)


@functools.cache
def imported_names(name: str) -> set[str]:
    """Return the full names of all that a module imports when it runs, anywhere in its code."""
    found = set()
    for node in running_nodes(TREES[name]):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            if node.level:
                package = package_of(name)
                parts = package[: len(package) - node.level + 1] + parts
            found.update(".".join([*parts, alias.name]) for alias in node.names)
    return found


def imports(name: str) -> set[str]:
    """Return the modules of the library that a module imports when it runs."""
    found = set()
    for full_name in imported_names(name):
        package, _, path = full_name.partition(".")
        if package == "itrloss":
            # a module, or a name in one
            found.add(path if path in PATHS else path.rpartition(".")[0])
    return found & PATHS.keys() - {name}


@pytest.mark.parametrize("name", sorted(PATHS))
def test_modules_import_nothing_from_above(name):
    floor = FLOOR[name.split(".")[0]]
    above = {module for module in imports(name) if FLOOR[module.split(".")[0]] > floor}
    assert not above


def test_imports_have_no_circle():
    left = {name: imports(name) - {name.split(".")[0]} for name in PATHS}
    while free := {name for name, needed in left.items() if not needed & left.keys()}:
        left = {name: needed for name, needed in left.items() if name not in free}
    assert not left


def test_the_package_imports_nothing_of_the_checkout():
    for name in PATHS:
        roots = {full_name.split(".")[0] for full_name in imported_names(name)}
        assert not roots & {"benchmarks", "examples", "support", "tests"}, name


@pytest.mark.parametrize("name", ["infonce", "matryoshka", "robust", "supervised"])
def test_losses_are_written_as_those_of_users(name):
    """They know nothing of the engine, but how it is said who matches, as users say it, too, and
    whether arguments can be looked at.
    """
    of_engine = {module for module in imports(f"losses.{name}") if module.startswith("engine")}
    assert of_engine <= {"engine.related", "engine.vectors"}


@pytest.mark.slow
def test_an_import_brings_no_compiler_along():
    """Importing the compiler takes about a second."""
    code = """
import sys, torch
before = set(sys.modules)
import itrloss
print(*set(sys.modules) - before)
"""
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    heavy = ("torch._dynamo", "torch._inductor", "torch._export", "triton", "sympy", "matplotlib")
    optional = ("transformers", "sentence_transformers", "pytorch_metric_learning", "open_clip")
    assert "itrloss.losses" in loaded
    assert not [name for name in loaded if name.startswith(heavy + optional)]


def test_public_names_are_those_of_all():
    public = {name for name in dir(itrloss) if not name.startswith("_")}
    modules = {path.stem for path in HOME.iterdir()}  # other tests may have imported any of them
    assert public - (modules - set(itrloss.__all__)) == set(itrloss.__all__)


def test_no_operators_are_registered():
    require("torch._C._dispatch_get_all_op_names", 2, 0)
    names = torch._C._dispatch_get_all_op_names()
    assert not [name for name in names if name.startswith("itrloss::")]


# --------------------------------------------------------------------------------- minimum versions
# Pyright refuses what is newer than the declared Python.


def words(text: str) -> set[str]:
    return set(text.split())


# Everything of PyTorch that the source reads by name; all of it is in PyTorch 1.13. Look there
# before you add a name: what is newer goes to torch_versions, or to LATER.
IN_TORCH = words(
    """
    F.embedding_bag F.logsigmoid F.normalize F.pad F.softplus dist.ProcessGroup
    dist.ReduceOp.MAX dist.all_gather_object dist.all_reduce dist.barrier
    dist.destroy_process_group dist.distributed_c10d._get_default_store
    dist.get_process_group_ranks dist.get_rank dist.get_world_size dist.group.WORLD
    dist.init_process_group dist.is_available dist.is_initialized nn.Module nn.Parameter
    nn.functional.normalize torch.Generator torch.Tensor torch.TypedStorage
    torch._C._len_torch_dispatch_stack torch.__file__ torch.__version__ torch._foreach_mul
    torch._subclasses.FakeTensor torch.add torch.addcmul torch.addmm torch.allclose torch.amax
    torch.arange torch.as_tensor torch.autocast torch.autograd.Function torch.autograd.backward
    torch.autograd.grad torch.autograd.gradcheck torch.autograd.graph.saved_tensors_hooks
    torch.backends.cuda.matmul torch.backends.mkldnn.enabled torch.backends.mkldnn.is_available
    torch.backends.mps.is_available torch.bfloat16 torch.bincount torch.bool
    torch.broadcast_tensors torch.cat torch.cdist torch.clear_autocast_cache
    torch.contiguous_format torch.cuda.CUDAGraph
    torch.cuda.Stream torch.cuda.current_stream torch.cuda.device torch.cuda.device_of
    torch.cuda.get_device_capability torch.cuda.get_device_name torch.cuda.get_device_properties
    torch.cuda.get_rng_state_all torch.cuda.graph torch.cuda.is_available
    torch.cuda.is_current_stream_capturing torch.cuda.is_initialized
    torch.cuda.set_rng_state_all torch.cuda.stream torch.device torch.distributed.get_rank
    torch.div torch.dtype torch.einsum torch.empty torch.empty_like torch.enable_grad
    torch.equal torch.exp torch.exp_ torch.expm1 torch.eye torch.finfo torch.float16
    torch.float32 torch.float64 torch.from_numpy torch.frombuffer torch.full torch.full_like
    torch.ge torch.get_default_dtype torch.get_rng_state torch.gt torch.iinfo torch.inf
    torch.inference_mode torch.int16 torch.int32 torch.int64 torch.int8
    torch.is_autocast_enabled torch.is_grad_enabled torch.is_inference_mode_enabled
    torch.isclose torch.isin torch.lerp torch.linalg.qr torch.linalg.vecdot
    torch.linalg.vector_norm torch.linspace torch.load torch.log torch.logaddexp torch.matmul
    torch.maximum torch.mean torch.minimum torch.mm torch.mul
    torch.multiprocessing.spawn.ProcessRaisedException torch.multiprocessing.spawn.spawn
    torch.mv torch.nan torch.ne torch.nn.Module torch.nn.functional.normalize
    torch.nn.functional.pad torch.nn.utils.rnn.pad_sequence torch.no_grad torch.ones
    torch.ones_like torch.optim.Adam torch.optim.Optimizer torch.optim.SGD torch.promote_types
    torch.rand torch.randint torch.randn torch.random.fork_rng torch.randperm torch.reciprocal
    torch.repeat_interleave torch.rsub torch.save torch.searchsorted torch.set_default_dtype
    torch.set_grad_enabled torch.set_num_threads torch.set_rng_state torch.sigmoid_ torch.sort
    torch.sparse_coo torch.sparse_coo_tensor torch.special.log_ndtr torch.stack torch.strided
    torch.sub torch.sum torch.take_along_dim torch.tensor torch.tensordot
    torch.testing.assert_close torch.threshold torch.triu_indices torch.uint8 torch.unique
    torch.utils._pytree.TreeSpec torch.utils._pytree.tree_flatten
    torch.utils._pytree.tree_map_only torch.utils._pytree.tree_unflatten torch.var_mean
    torch.version.hip torch.where torch.zeros torch.zeros_like
    """
)
# What is read only where PyTorch has it: by the compiler, and after require_version or a question
# that torch_versions answers.
LATER = words(
    """
    torch._C._autograd._top_saved_tensors_default_hooks torch._dynamo.graph_break
    torch._foreach_copy_ torch.amp.GradScaler torch.compile torch.compiler.reset
    torch.distributed.tensor.DTensor torch.distributed.tensor.distribute_tensor
    torch.mps.get_rng_state torch.mps.set_rng_state torch.ops.mkldnn._linear_pointwise.default
    """
)
NOT_IN_NUMPY = words(
    """
    np.acos np.astype np.bitwise_count np.bool np.concat np.cumulative_sum np.exceptions
    np.isdtype np.long np.matrix_transpose np.permute_dims np.pow np.strings np.trapezoid
    np.ulong np.unique_values np.unstack np.vecdot
    """
)


def test_the_declared_versions_are_those_of_the_lists():
    settings = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert '"torch>=1.13' in settings
    assert '"numpy>=1.24' in settings


@functools.cache
def read_names(name: str) -> set[str]:
    """Return the attributes that a module reads or imports, as ``torch.nn.Module``.

    Of a chain of attributes only the longest is returned.
    """
    names = {x for x in imported_names(name) if not x.startswith("itrloss")}
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Attribute):
            names.add(dotted_name(node))
    return {x for x in names if not any(y.startswith(f"{x}.") for y in names)}


def dotted_name(node: ast.AST) -> str:
    """Return the name of an attribute of a module; an empty one for other expressions."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def test_nothing_newer_than_the_declared_torch_is_read():
    modules = {name.rpartition(".")[0] for name in IN_TORCH}
    for name in PATHS.keys() - {"torch_versions"}:
        names = {x for x in read_names(name) if x.split(".")[0] in ("torch", "F", "dist", "nn")}
        missing = names - modules - IN_TORCH - LATER
        assert not missing, f"{name}: add {missing} to IN_TORCH if PyTorch 1.13 has them"


def test_nothing_newer_than_the_declared_numpy_is_read():
    for name in PATHS:
        assert not read_names(name) & NOT_IN_NUMPY, name


# What losses call, which users compile.
COMPILED = ("losses", "compat", "engine.dense", "engine.terms", "anchors", "functional")


def test_compiled_code_has_no_containers_that_the_compiler_of_torch_2_8_refuses():
    for name in PATHS:
        if name.startswith(COMPILED):
            names = {node.id for node in ast.walk(TREES[name]) if isinstance(node, ast.Name)}
            refused = {"defaultdict", "ChainMap", "OrderedDict", "Counter", "deque"}
            assert not names & refused, name


def test_no_check_of_a_type_has_a_union():
    """The compiler of PyTorch 2.8 traces a tuple of types, and not ``A | B``, which it calls a
    sourceless object.
    """
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                assert not isinstance(node.args[1], ast.BinOp), f"{name}, line {node.lineno}"
