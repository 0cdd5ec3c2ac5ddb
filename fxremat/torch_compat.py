"""The only file that touches private torch names.

Checked on torch 2.11.0, 2.13.0 and 2.15.0; the supported range is 2.11 to 2.15. When
another torch breaks something, the repair belongs here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, count
from typing import Any

import torch
from torch import fx

from fxremat.errors import CostError

BoxedCallable = Callable[[list[Any]], Sequence[Any]]


def aot_autograd_backend(
    *,
    forward_compiler: Callable[..., BoxedCallable],
    backward_compiler: Callable[..., BoxedCallable],
    inference_compiler: Callable[..., BoxedCallable],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
) -> Callable[..., Any]:
    """A Dynamo backend that hands the joint graph to ``partition``."""
    from torch._dynamo.backends.common import aot_autograd  # noqa: PLC0415

    # Input mutations stay outside the graph (a copy after the forward), so the joint
    # graph is functional and may be reordered and recomputed freely.
    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=forward_compiler,
        bw_compiler=backward_compiler,
        inference_compiler=inference_compiler,
        partition_fn=partition,
        keep_inference_input_mutations=False,
    )
    return backend


def capture_settings() -> contextlib.AbstractContextManager[Any]:
    """Settings under which Dynamo captures a call; they cost some 20 µs a call.

    Loggers are traced through as if they were not there, because ``warning_once`` in a
    loss would break the graph. A number that a module counts with is a symbol once it changes,
    as a size is; a float is not.
    """
    from torch._dynamo import config  # noqa: PLC0415

    logging.getLogger("torch._dynamo.metrics_context").addFilter(_is_no_failed_metric)
    logging.getLogger("torch._subclasses.fake_tensor").addFilter(_is_no_wrong_shape)
    patched: contextlib.AbstractContextManager[Any] = config.patch(**_dynamo_settings())
    return patched


def _is_no_failed_metric(record: logging.LogRecord) -> bool:
    """Torch 2.11 logs an error when it cannot write down which functions it ignores."""
    return "logging compilation metrics" not in record.getMessage()


def _is_no_wrong_shape(record: logging.LogRecord) -> bool:
    """Shapes that do not fit are raised: they need not be logged as well, with a traceback."""
    return "failed while attempting to run meta" not in record.getMessage()


def _dynamo_settings() -> dict[str, Any]:
    from torch._dynamo import config  # noqa: PLC0415

    # Looked up anew each time: libraries add methods when they are imported.
    names = ("debug", "info", "warn", "error", "exception", "critical", "log")
    methods = {m for name, m in vars(logging.Logger).items() if name.startswith(names)}
    settings: dict[str, Any] = {
        "recompile_limit": 256,
        "accumulated_recompile_limit": 4096,
        "ignore_logging_functions": methods,
        "allow_unspec_int_on_nn_module": True,
        "specialize_float": True,
        "skip_nnmodule_hook_guards": False,  # hooks may be added, or removed, later
        "optimize_ddp": False,  # inside one that wraps the model the graph would be cut
    }
    if not hasattr(config, "ignore_logging_functions"):
        settings["ignore_logger_methods"] = settings.pop("ignore_logging_functions")
    return settings


def without_donated_buffers() -> contextlib.AbstractContextManager[Any]:
    """Nothing emitted writes into saved tensors; donating them forbids ``retain_graph``."""
    from torch._functorch import config  # noqa: PLC0415

    patched: contextlib.AbstractContextManager[Any] = config.patch(donated_buffer=False)
    return patched


def allow_retained_graphs() -> None:
    """Tell the step being compiled that it donates no buffers.

    Left untold, it compares nothing with none of them in each backward, under whatever
    setting there is by then, and refuses ``retain_graph=True``.
    """
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def is_backward_node(node: fx.Node) -> bool:
    """Whether AOTAutograd traced ``node`` while differentiating."""
    return node.meta.get("partitioner_tag") == "is_backward"


def sequence_number(node: fx.Node) -> int | None:
    """Autograd's sequence number: a backward node has that of its forward operation."""
    number = node.meta.get("seq_nr")
    return number if isinstance(number, int) else None


