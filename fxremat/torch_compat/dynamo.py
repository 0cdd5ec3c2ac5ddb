"""Dynamo: how a function is captured as a whole, and what is raised if it cannot be."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from fxremat.torch_compat.modes import in_dispatch_mode
from fxremat.torch_compat.storages import is_wrapper, wrapped_tensors
from fxremat.torch_compat.symbols import hint_of


def capture_settings(*, data_sizes: bool | None = None) -> contextlib.AbstractContextManager[Any]:
    """Return a context with the settings under which Dynamo captures, in its thread.

    With ``data_sizes`` it also captures operations whose results have sizes, or numbers, that
    depend on data, and raises all errors. If that is false, it breaks the graph at these; ``None``:
    as the user has set.

    Torch 2.11 has one set of settings for all threads: contexts that overlap overwrite each
    other's.

    Loggers are traced as if they were not there, because ``warning_once`` in a loss would break the
    graph. An integer or a float attribute of a module becomes a symbol once it changes, as a size
    does.
    """
    from torch._dynamo import config  # noqa: PLC0415

    _filter_logs()
    settings = _dynamo_settings()
    if data_sizes is not None:
        settings |= dict.fromkeys(_DATA_SIZES, data_sizes)
        settings["suppress_errors"] = not data_sizes
    patched: contextlib.AbstractContextManager[Any] = config.patch(**settings)
    return patched


_DATA_SIZES = ("capture_dynamic_output_shape_ops", "capture_scalar_outputs")


@cache  # an interrupt while a logger is looked up leaves logging locked for all other threads
def _filter_logs() -> None:
    logging.getLogger("torch._dynamo.metrics_context").addFilter(_is_no_failed_metric)
    logging.getLogger("torch._subclasses.fake_tensor").addFilter(_is_no_wrong_shape)
    for name in ("variables.tensor", "convert_frame"):
        logging.getLogger(f"torch._dynamo.{name}").addFilter(_is_no_break)


def _is_no_failed_metric(record: logging.LogRecord) -> bool:
    """Return whether a record is to be logged, as a filter.

    That is not an error that torch 2.11 logs if it cannot write down which functions it ignores.
    """
    return "logging compilation metrics" not in record.getMessage()


def _is_no_wrong_shape(record: logging.LogRecord) -> bool:
    """Return whether a record is to be logged, as a filter.

    Those of shapes that do not fit are not, since they are raised as errors anyway.
    """
    return "failed while attempting to run meta" not in record.getMessage()


def _is_no_break(record: logging.LogRecord) -> bool:
    """Return whether a record is to be logged, as a filter; cut records of failures to one line.

    Records of graph breaks are not, since graph breaks are reported otherwise.
    """
    message = record.getMessage()
    if message.startswith("WON'T CONVERT") and record.exc_info:
        error = record.exc_info[1]
        why = next(iter(str(error).splitlines()), "")
        what = message.splitlines()[0].strip()
        record.msg = f"{what}, it runs without a plan: {type(error).__name__}: {why}"
        record.args, record.exc_info, record.exc_text = (), None, None
    return not message.startswith("Graph break from")


def _dynamo_settings() -> dict[str, Any]:
    from torch._dynamo import config  # noqa: PLC0415

    # Looked up each time: libraries add methods when they are imported.
    names = ("debug", "info", "warn", "error", "exception", "critical", "log")
    methods = {m for name, m in vars(logging.Logger).items() if name.startswith(names)}
    settings: dict[str, Any] = {
        "recompile_limit": 256,
        "accumulated_recompile_limit": 4096,
        "ignore_logging_functions": methods,
        "allow_unspec_int_on_nn_module": True,
        "skip_nnmodule_hook_guards": False,  # hooks may be added, or removed, later
        # A function that Dynamo cannot capture runs eagerly, unless it must be captured whole.
        "suppress_errors": True,
        "optimize_ddp": False,  # it would cut the graph of a model inside a wrapper
    }
    if not hasattr(config, "ignore_logging_functions"):
        settings["ignore_logger_methods"] = settings.pop("ignore_logging_functions")
    return settings


_functions = count()

_OWN = "call_"


def with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with a new code object that calls ``function``.

    Dynamo caches what it captures by code object. It also remembers which sizes vary, by file, line
    and name: what it learned from one function must not affect another.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=f"{_OWN}{next(_functions)}")
    return call


def compile_function(
    function: Callable[..., Any], backend: Callable[..., Any], *, whole: bool, dynamic: bool
) -> Any:
    """Return ``function`` compiled by Dynamo, which captures it with :func:`capture_settings`.

    Everything else in a call uses the user's settings. ``whole`` says that it must be captured as
    one graph, ``dynamic`` that sizes may become symbols.
    """
    optimize: Any = torch._dynamo.optimize
    context = optimize(backend, nopython=whole, dynamic=None if dynamic else False)
    if callable(getattr(context, "callback", None)):  # it is not if compiling is disabled
        context.callback = _Capturing(context.callback, whole=whole)
    return context(function)


class _Capturing:
    """Dynamo's callback for frames that it has not captured, with :func:`capture_settings`.

    A frame is captured with sizes and numbers that depend on data. If that fails, it is captured
    without them: Dynamo breaks the graph where they are computed.

    Args:
        callback: the callback of Dynamo.
        whole: whether code must be captured as one graph, so that a break is an error as well.
    """

    def __init__(self, callback: Any, *, whole: bool) -> None:
        self._callback, self._whole = callback, whole
        self._torchdynamo_orig_backend = callback._torchdynamo_orig_backend  # read at each call
        self._breaking = weakref.WeakSet[CodeType]()

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if self._whole:
            with capture_settings(data_sizes=True):
                return self._callback(frame, *args, **kwargs)
        if frame.f_code not in self._breaking:
            try:
                with _attempting(), capture_settings(data_sizes=True):
                    return self._callback(frame, *args, **kwargs)
            except Exception as error:
                _log.debug("captured again, with breaks at sizes that depend on data: %s", error)
            self._breaking.add(frame.f_code)
        with capture_settings(data_sizes=False):
            return self._callback(frame, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._callback, name)


_log = logging.getLogger(__name__)
_attempt = threading.local()


@contextlib.contextmanager
def _attempting() -> Iterator[None]:
    before, _attempt.on = getattr(_attempt, "on", False), True
    try:
        yield
    finally:
        _attempt.on = before


def may_capture_again(error: BaseException) -> bool:
    """Return whether Dynamo captures code again, with breaks, where a backend raises ``error``."""
    return isinstance(error, Exception) and getattr(_attempt, "on", False)


def break_of(module: object) -> str | None:
    """Return why Dynamo breaks the graph at its end, with the user's line.

    Returns ``None`` if the graph is all of its function. ``module`` is the graph that Dynamo passes
    to a backend.
    """
    reason: Any = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    lines = [f"{line.filename}:{line.lineno}" for line in reason.user_stack[-1:]]
    return ": ".join([*lines, *reason.reason.splitlines()[:1]])


def caller_of_captured(package: str) -> tuple[str, bool]:
    """Return the line that calls the function that Dynamo captures now.

    Also return whether Python runs that line inside a function of :func:`compile_function`. Lines
    in the folder ``package`` are skipped.
    """
    library, caller = str(Path(torch.__file__).parent), ""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        code = frame.f_code
        if code.co_filename == __file__ and code.co_name.startswith(_OWN):
            return caller, True
        if not caller and not code.co_filename.startswith((library, package, "<")):
            caller = f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return caller, False


def captured_separately(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function`` and is captured by itself, not with its caller."""

    def captured(*args: Any, **kwargs: Any) -> Any:  # Dynamo skips forwards in torch's own files
        return function(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        return captured(*args, **kwargs)

    compiler: Any = torch.compiler
    disabled: Callable[..., Any] = compiler.disable(call, recursive=False)
    return disabled


def seen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function``, which Dynamo captures even in a file of torch."""

    def captured(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return captured


def is_passed_by(module: torch.nn.Module) -> bool:
    """Return whether Dynamo does not capture ``module`` when code that is not captured calls it.

    Modules without children do not count: a plan for a single operation gains nothing.
    """
    from torch._dynamo import trace_rules  # noqa: PLC0415

    has_parts = any(True for _ in module.children()) and "forward" not in vars(module)
    return has_parts and bool(trace_rules.check(type(module).forward))


def not_wrapped(error: Exception) -> Exception:
    """Make ``error`` also an error of Dynamo, which then raises it without wrapping; return it."""
    from torch._dynamo.exc import ShortenTraceback  # noqa: PLC0415

    kind = type(error)
    if not issubclass(kind, ShortenTraceback):
        named = {"__module__": kind.__module__, "__doc__": kind.__doc__, "first_useful_frame": None}
        error.__class__ = type(kind.__name__, (kind, ShortenTraceback), named)
    return error


def options_of(compiled: object, backend: Callable[..., Any]) -> Any:
    """Return the options of ``torch.compile(…, backend=backend, options=…)``, given its result.

    Returns ``None`` if ``compiled`` is not such a result.
    """
    from torch._dynamo import OptimizedModule  # noqa: PLC0415

    if isinstance(compiled, OptimizedModule):
        contexts: list[Any] = [compiled.dynamo_ctx]
    else:
        called: Any = getattr(compiled, "_compiled_call_impl", None) or compiled
        closure = getattr(called, "__closure__", None) or ()
        contexts = [cell.cell_contents for cell in closure]
    for context in contexts:
        callback: Any = getattr(context, "callback", None)
        while hasattr(callback, "_torchdynamo_orig_backend"):
            callback = callback._torchdynamo_orig_backend
        if getattr(callback, "compiler_fn", None) is backend:
            return callback.kwargs.get("options")
    return None


def results_of_captured(module: torch.fx.GraphModule) -> tuple[torch.Tensor, ...]:
    """Return empty tensors like those that a graph of Dynamo returns, at the captured sizes."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    values = (node.meta.get("example_value") for node in output.all_input_nodes)
    return tuple(
        torch.empty(
            [hint_of(size) for size in value.shape],
            dtype=value.dtype,
            device=value.device,
        )
        for value in values
        if isinstance(value, torch.Tensor)
    )


_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")


@contextlib.contextmanager
def sizes_vary(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let captures inside take all sizes of ``tensors`` as symbols, if possible.

    The marks are removed at the end, because Dynamo would capture again what it captured without
    them.
    """
    parts = [part for tensor in tensors for part in _parts_of(tensor)]
    before = [{k: v for k, v in vars(part).items() if k in _MARKS} for part in parts]
    for part, marks in zip(parts, before, strict=True):
        vars(part).update(copy.deepcopy(marks))  # marks are added in place
    for tensor in tensors:
        for dim in range(tensor.dim()):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    try:
        yield
    finally:
        for part, marks in zip(parts, before, strict=True):
            for name in _MARKS:
                vars(part).pop(name, None)
            vars(part).update(marks)


def _parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield ``tensor``, and the tensors that it wraps if it is of a wrapper subclass."""
    yield tensor
    if is_wrapper(tensor):
        for part in wrapped_tensors(tensor):
            yield from _parts_of(part)


_compiling = threading.local()


def compiled_now() -> CodeType | None:
    """Return the code object that Dynamo compiles now, or compiled last, in this thread.

    Only code that is compiled for this package's backends counts; ``None`` if there was none.
    """
    code: CodeType | None = getattr(_compiling, "code", None)
    return code


@dataclass(frozen=True)
class Rules:
    """How Dynamo is to treat code that is compiled for this package's backends.

    Attributes:
        ours: returns whether a backend is one of this package.
        too_often: returns the error to raise if code may not be compiled again, given the backend,
            the name of the setting that limits it, and its value.
        as_it_is: returns whether code must not be compiled again for a backend. It then runs
            eagerly, and the functions that it calls are compiled by themselves.
        in_mode: called if code runs eagerly because it is called under a dispatch mode.
    """

    ours: Callable[[object], bool]
    too_often: Callable[[object, str, int], BaseException]
    as_it_is: Callable[[object, CodeType], bool]
    in_mode: Callable[[], None]


@cache
def never_uncompiled(rules: Rules) -> None:
    """Make Dynamo apply ``rules`` where it would let code of this package's backends run eagerly.

    Dynamo runs code that was compiled too often eagerly, and only logs it. It also runs code that
    was once called under a ``TorchDispatchMode`` eagerly ever after, and says nothing. Code of
    other backends is treated as before.
    """
    from torch._dynamo import config, convert_frame  # noqa: PLC0415

    module: Any = convert_frame
    exceeds: Callable[..., tuple[bool, str]] = module.exceeds_recompile_limit
    entered: Callable[..., Any] = module.CatchErrorsWrapper.__call__

    def asked(*args: Any) -> tuple[bool, str]:
        exceeded, name = exceeds(*args)
        # Only the frame of the caller has the code and the backend.
        caller = sys._getframe(1).f_locals
        backend, code = _innermost(caller["compiler_fn"]), caller["code"]
        if rules.ours(backend):
            _compiling.code = code
            if rules.as_it_is(backend, code):
                raise _runs_as_it_is()
            if exceeded:
                raise rules.too_often(
                    backend, f"torch._dynamo.config.{name}", getattr(config, name)
                )
        return exceeded, name

    @functools.wraps(entered)
    def enter(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        if in_dispatch_mode() and rules.ours(_innermost(wrapper)):
            rules.in_mode()
            return _skipped_once()
        return entered(wrapper, *args, **kwargs)

    module.exceeds_recompile_limit = asked
    module.CatchErrorsWrapper.__call__ = enter


def _innermost(backend: Any) -> object:
    """Return the backend that Dynamo was given, without what Dynamo wraps it in."""
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return getattr(backend, "compiler_fn", backend)


def _skipped_once() -> Any:
    """Return what makes Dynamo leave one call, and what it calls, to Python this time only."""
    from torch._dynamo import types  # noqa: PLC0415

    names = vars(types)
    skip = names["FrameAction"].SKIP
    return types.ConvertFrameReturn(names["FrameExecStrategy"](skip, skip), apply_to_code=False)


def runs_eagerly(*, captured: bool) -> bool:
    """Return whether ``torch.compiler.set_stance`` makes a call run eagerly.

    ``captured`` says whether the function was captured before.
    """
    from torch._dynamo import eval_frame  # noqa: PLC0415

    stance: str = eval_frame._stance.stance
    return stance == "force_eager" or (stance == "eager_on_recompile" and not captured)


def _runs_as_it_is() -> BaseException:
    """Return an error by which Dynamo leaves one function to Python, but not its callees."""
    from torch._dynamo import exc, types  # noqa: PLC0415

    error, names = exc.Unsupported("the same graph at each step"), vars(types)
    action = names["FrameAction"]
    error.frame_exec_strategy = names["FrameExecStrategy"](action.SKIP, action.DEFAULT)
    return error


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that ``torch.compile`` was given; any other module as it is."""
    from torch._dynamo import OptimizedModule  # noqa: PLC0415

    if not isinstance(model, OptimizedModule):
        return model
    inner: torch.nn.Module = model._orig_mod
    return inner


def capture_failures() -> tuple[type[Exception], ...]:
    """Return the types of errors that Dynamo raises if it cannot capture a model as one graph."""
    from torch._dynamo.exc import TorchDynamoException  # noqa: PLC0415

    return (TorchDynamoException,)


def may_be_the_models(cause: BaseException) -> bool:
    """Return whether an error of Dynamo may be one that the user's function raises itself."""
    from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError  # noqa: PLC0415

    if not isinstance(cause, TorchDynamoException) or isinstance(cause, TorchRuntimeError):
        return True
    return any(sign in str(cause).lower() for sign in _OF_THE_MODEL)


_OF_THE_MODEL = (
    "observed exception",
    "failed to bind arguments",
    "typeerror when making fake tensor call",
    "failed to convert args/kwargs to proxy",
    "\n    raise ",  # the function's line: torch 2.11 cannot trace ``raise … from …``
)
"""What Dynamo says if a line of the function raises an error, or would."""


def leading_to(error: BaseException) -> list[BaseException]:
    """Return the cause and the context of ``error``, and the exception that it wraps, if any."""
    causes = error.__cause__, error.__context__, getattr(error, "inner_exception", None)
    return [cause for cause in causes if cause is not None]


def is_break(error: BaseException) -> bool:
    """Return whether Dynamo raised ``error`` itself, about code that it cannot capture."""
    from torch._dynamo.exc import TorchDynamoException  # noqa: PLC0415

    return isinstance(error, TorchDynamoException)


def failure_cause(error: BaseException) -> BaseException:
    """Return the error of a backend, without the errors in which Dynamo has wrapped it."""
    from torch._dynamo.exc import BackendCompilerFailed  # noqa: PLC0415

    while isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    return error
