"""A unit: compiled or operation by operation, its results are the same and lie the same."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config, cpp_builder

from fxremat import torch_compat
from fxremat.passes.fuse.unit import Unit, Units
from fxremat.passes.joint.sizes import LAYOUTS, Layout, Size, layouts_of, product
from tests.fused import run_operations
from tests.models.bits import assert_bitwise_equal

aten = torch.ops.aten
CPU = torch.device("cpu")

Step = tuple[Any, tuple[Any, ...]]
"""An operation and its arguments; a text names an earlier value."""


def unit_of(
    inputs: dict[str, Tensor],
    steps: dict[str, Step],
    results: Sequence[str],
    *,
    sure: bool = True,
    units: Units | None = None,
) -> Unit:
    """A unit of these operations, traced with these inputs."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for name, value in inputs.items():
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["val"] = value
    for name, (target, args) in steps.items():
        nodes[name] = graph.call_function(
            target, tuple(nodes[a] if isinstance(a, str) else a for a in args)
        )
        values = fx.node.map_arg(nodes[name].args, lambda n: n.meta["val"])
        nodes[name].meta["val"] = target(*values)
    graph.output(tuple(nodes[name] for name in results))
    made = Units() if units is None else units
    return made.of(graph, [sure] * len(inputs), CPU)


def results_of(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def check(unit: Unit, *args: Any) -> None:
    """It gives what its operations give, as they were traced to lie, in memory of its own."""
    tensors = args[: len(unit.inputs)]
    given = [t.clone() for t in tensors]
    traced = [layouts_of(n)[0].stride for n in unit.graph.output_node().all_input_nodes]
    for _ in range(2):  # the first run looks at its results, later ones do not
        ours, theirs = results_of(unit(*args)), run_operations(unit, tensors)
        assert_bitwise_equal(ours, list(theirs))
        assert [t.stride() for t in ours] == traced
        keys = [torch_compat.storage_key(t) for t in (*tensors, *ours)]
        assert len(set(keys)) == len(keys)
    assert_bitwise_equal(list(tensors), given)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How often kernels were made: for one size, and for any."""
    counts = {"one": 0, "any": 0}

    def counted(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return make(*args, **options)

        return run

    one, any_ = torch_compat.compile_kernels, torch_compat.compile_for_sizes
    monkeypatch.setattr(torch_compat, "compile_kernels", counted("one", one))
    monkeypatch.setattr(torch_compat, "compile_for_sizes", counted("any", any_))
    return counts


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels cannot be made."""

    def fails(*_args: Any, **_options: Any) -> Any:
        raise RuntimeError("no kernels today")

    monkeypatch.setattr(torch_compat, "compile_kernels", fails)
    monkeypatch.setattr(torch_compat, "compile_for_sizes", fails)


def test_results_are_those_of_its_operations_and_lie_so(compilations: dict[str, int]):
    """Exact operations; among the results a transposed one, an input, and one twice."""
    x, y = torch.randn(4, 6), torch.randn(6, 4).t()
    steps: dict[str, Step] = {
        "sum": (aten.add.Tensor, ("x", "y")),
        "turned": (aten.permute.default, ("y", [1, 0])),
        "product": (aten.mul.Tensor, ("turned", 2.5)),
        "least": (aten.amax.default, ("sum", [0])),
        "as_x": (aten.mul.Tensor, ("x", 1)),
        "positive": (aten.gt.Scalar, ("sum", 0)),
        "chosen": (aten.where.self, ("positive", "sum", "x")),
        "again": (aten.where.self, ("positive", "sum", "x")),
        "as_y": (aten.add.Tensor, ("y", 0)),
    }
    results = ["product", "least", "as_x", "chosen", "again", "positive", "as_y"]
    unit = unit_of({"x": x, "y": y}, steps, results)
    unit.compile(tuple(unit.hints.values()))
    check(unit, x, y)
    check(unit, *(torch.randn_like(t) for t in (x, y)))
    assert compilations == {"one": 1, "any": 0}
    assert unit.operations[0].startswith("add")


def test_whatever_kernels_return_results_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch):
    """A kernel may return its input, one tensor for two results, or lay a result otherwise."""

    def kernels(*_args: Any, **_options: Any) -> Callable[[list[Tensor]], list[Tensor]]:
        def run(args: list[Tensor]) -> list[Tensor]:
            (x,) = args
            args.clear()
            more = x + 1
            return [x, more, more, (x + 2).t().contiguous().t()]

        return run

    monkeypatch.setattr(torch_compat, "compile_kernels", kernels)
    steps: dict[str, Step] = {
        "same": (aten.mul.Tensor, ("x", 1)),
        "one": (aten.add.Tensor, ("x", 1)),
        "two": (aten.sub.Tensor, ("x", -1)),
        "laid": (aten.add.Tensor, ("x", 2)),
    }
    x = torch.randn(3, 5)
    check(unit_of({"x": x}, steps, list(steps)), x)