def shell_log(adopt: Callable[[Any], Any]) -> Any:
    """A mode that follows memory of tensors without data: ``peak_bytes``, of what it saw made.

    Storages count from the operation that makes them until nobody holds them.

    Args:
        adopt: what is computed with in place of a tensor that has data, or is on ``meta``.
    """
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC0415
    from torch.utils._pytree import tree_leaves, tree_map  # noqa: PLC0415

    class ShellLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.alive: dict[int, StorageAlive] = {}
            self.peak_bytes = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            args, kwargs = tree_map(lambda x: x if is_fake(x) else adopt(x), (args, kwargs or {}))
            given = {storage_key(t) for t in tree_leaves((args, kwargs)) if is_fake(t)}
            result = func(*args, **kwargs)
            for tensor in tree_leaves(result):
                if is_fake(tensor) and storage_key(tensor) not in given:
                    self.alive.setdefault(storage_key(tensor), StorageAlive(tensor))
            self.alive = {key: one for key, one in self.alive.items() if one}
            self.peak_bytes = max(self.peak_bytes, sum(s.nbytes for s in self.alive.values()))
            return result

    return ShellLog()


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage while the tensor is alive."""
    return int(tensor.untyped_storage()._cdata)


def is_fake(tensor: object) -> bool:
    """Whether ``tensor`` has no data."""
    from torch._subclasses.fake_tensor import FakeTensor  # noqa: PLC0415

    return isinstance(tensor, FakeTensor)


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether running ``node`` advances a random generator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # Fused attention carries the tag, yet draws nothing unless it drops something.
    arguments = _named_arguments(node, target)
    probability = arguments.get("dropout_p", arguments.get("dropout", arguments.get("p")))
    if isinstance(probability, (int, float)) and probability == 0.0:
        return False
    return arguments.get("train") is not False


def _named_arguments(node: fx.Node, target: torch._ops.OpOverload) -> dict[str, Any]:
    schema = target._schema.arguments
    named = {a.name: a.default_value for a in schema if a.has_default_value()}
    named.update({a.name: value for a, value in zip(schema, node.args, strict=False)})
    named.update(node.kwargs)
    return named


def boxed_code(graph: fx.Graph) -> None:
    """Make ``graph``'s code take its arguments in one list, which it empties."""
    from torch.fx.graph import _BoxedCodeGen  # noqa: PLC0415

    graph.set_codegen(_BoxedCodeGen())


class GraphOfModules(fx.GraphModule):
    """A graph that calls graphs, whose code is not torch's. Theirs stays as it is."""

    def take_code(self, source: str, forward: Callable[..., Any]) -> None:
        """Run ``forward``, whose source is ``source``, from now on."""
        self._code = source
        self._lineno_map, self._prologue_start = None, 0
        type(self).forward = forward


def graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module of ``graph`` whose code is written when it is first asked for."""
    from torch.fx._lazy_graph_module import (  # noqa: PLC0415
        _make_graph_module,
        _use_lazy_graph_module,
    )

    with _use_lazy_graph_module(True):
        made: fx.GraphModule = _make_graph_module(root, graph)
    return made


class AllocationLog:
    """What a device's allocator did between entering and leaving the context.

    Of CUDA's it tells the blocks that are handed out, and no statistics are reset for it.

    A thread has one profiler.

    Args:
        device: whose allocator.
        make_way: ends this log when another one, or a profile of the user's, begins in its
            thread; ``None``: it does not make way.

    Attributes:
        events: after leaving, ``(mark, signed bytes)`` of each allocation and release
            in order, where ``mark`` is the last name passed to :meth:`mark`.
    """

    def __init__(
        self, device: torch.device | None = None, *, make_way: Callable[[], None] | None = None
    ) -> None:
        self.events: list[tuple[str, int]] = []
        self._make_way = make_way
        self._on_cuda = device is not None and device.type == "cuda"

    def __enter__(self) -> AllocationLog:
        profiler: Any = torch.autograd
        _make_way()
        experimental = torch._C._profiler._ExperimentalConfig()
        state = profiler.ProfilerState.CPU
        try:
            profiler._enable_profiler_legacy(
                profiler.ProfilerConfig(state, False, True, False, False, False, experimental)
            )
        except RuntimeError as error:
            raise CostError(
                f"the allocator cannot be watched: {error}. Plan before the profiler starts: "
                "compile with, or run once, the shapes of the step that is profiled"
            ) from error
        if self._make_way is not None:
            _making_way[self] = self._make_way
            _let_profiles_begin()
        return self

    def mark(self, name: str) -> None:
        """Name what follows."""
        with torch.autograd.profiler.record_function(_MARK + name):
            pass

    def forget(self) -> None:
        """Of a thread that is gone, and its profiler with it."""
        _making_way.pop(self, None)
        _let_profiles_begin()

    def __exit__(self, *exc_info: object) -> None:
        self.forget()
        threads: Any = torch._C._autograd._disable_profiler_legacy()
        start = threads[0][0]
        records = [r for thread in threads for r in thread]
        if len(threads) > 1:
            records.sort(key=start.cpu_elapsed_us)
        current = ""
        for record in records:
            kind = record.kind()
            if kind == "push" and record.name().startswith(_MARK):
                current = record.name()[len(_MARK) :]
            elif kind == "memory_alloc":
                change = record.cuda_memory_usage() if self._on_cuda else record.cpu_memory_usage()
                if change:  # none: of the other device
                    self.events.append((current, change))

    @property
    def peak_bytes(self) -> int:
        """Most bytes at any instant, less those at the start; never negative."""
        return max(0, *accumulate(change for _mark, change in self.events), 0)


_MARK = "fxremat mark "  # no operator's name begins so

_making_way: dict[AllocationLog, Callable[[], None]] = {}
"""Logs that go on until another one is needed in their thread."""


def _make_way() -> None:
    for make_way in list(_making_way.values()):
        make_way()


def allocator_settings() -> dict[str, Any] | None:
    """How torch's caching allocator of CUDA is set, by the names of its snapshot.

    ``None`` where another one is in use: the driver's (``cudaMallocAsync``) or a plugged-in one.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return None
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    found: dict[str, Any] = snapshot.get("allocator_settings", {})
    return found


def free_saved(ctx: Any) -> None:
    """In the backward of a function: it holds the tensors that it saved no longer."""
    ctx.maybe_clear_saved_tensors()


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder of the joint graph is the gradient of an output."""
    return node.op == "placeholder" and node.name.startswith("tangents_")


def is_clone(node: fx.Node) -> bool:
    """Whether ``node`` copies its argument."""
    return node.target is torch.ops.aten.clone.default


def fake_bytes_like(node: fx.Node, nbytes: int) -> torch.Tensor:
    """Bytes on the CPU without data, in the fake mode that traced ``node``."""
    from torch._subclasses.fake_tensor import FakeTensor  # noqa: PLC0415

    value = node.meta["val"]
    for item in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(item, FakeTensor):
            with item.fake_mode:
                return torch.empty(nbytes, dtype=torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def mutated_primals(module: fx.GraphModule) -> list[int]:
    """Indices of the primals whose new value the joint graph returns."""
    from torch._functorch._aot_autograd.descriptors import (  # noqa: PLC0415
        InputMutationAOTOutput,
    )

    described = module.graph.output_node().meta.get("desc", ())
    mutated = [d.mutated_input for d in described if isinstance(d, InputMutationAOTOutput)]
    primals = [n for n in module.graph.nodes if n.op == "placeholder" and not is_tangent(n)]
    return [i for i, node in enumerate(primals) if node.meta.get("desc") in mutated]


@contextlib.contextmanager
def real_execution() -> Iterator[None]:
    """Run operations for real although a trace is going on."""
    from torch._dispatch.python import no_python_dispatcher  # noqa: PLC0415
    from torch.utils._python_dispatch import _disable_current_modes  # noqa: PLC0415

    with _disable_current_modes(), no_python_dispatcher(), torch._C._DisableAutocast():
        yield


def kernel_settings() -> dict[str, object]:
    """Global settings that choose kernels or change their results, by torch's names.

    Not among them: which attention is chosen, which the captured graph says, and autotuning,
    without which emitted graphs run. Some 4 µs.
    """
    backends = torch.backends
    precision: Any = torch._C._get_fp32_precision_getter
    found: dict[str, object] = {
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.backends.cudnn.enabled": backends.cudnn.enabled,
        "torch.backends.cudnn.deterministic": backends.cudnn.deterministic,
        "torch.backends.mkldnn.enabled": torch._C._get_mkldnn_enabled(),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }
    for backend, operation in _PRECISIONS:
        found[f"torch.backends.{backend}.{operation}.fp32_precision"] = precision(
            backend, operation
        )
    matmul = backends.cuda.matmul
    found["torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction"] = (
        matmul.allow_fp16_reduced_precision_reduction
    )
    found["torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction"] = (
        matmul.allow_bf16_reduced_precision_reduction
    )
    return found


_PRECISIONS = (
    ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"),
    ("mkldnn", "conv"), ("mkldnn", "rnn"),
)  # fmt: skip


@contextlib.contextmanager
def without_autotuning() -> Iterator[None]:
    """No trying out of algorithms (``torch.backends.cudnn.benchmark``) inside.

    It takes workspaces of any size, anew in each thread, and what is computed again may take
    another algorithm than the first time.
    """
    if not torch.backends.cudnn.benchmark:
        yield
        return
    torch._C._set_cudnn_benchmark(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_benchmark(True)


def clear_library_workspaces() -> None:
    """Free the workspaces that torch holds for cuBLAS, which are allocated again when needed."""
    clear: Any = torch._C._cuda_clearCublasWorkspaces
    clear()


def delay_device(device: torch.device, seconds: float) -> None:
    """Have the current stream of a CUDA device do nothing for about ``seconds``."""
    sleep: Any = torch.cuda._sleep
    with torch.cuda.device(device):
        sleep(int(seconds * _CYCLES_PER_S))


_CYCLES_PER_S = 2e9
"""Clock of a GPU, rather too fast: a delay must not be shorter than asked for."""


def boxed(function: BoxedCallable) -> BoxedCallable:
    """Mark ``function`` as taking its arguments in one list that it may empty."""

    def run(args: list[Any]) -> Sequence[Any]:
        return function(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def primal_sources(joint: fx.GraphModule) -> list[int | None]:
    """For each primal the index of the compiled function's input that it is."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput  # noqa: PLC0415

    primals = [n for n in joint.graph.nodes if n.op == "placeholder" and not is_tangent(n)]
    described = [n.meta.get("desc") for n in primals]
    return [d.idx if isinstance(d, PlainAOTInput) else None for d in described]


