"""The passes between a captured graph and its stages, as one list.

Each pass is listed with its contract; ``python -m fxremat.passes`` prints them, and
:func:`add_pass` adds one. Passes before ``build`` run once for a captured graph, those from
``build`` on once for each form of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fxremat import torch_compat
from fxremat.errors import (
    ArgumentError,
    CaptureError,
    DataSizesError,
    GraphError,
    SizesError,
    refuse,
)
from fxremat.ir import Form
from fxremat.passes import check
from fxremat.passes.conditions import (
    backwards_have_what_they_read,
    draws_are_recorded,
    effects_run_once,
    launches_are_operations,
    nothing_crosses_the_loss_point,
    nothing_is_dead,
    nothing_is_detached,
    objects_are_in_operations,
    operations_are_classified,
    results_lie_as_before,
    sizes_are_numbers,
    sparse_tensors_are_inputs,
    stages_hold_operations,
    stages_run_in_order,
    tensors_are_on_target,
    values_follow,
)
from fxremat.passes.contract import Pass, PassConfig, always, statement_of
from fxremat.passes.fuse.again import computed_twice
from fxremat.passes.fuse.attention import with_attention_kernels
from fxremat.passes.fuse.layout import with_channels_last
from fxremat.passes.fuse.rewrite import fuse
from fxremat.passes.joint.build import build_joint_graph
from fxremat.passes.joint.data_sizes import gather_data_sizes
from fxremat.passes.joint.effects import with_effects
from fxremat.passes.joint.fixed_sizes import fix_sizes, placed_on
from fxremat.passes.joint.layouts import as_kernels_leave
from fxremat.passes.joint.nested import with_nested
from fxremat.passes.joint.scans import with_scans_in_pieces
from fxremat.passes.joint.sparse import with_sparse
from fxremat.passes.joint.user_kernels import with_launches
from fxremat.passes.split.rewrite import split
from fxremat.passes.split.runs import Large
from fxremat.passes.stages.linearize import linearize
from fxremat.passes.step_graph import StepGraph

UNLIMITED_BYTES = 1 << 60
"""More than any value takes."""


def runs_eagerly(config: PassConfig) -> bool:
    """Where operations run as torch runs them, on a device that is present.

    Returns whether ``config`` has neither units nor a target, but knows how kernels leave results.
    """
    return config.left is not None and config.units is None and config.target is None


def has_units(config: PassConfig) -> bool:
    """Where operations are compiled as units.

    Returns whether ``config`` has a table of units: groups of operations that Inductor compiles as
    one.
    """
    return config.units is not None


def has_other_device(config: PassConfig) -> bool:
    """Where the step is estimated for a device that is not a CPU, where it was traced.

    Returns whether ``config.target`` is such a device.
    """
    return config.target is not None and config.target.type != "cpu"


def has_parts(config: PassConfig) -> bool:
    """Where the form has values that are computed in parts.

    Returns whether ``config.form`` does.
    """
    return config.form.has_parts


def _take_objects(graph: StepGraph, *, config: PassConfig) -> StepGraph:
    """Replace each operator that runs inner graphs, such as ``torch.cond``, by one operation."""
    module = with_nested(graph.module)
    return graph if module is graph.module else graph.changed(module)


def _cut_scans(graph: StepGraph, *, config: PassConfig) -> StepGraph:
    """Cut long scans into pieces, each of which can be recomputed by itself."""
    module = with_scans_in_pieces(graph.module)
    return graph if module is graph.module else graph.changed(module)


def _take_sparse(graph: StepGraph, *, config: PassConfig) -> StepGraph:
    """Replace operations that return sparse tensors by operations on dense ones."""
    module = with_sparse(graph.module)
    return graph if module is graph.module else graph.changed(module)


def _take_launches(graph: StepGraph, *, config: PassConfig) -> StepGraph:
    """Replace each launch of a user's Triton kernel by an operation named after the kernel."""
    module = with_launches(graph.module)
    return graph if module is graph.module else graph.changed(module)