def test_equal_units_are_one_and_others_are_not():
    x, units = torch.randn(4, 6), Units()

    def of(number: float, shape: tuple[int, ...] = (4, 6), *, sure: bool = True) -> Unit:
        steps: dict[str, Step] = {"a": (aten.add.Tensor, ("x", number))}
        return unit_of({"x": x.new_empty(shape)}, steps, ["a"], sure=sure, units=units)

    first = of(1.0)
    assert of(1.0) is first
    others = {of(2.0), of(1), of(1.0, (4, 7)), of(1.0, sure=False)}
    assert first not in others
    assert len([*units]) == len({str(unit) for unit in units}) == 5


def sized(count: int, width: int) -> tuple[Unit, Callable[[int, int], tuple[Any, ...]]]:
    """A unit that follows two sizes; and inputs of it with others."""
    rows, columns = Size.named("SIZE0", count), Size.named("SIZE1", width)

    def laid(node: fx.Node, *shape: int) -> fx.Node:
        strides = [product(shape[i + 1 :]) for i in range(len(shape))]
        layout = Layout(shape, tuple(strides), 0, product((*shape, 4)))
        node.meta[LAYOUTS] = (layout,)
        node.meta["val"] = torch.empty(tuple(map(int, shape)))
        return node

    graph = fx.Graph()
    x, y = laid(graph.placeholder("x"), rows, columns), laid(graph.placeholder("y"), columns)
    wide = laid(graph.call_function(aten.expand.default, (y, [rows, columns])), rows, columns)
    total = laid(graph.call_function(aten.add.Tensor, (x, wide)), rows, columns)
    flat = laid(graph.call_function(aten.view.default, (total, [-1])), product((rows, columns)))
    scaled = laid(graph.call_function(aten.mul.Tensor, (flat, rows)), *layouts_of(flat)[0].shape)
    graph.output((total, scaled))
    unit = Units().of(graph, [True, True], CPU)

    def args(count: int, width: int) -> tuple[Any, ...]:
        return torch.randn(count, width), torch.randn(width), count, width

    return unit, args


def check_sized(unit: Unit, args: tuple[Any, ...]) -> None:
    x, y, count, _ = args
    total, scaled = unit(*args)
    assert_bitwise_equal(total, x + y)
    assert_bitwise_equal(scaled, (x + y).flatten() * count)


def test_one_compilation_serves_all_other_sizes(compilations: dict[str, int]):
    """Two symbols that were equal at the capture need not be so later."""
    unit, args = sized(4, 4)
    assert list(unit.hints) == ["SIZE0", "SIZE1"]
    check_sized(unit, args(4, 4))
    assert compilations == {"one": 1, "any": 0}
    for sizes in ((5, 4), (7, 3), (5, 4), (100, 33)):
        check_sized(unit, args(*sizes))
        check_sized(unit, args(*sizes))
    assert compilations == {"one": 1, "any": 1}


def test_other_sizes_run_where_nothing_can_be_compiled(no_compiler: None):
    unit, args = sized(4, 6)
    with pytest.warns(UserWarning, match=str(unit)) as told:
        for sizes in ((4, 6), (5, 2), (3, 9)):
            check_sized(unit, args(*sizes))
    assert len(told) == 1


def test_a_unit_that_cannot_be_compiled_says_so_once_and_runs(no_compiler: None):
    x = torch.randn(3, 5)
    steps: dict[str, Step] = {
        "a": (aten.add.Tensor, ("x", 1.5)),
        "b": (aten.mul.Tensor, ("a", "a")),
        "c": (aten.add.Tensor, ("a", "x")),
    }
    unit = unit_of({"x": x}, steps, ["b", "c"], sure=False)
    with pytest.warns(UserWarning) as told:
        unit.compile(tuple(unit.hints.values()))
    (warning,) = told
    for word in (str(unit), *unit.operations, "no kernels today"):
        assert word in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(unit, x)
        check(unit, torch.randn(5, 3).t())