def has_symbols(tensor: torch.Tensor) -> bool:
    """Whether any size, stride or offset of ``tensor`` is a symbol, or follows one."""
    return bool(getattr(tensor, "_has_symbolic_sizes_strides", False))


def expression_of(number: torch.SymInt) -> tuple[Any, int | None]:
    """The sympy expression of a symbolic size, and its value at the sizes of the capture.

    No value where it depends on data.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # noqa: PLC0415

    expression = number.node.expr
    if free_unbacked_symbols(expression):
        return expression, None
    return expression, int(number.node.hint)


def symbol_hint(number: torch.SymInt, symbol: Any) -> int:
    """The value at the capture of a symbol in the expression of ``number``."""
    environment: Any = number.node.shape_env
    hints = getattr(environment, "backed_var_to_val", None) or environment.var_to_val
    return int(hints[symbol])


def symbol_most(number: torch.SymInt, symbol: Any) -> int | None:
    """The largest value of a symbol for which what was captured holds; ``None``: any."""
    upper = number.node.shape_env.var_to_range[symbol].upper
    return int(upper) if upper.is_Integer else None


def python_text(expression: Any) -> str:
    """A sympy expression of sizes as Python code."""
    from torch.utils._sympy.printers import PythonPrinter  # noqa: PLC0415

    text: str = PythonPrinter().doprint(expression)
    return text


def meta_storage(nbytes: int) -> torch.UntypedStorage:
    """A storage without data."""
    return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()


def fake_tensor(
    like: torch.Tensor,
    storage: torch.UntypedStorage,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    *,
    device: torch.device | None = None,
) -> torch.Tensor:
    """A tensor without data, of the dtype, the device and the fake mode of ``like``.

    ``device`` takes the place of its own. It need not be here.
    """
    from torch._subclasses.fake_tensor import FakeTensor  # noqa: PLC0415
    from torch.utils._python_dispatch import _disable_current_modes  # noqa: PLC0415

    with _disable_current_modes():
        made = torch.empty(0, dtype=like.dtype, device="meta")
        made.set_(storage, offset, tuple(shape), tuple(stride))
        return FakeTensor(getattr(like, "fake_mode", None), made, device or like.device)


def shell(
    tensor: torch.Tensor, mode: Any, storages: dict[int, torch.UntypedStorage], device: torch.device
) -> torch.Tensor:
    """A tensor like ``tensor`` that has no data, in a fake mode and on ``device``.

    Args:
        tensor: it may be without data itself, such as one on ``meta``.
        mode: the fake mode.
        storages: of shells, by those of what they stand for; new ones are added.
        device: it need not be here.
    """
    from torch._subclasses.fake_tensor import FakeTensor  # noqa: PLC0415
    from torch.utils._python_dispatch import _disable_current_modes  # noqa: PLC0415

    storage = tensor.untyped_storage()
    key = storage_key(tensor)
    with _disable_current_modes(), torch.no_grad():
        if key not in storages:
            storages[key] = meta_storage(storage.nbytes())
        made = torch.empty(0, dtype=tensor.dtype, device="meta")
        made.set_(storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())
        found: torch.Tensor = FakeTensor(mode, made, device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(found, tensor.requires_grad)
    return found.requires_grad_(tensor.requires_grad) if tensor.is_leaf else found


def fake_mode() -> Any:
    """A mode in which operations compute shapes and no data; its ``from_tensor`` makes shells.

    Real tensors that a forward finds outside its module are taken for shells, too.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415

    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_mode_of(tensors: Iterable[torch.Tensor]) -> Any:
    """That of the first of ``tensors`` that has no data; else a new one."""
    found = (getattr(tensor, "fake_mode", None) for tensor in tensors)
    return next((mode for mode in found if mode is not None), None) or fake_mode()