def _gather_data_sizes(graph: StepGraph, *, config: PassConfig) -> StepGraph:
    """Replace operations on sizes that depend on data by one operation that contains them."""
    module = gather_data_sizes(
        graph.module,
        forward_output_count=graph.forward_output_count,
        bounds=config.target is not None,
        may_break=config.may_break,
    )
    return graph if module is graph.module else graph.changed(module)


def _lay_as_kernels(graph: StepGraph, *, config: PassConfig) -> StepGraph:
    """Give each tensor the layout that its kernel produces."""
    assert config.left is not None
    module = as_kernels_leave(graph.module, config.left)
    return graph if module is graph.module else graph.changed(module)


def _take_effects(graph: StepGraph, *, config: PassConfig) -> StepGraph:
    """Replace each operator with an ordered effect by an operation that runs once."""
    module = with_effects(graph.module)
    return graph if module is graph.module else graph.changed(module)


def _fix_sizes(graph: StepGraph, *, config: PassConfig) -> StepGraph:
    """Replace sizes that are symbols by numbers that keep their expression.

    Returns ``graph`` itself where no size is a symbol.
    """
    module, sizes = fix_sizes(graph.module)
    return graph if module is graph.module else graph.changed(module, sizes=sizes)


def _lay_channels_last(graph: StepGraph, *, config: PassConfig) -> StepGraph:
    """Give tensors of convolutions the channels-last layout where Inductor would."""
    module = with_channels_last(graph.module)
    return graph if module is graph.module else graph.changed(module)


def _place(graph: StepGraph, *, config: PassConfig) -> StepGraph:
    """Move all tensors to the device that the step is estimated for."""
    assert config.target is not None
    return graph.changed(placed_on(graph.module, config.target))


def _compile_attention(graph: StepGraph, *, config: PassConfig) -> StepGraph:
    """Replace each FlexAttention on a GPU by a unit, which Inductor compiles."""
    module = with_attention_kernels(graph.module, config.attention_units)
    if module is graph.module:
        return graph
    if config.target is None:
        config.attention_units.compile(config.progress, note=config.note)
    return graph.changed(module)


def _build(graph: StepGraph, *, config: PassConfig) -> StepGraph:
    """Normalize the graph, and classify its operations as forward and backward."""
    joint = build_joint_graph(
        graph.module,
        forward_output_count=graph.forward_output_count,
        mutated_primals=graph.mutated_primals,
        exact=config.is_exact,
        shared=config.form.shared,
        sizes=graph.sizes,
        can_replace=config.can_replace,
    )
    return graph.as_joint(joint)


def _split(graph: StepGraph, *, config: PassConfig) -> StepGraph:
    """Compute runs of operations some rows at a time where their values are large."""
    form = config.form
    module = split(
        graph.joint,
        large_in(form),
        config.other_bits if form.exact else None,
        early_gradients=form.early_gradients,
        expected=config.expected,
        looks=config.looks,
        most_operations=config.effort.run_operations,
    )
    return graph if module is None else graph.changed(module)


def large_in(form: Form) -> Large:
    """Return which values are too large to exist whole in ``form``: they are computed in parts."""
    return Large(
        form.parts_bytes or UNLIMITED_BYTES,
        frozenset(form.peak),
        form.peak_bytes,
        form.inner_bytes or None,
    )


def _linearize(graph: StepGraph, *, config: PassConfig) -> StepGraph:
    """Cut the forward into stages; each backward operation belongs to one of them."""
    return graph.as_line(linearize(graph.joint, config.effort))


def _write_twice(graph: StepGraph, *, config: PassConfig) -> StepGraph:
    """Let backwards compute values that one of their kernels can write on the way.

    Then the forward need not keep these values for them.
    """
    return graph.changed(computed_twice(graph.line))