def test_what_lies_otherwise_than_traced_is_right_where_it_may(compilations: dict[str, int]):
    """A library's result may lie in any way; kernels are made for each."""
    x = torch.randn(4, 6)
    steps: dict[str, Step] = {
        "a": (aten.add.Tensor, ("x", 1.5)),
        "b": (aten.mul.Tensor, ("a", "a")),
    }
    unit = unit_of({"x": x}, steps, ["b"], sure=False)
    turned = torch.randn(6, 4).t()
    for given in (x, turned, torch.randn(4, 6), turned):
        ours = unit(given)
        assert_bitwise_equal(ours, (given + 1.5) * (given + 1.5))
        assert ours.stride() == x.stride()
    assert compilations == {"one": 2, "any": 0}


def test_threads_that_race_compile_once(compilations: dict[str, int]):
    x = torch.randn(8)
    unit = unit_of({"x": x}, {"a": (aten.add.Tensor, ("x", 3.0))}, ["a"])
    begin = threading.Barrier(4)
    found: list[Tensor] = []

    def run() -> None:
        begin.wait()
        found.append(unit(x))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for ours in found:
        assert_bitwise_equal(ours, x + 3)
    assert compilations == {"one": 1, "any": 0}


SCRIPT = """#!/bin/sh
for argument in "$@"; do
    case "$argument" in *.cpp) source=$argument ;; esac
done
if [ -n "$source" ] && grep -q " kernel(" "$source"; then
    {check}
fi
exec g++ "$@"
"""

MEETS = """touch "{folder}/begun.$$"
    tries=0
    while [ "$(ls "{folder}" | grep -c begun)" -lt 2 ]; do
        tries=$((tries + 1))
        [ $tries -gt 600 ] && exit 1
        sleep 0.1
    done"""
"""Goes on once there are two of it."""


@contextmanager
def compiler(folder: Path, check: str) -> Iterator[None]:
    """Inductor, with nothing in its cache, calls a compiler that runs ``check`` for each kernel."""
    script = folder / "compiler"
    script.write_text(SCRIPT.replace("{check}", check.replace("{folder}", str(folder))))
    script.chmod(0o755)
    settings = {"cpp.cxx": (str(script),), "compile_threads": 2}
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    cpp_builder.cpp_compiler_search.cache_clear()
    try:
        with config.patch(settings):
            yield
    finally:
        cpp_builder.cpp_compiler_search.cache_clear()
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
        if before is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def two_units(x: Tensor) -> Units:
    units = Units()
    for name, target in (("a", aten.exp.default), ("b", aten.sin.default)):
        steps: dict[str, Step] = {name: (target, ("x",))}
        unit_of({"x": x}, steps, [name], units=units)
    return units


def test_compilers_of_all_units_run_at_once(tmp_path: Path):
    """Each waits for the other one to have begun."""
    x = torch.randn(40, 30)
    units, told = two_units(x), []
    with compiler(tmp_path, MEETS):
        units.compile(lambda *progress: told.append(progress))
    assert told == [("compile kernels", done, 2) for done in range(3)]
    for unit, expected in zip(units, (x.exp(), x.sin()), strict=True):
        assert not unit.eager
        torch.testing.assert_close(unit(x), expected)


def test_a_unit_that_its_compiler_refuses_is_told_of_and_runs_as_it_is(tmp_path: Path):
    x = torch.randn(40, 31)
    units = two_units(x)
    with (
        compiler(tmp_path, 'grep -q "exp()" "$source" && exit 1'),
        pytest.warns(UserWarning, match=r"(?s)fused_exp_\w+ \(exp\) could not be compiled.*FXR210"),
    ):
        units.compile(lambda *_progress: None)
    first, second = units
    assert (first.eager, second.eager) == (True, False)
    assert_bitwise_equal(first(x), x.exp())
    torch.testing.assert_close(second(x), x.sin())


def test_an_interrupt_leaves_no_kernel_that_is_not_there(tmp_path: Path):
    """It hits when the first unit's compiler was started, and nobody has waited for it."""
    x = torch.randn(40, 32)
    units = two_units(x)

    def interrupt(_phase: str, done: int, _count: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with compiler(tmp_path, "sleep 1"):
        with pytest.raises(KeyboardInterrupt):
            units.compile(interrupt)
        for unit, expected in zip(units, (x.exp(), x.sin()), strict=True):
            torch.testing.assert_close(unit(x), expected)
            assert not unit.eager