@contextlib.contextmanager
def without_shape_errors_logged() -> Iterator[None]:
    """Shapes that do not fit are raised and not logged with their traceback as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def failure_cause(error: BaseException) -> BaseException:
    """What really went wrong, for an error that Dynamo wrapped."""
    from torch._dynamo.exc import BackendCompilerFailed  # noqa: PLC0415

    while isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    return error


def capture_failures() -> tuple[type[BaseException], ...]:
    """What Dynamo raises when a model cannot be captured as one graph."""
    from torch._dynamo.exc import TorchDynamoException  # noqa: PLC0415

    return (TorchDynamoException,)


_functions = count()


def with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``function``. Dynamo keeps what it captures by code objects.

    It also remembers sizes that were seen to vary, by file, line and name: of one function's
    nothing must be known to another.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=f"call_{next(_functions)}")
    return call


def compile_whole(
    function: Callable[..., Any], backend: Callable[..., Any], *, dynamic: bool
) -> Any:
    """``function`` compiled as one graph; ``dynamic``: sizes that vary become symbols."""
    return torch.compile(
        function, backend=backend, fullgraph=True, dynamic=None if dynamic else False
    )


def never_uncompiled(
    ours: Callable[[object], bool], error: Callable[[str, int], Exception]
) -> None:
    """Let no code of ours run as it is where Dynamo may not compile it again.

    Dynamo runs code that it has compiled too often eagerly, and says so in its log alone.

    Args:
        ours: whether a backend is.
        error: what is raised instead, from the name of the setting that is the limit, and
            its value.
    """
    from torch._dynamo import config, convert_frame  # noqa: PLC0415

    module: Any = convert_frame
    exceeds: Callable[..., tuple[bool, str]] = module.exceeds_recompile_limit

    def asked(*args: Any) -> tuple[bool, str]:
        exceeded, name = exceeds(*args)
        if exceeded:  # who asks for which backend is told by nothing but its own frame
            backend = sys._getframe(1).f_locals["compiler_fn"]
            while hasattr(backend, "_torchdynamo_orig_backend"):
                backend = backend._torchdynamo_orig_backend
            if ours(getattr(backend, "compiler_fn", backend)):
                raise error(f"torch._dynamo.config.{name}", getattr(config, name))
        return exceeded, name

    module.exceeds_recompile_limit = asked


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """What was given to ``torch.compile``; any other module as it is."""
    from torch._dynamo import OptimizedModule  # noqa: PLC0415

    if not isinstance(model, OptimizedModule):
        return model
    inner: torch.nn.Module = model._orig_mod
    return inner


def let_sizes_vary(tensors: Sequence[torch.Tensor]) -> None:
    """Have the next capture take all sizes of ``tensors`` for symbols, where it can."""
    for tensor in tensors:
        for dim in range(tensor.dim()):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)


def data_dependent_errors() -> tuple[type[BaseException], ...]:
    """What a call without data raises when shapes or branches depend on data."""
    from torch._subclasses.fake_tensor import (  # noqa: PLC0415
        DataDependentOutputException,
        DynamicOutputShapeException,
    )
    from torch.fx.experimental.symbolic_shapes import (  # noqa: PLC0415
        GuardOnDataDependentSymNode,
    )

    return (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


def before_backward(outputs: object, check: Callable[[], None]) -> None:
    """Call ``check`` right before each backward of a compiled step, in its thread.

    Gradients are enabled there exactly if the backward is to be differentiated.
    """
    from torch.utils._pytree import tree_leaves  # noqa: PLC0415

    for leaf in tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            node: Any = leaf.grad_fn
            while node and "CompiledFunction" not in node.name():
                node = node.next_functions[0][0] if node.next_functions else None
            if node:
                node.register_prehook(lambda _gradients: check())
                return


def next_nodes() -> list[Any]:
    """Where the gradients go that the node of autograd's graph that runs now returns.

    One for each tensor that went into it; ``None`` for what needs no gradient.
    """
    node: Any = torch._C._current_autograd_node()
    return [function for function, _ in node.next_functions]


def will_accumulate(node: Any) -> bool | None:
    """Whether the backward that runs accumulates into a leaf, whose node this is.

    ``None``: it returns the gradient instead (``torch.autograd.grad``), or none runs.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