def _fuse(graph: StepGraph, *, config: PassConfig) -> StepGraph:
    """Replace operations of a stage by units, which Inductor compiles as one."""
    assert config.units is not None
    device = graph.joint.device
    missing = torch_compat.missing_compiler(device)
    if missing is not None:
        raise ArgumentError(
            f"executor='inductor' generates kernels for {device.type}, but {missing}: install one, "
            "or use executor='eager'",
            argument="executor",
            value="inductor",
            code="FXR408",
        )
    module = fuse(graph.line, config.units)
    if config.target is None:
        config.units.compile(config.progress, note=config.note)
    return graph.changed(module)


_BUILD = Pass(
    "build",
    _build,
    requires=(
        sizes_are_numbers,
        objects_are_in_operations,
        launches_are_operations,
        effects_run_once,
        sparse_tensors_are_inputs,
    ),
    ensures=(nothing_is_detached, nothing_is_dead, values_follow, draws_are_recorded),
    raises={
        CaptureError: "an operation waits for other processes in a way that cannot be measured",
        SizesError: "a size is still a symbol",
        GraphError: "the graph is not what AOTAutograd promises: an operation writes into its "
        "arguments, or a value was not traced",
    },
)
_LINEARIZE = Pass(
    "linearize",
    _linearize,
    requires=(operations_are_classified,),
    ensures=(
        stages_hold_operations,
        stages_run_in_order,
        backwards_have_what_they_read,
        nothing_crosses_the_loss_point,
    ),
)

PASSES: list[Pass] = [
    Pass("nested", _take_objects, ensures=(objects_are_in_operations,)),
    Pass("scans", _cut_scans, requires=(objects_are_in_operations,)),
    Pass(
        "sparse",
        _take_sparse,
        requires=(objects_are_in_operations,),
        ensures=(sparse_tensors_are_inputs,),
        raises={
            CaptureError: "the gradient of an output is sparse, or an operation that returns a "
            "sparse tensor draws random numbers",
        },
    ),
    Pass("launches", _take_launches, ensures=(launches_are_operations,)),
    Pass(
        "data sizes",
        _gather_data_sizes,
        raises={
            DataSizesError: "much of the model depends on such sizes, and can be captured in "
            "several graphs"
        },
    ),
    Pass("layouts", _lay_as_kernels, when=runs_eagerly),
    Pass(
        "sizes",
        _fix_sizes,
        ensures=(sizes_are_numbers,),
        raises={
            CaptureError: "a tensor is a nested one, whose rows differ in length",
            DataSizesError: "a size depends on data",
            SizesError: "a number that is not whole depends on a size in a way that cannot be "
            "followed, or a symbol is not the size of an input",
        },
    ),
    Pass("effects", _take_effects, requires=(sizes_are_numbers,), ensures=(effects_run_once,)),
    Pass(
        "channels last",
        _lay_channels_last,
        requires=(sizes_are_numbers,),
        ensures=(results_lie_as_before,),
        when=has_units,
    ),
    Pass(
        "place",
        _place,
        requires=(sizes_are_numbers,),
        ensures=(tensors_are_on_target, results_lie_as_before),
        when=has_other_device,
    ),
    Pass(
        "attention",
        _compile_attention,
        requires=(sizes_are_numbers, objects_are_in_operations),
        ensures=(results_lie_as_before,),
    ),
    _BUILD,
    Pass(
        "split",
        _split,
        requires=(operations_are_classified,),
        ensures=(nothing_is_dead, values_follow, results_lie_as_before),
        when=has_parts,
    ),
    _LINEARIZE,
    Pass(
        "write twice",
        _write_twice,
        requires=(stages_hold_operations,),
        ensures=(values_follow, results_lie_as_before),
        when=has_units,
    ),
    replace(_LINEARIZE, when=has_units),
    Pass(
        "fuse",
        _fuse,
        requires=(stages_hold_operations,),
        ensures=(nothing_is_dead, values_follow, results_lie_as_before),
        raises={ArgumentError: "no compiler makes kernels for the device"},
        when=has_units,
    ),
    replace(_LINEARIZE, when=has_units),
]
"""All passes, in the order in which they run. A name that occurs more than once refers to the first
pass of that name."""

_BUILT_IN = tuple(PASSES)