def current_backward() -> int:
    """The number of the backward that this thread runs; -1 outside any."""
    return int(torch._C._current_graph_task_id())


def keeps_graph() -> bool:
    """Whether the backward that runs was asked for with ``retain_graph``."""
    asked: Any = torch._C._autograd._get_current_graph_task_keep_graph
    return bool(asked())


def after_backward(call: Callable[[], None]) -> None:
    """Have ``call`` called once the backward that runs has ended, which raises what it raises."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each was written to; -1 where nobody counts."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # there are inference tensors
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def saved_elsewhere() -> bool:
    """Whether hooks put other tensors in place of those that autograd saves now.

    Not those of ``torch.utils.checkpoint``: they run the forward again, and what it saved the
    first time must go.
    """
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks
    hooks = top(False)
    return hooks is not None and "checkpoint" not in getattr(hooks[0], "__qualname__", "")


def stub_graphs(
    joint: fx.GraphModule, *, forward_output_count: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Graphs that tell AOTAutograd what goes in and out, and are never run.

    The forward returns its outputs and a token, one number on the CPU, for all that is saved; the
    backward takes the token and the tangents.
    """
    placeholders = joint.graph.find_nodes(op="placeholder")
    results = list(joint.graph.output_node().args[0])  # type: ignore[arg-type]
    examples = [n.meta["val"] for n in placeholders if isinstance(n.meta["val"], torch.Tensor)]
    token = examples[0].new_empty(1, dtype=torch.int64, device="cpu")

    def stub(inputs: Sequence[object], outputs: Sequence[object]) -> fx.GraphModule:
        graph = fx.Graph()
        made: dict[object, fx.Node] = {}
        for node in inputs:
            made[node] = graph.placeholder(node.name if isinstance(node, fx.Node) else "token")
        for node in outputs:
            if node not in made and (isinstance(node, fx.Node) or node is _TOKEN):
                made[node] = graph.call_function(_never_run)
        for node, own in made.items():
            own.meta = dict(node.meta) if isinstance(node, fx.Node) else {"val": token}
        graph.output(tuple(made.get(node, node) for node in outputs))  # type: ignore[arg-type]
        return fx.GraphModule(torch.nn.Module(), graph)

    tangents = [n for n in placeholders if is_tangent(n)]
    primals = [n for n in placeholders if not is_tangent(n)]
    forward = stub(primals, [*results[:forward_output_count], _TOKEN])
    return forward, stub([_TOKEN, *tangents], results[forward_output_count:])


_TOKEN = object()


def _never_run() -> None:
    raise AssertionError("a stub graph was run")


def differentiated_primals(joint: fx.GraphModule, *, forward_output_count: int) -> dict[int, int]:
    """Primals that get a gradient, and which of the tensors among all primals each is."""
    primals = [n for n in joint.graph.nodes if n.op == "placeholder" and not is_tangent(n)]
    results = list(joint.graph.output_node().args[0])  # type: ignore[arg-type]
    found: dict[int, int] = {}
    tensors = 0
    for i, (node, gradient) in enumerate(zip(primals, results[forward_output_count:], strict=True)):
        if isinstance(gradient, fx.Node):
            found[i] = tensors
        tensors += isinstance(node.meta["val"], torch.Tensor)
    return found


def bucket_bytes() -> tuple[int, ...]:
    """Of each buffer for gradients that a ``DistributedDataParallel`` around this call has."""
    if not torch.distributed.is_available():
        return ()
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    wrapper: Any = DistributedDataParallel
    active = wrapper._get_active_ddp_module()
    if active is None:
        return ()
    return tuple(p.numel() * p.element_size() for p in active.parameters() if p.requires_grad)


def around_optimizers(
    before: Callable[[torch.optim.Optimizer], None], after: Callable[[torch.optim.Optimizer], None]
) -> Callable[[], None]:
    """Have both called around each step of any optimizer; what is returned ends that."""
    from torch.optim.optimizer import (  # noqa: PLC0415
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    handles = (
        register_optimizer_step_pre_hook(lambda optimizer, *_given: before(optimizer)),
        register_optimizer_step_post_hook(lambda optimizer, *_given: after(optimizer)),
    )

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


_profile_begins: dict[str, Callable[..., Any]] = {}
"""What torch calls where a profile of the user's begins, as long as logs would be in its way."""

_profiles = threading.Lock()


def _let_profiles_begin() -> None:
    """Have logs make way before a profile of the user's begins, as long as there are any."""
    from torch.autograd import profiler  # noqa: PLC0415

    module: Any = profiler

    def made_way(begin: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            _make_way()
            return begin(*args, **kwargs)

        return run

    with _profiles:
        if _making_way and not _profile_begins:
            for name in ("_prepare_profiler", "_enable_profiler"):
                _profile_begins[name] = getattr(module, name)
                setattr(module, name, made_way(_profile_begins[name]))
        elif not _making_way:
            while _profile_begins:
                name, begin = _profile_begins.popitem()
                setattr(module, name, begin)


class StorageAlive:
    """Whether the memory of a tensor is still held by anyone; it holds none itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef  # noqa: PLC0415

        make: Any = StorageWeakRef
        self._reference = make(tensor.untyped_storage())
        self.nbytes = tensor.untyped_storage().nbytes()

    def __bool__(self) -> bool:
        return not self._reference.expired()


def call_instead(model: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Have ``call`` run wherever ``model`` is called, as ``nn.Module.compile`` does.

    ``None`` ends that.
    """
    model._compiled_call_impl = call


def called_instead(model: torch.nn.Module) -> object:
    """What runs wherever ``model`` is called, in the place of its own call; ``None`` if nothing."""
    found: object = model._compiled_call_impl
    return found


def own_call(model: torch.nn.Module) -> Callable[..., Any]:
    """The forward of ``model`` with its hooks around it, whatever runs instead."""
    found: Callable[..., Any] = model._call_impl
    return found


def wrapped_by(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside a ``DistributedDataParallel``; any other as it is."""
    if not torch.distributed.is_available():
        return model
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    if not isinstance(model, DistributedDataParallel):
        return model
    inner: torch.nn.Module = model.module
    return inner


def wrapped_anew(wrapper: torch.nn.Module, run: Callable[..., Any]) -> torch.nn.Module:
    """A ``DistributedDataParallel`` with all that ``wrapper`` has, whose forward calls ``run``.

    Both are one in all else: what is set on one is set on the other.
    """

    class Anew(type(wrapper)):  # type: ignore[misc]
        module = property(lambda _self: run)

    made: torch.nn.Module = Anew.__new__(Anew)
    object.__setattr__(made, "__dict__", wrapper.__dict__)
    return made