def add_pass(new: Pass, *, after: str) -> None:
    """Add a pass to :data:`PASSES`.

    A pass that changes operations goes after ``build`` or ``split``; one that reads stages, and
    changes nothing, after ``linearize``. Processes that train together must all have it.

    Args:
        new: the pass. Its name becomes a setting that costs and plans hold for.
        after: the name of the pass that precedes it.

    Raises:
        ArgumentError: ``after`` names no pass, or the list has a pass of that name already.
    """
    names = [entry.name for entry in PASSES]
    if after not in names:
        refuse("after", after, f"one of {', '.join(dict.fromkeys(names))}")
    if new.name in names:
        refuse("name", new.name, "another one than the names in fxremat.passes.pipeline.PASSES")
    PASSES.insert(names.index(after) + 1, new)


def added_passes() -> tuple[str, ...]:
    """Return the names of passes that :func:`add_pass` has added, in the order of the list."""
    return tuple(entry.name for entry in PASSES if entry not in _BUILT_IN)


def run_passes(
    graph: StepGraph, *, config: PassConfig, first: str | None = None, before: str | None = None
) -> StepGraph:
    """Run the passes of :data:`PASSES` that ``config`` asks for, and return the graph they make.

    Args:
        graph: what the pass before ``first`` returned.
        config: what passes are given besides the graph.
        first: name of the first pass that may run; by default that of the list.
        before: name of the pass before which to stop; by default all passes run.

    Raises:
        GraphError: a pass refuses its graph, or violates its contract and ``FXREMAT_CHECK=1`` is in
            the environment. The error names the pass and the node.
        FxrematError: as the passes raise it.
    """
    names = [entry.name for entry in PASSES]
    begin = 0 if first is None else names.index(first)
    end = None if before is None else names.index(before)
    checks = check.is_wanted()
    for entry in PASSES[begin:end]:
        if entry.when(config):
            try:
                if checks:
                    graph = check.run_checked(entry, graph, config=config)
                else:
                    graph = entry.run(graph, config=config)
            except GraphError as error:
                raise GraphError(
                    f"pass {entry.name!r}: {error.message}", code=error.code
                ) from error
    return graph


def passes_page() -> str:
    """Return a page of Markdown that lists all passes with their contracts (``docs/passes.md``)."""
    return "\n".join(_page_lines())


def _page_lines() -> Iterator[str]:
    yield "# Passes"
    yield ""
    yield "These passes turn a captured graph into stages. They run in this order. `make format`"
    yield "writes this page from the list of passes. [Extending](extending.md#a-pass) adds a pass."
    yield ""
    yield "Each pass has a contract: what it requires of the graph, and what it ensures. With"
    yield "`FXREMAT_CHECK=1` in the environment, contracts are checked as passes run. A violated"
    yield "contract raises a `GraphError` that names the pass and the node."
    yield ""
    yield "Every pass must keep these conditions:"
    yield ""
    yield from (f"* {statement_of(condition)}." for condition in check.INVARIANTS)
    printed: set[str] = set()
    for number, entry in enumerate(PASSES, 1):
        yield f"\n## {number}. {entry.name}\n"
        if entry.name in printed:
            yield f"The same pass as above.{_when(entry)}"
        else:
            yield f"{statement_of(entry.run)}.{_when(entry)}"
            yield from _contract_lines(entry)
        printed.add(entry.name)


def _contract_lines(entry: Pass) -> Iterator[str]:
    lines = [
        *(f"* Requires: {statement_of(condition)}." for condition in entry.requires),
        *(f"* Ensures: {statement_of(condition)}." for condition in entry.ensures),
        *(f"* Raises `{kind.__name__}`: {when}." for kind, when in entry.raises.items()),
    ]
    if lines:
        yield ""
        yield from lines


def _when(entry: Pass) -> str:
    """Return the sentence that says when a pass runs; an empty string if it always does."""
    if entry.when is always:
        return ""
    statement = statement_of(entry.when)
    return f" Runs {statement[0].lower()}{statement[1:]}."
