"""Dynamo: how a function is captured whole, and what is raised where it is not."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxremat.torch_compat.modes import in_dispatch_mode
from fxremat.torch_compat.symbols import hint_of


def capture_settings() -> contextlib.AbstractContextManager[Any]:
    """Settings under which Dynamo captures, in its thread.

    Torch 2.11 has one set of them for all threads: calls that overlap take them from each other.

    Loggers are traced through as if they were not there, because ``warning_once`` in a
    loss would break the graph. A number that a module counts with, or a float that it has, is a
    symbol once it changes, as a size is.
    """
    from torch._dynamo import config  # noqa: PLC0415

    _hush()
    patched: contextlib.AbstractContextManager[Any] = config.patch(**_dynamo_settings())
    return patched


@cache  # an interrupt while a logger is looked up leaves logging locked for all other threads
def _hush() -> None:
    logging.getLogger("torch._dynamo.metrics_context").addFilter(_is_no_failed_metric)
    logging.getLogger("torch._subclasses.fake_tensor").addFilter(_is_no_wrong_shape)
    for name in ("variables.tensor", "convert_frame"):
        logging.getLogger(f"torch._dynamo.{name}").addFilter(_is_no_break)


def _is_no_failed_metric(record: logging.LogRecord) -> bool:
    """Torch 2.11 logs an error when it cannot write down which functions it ignores."""
    return "logging compilation metrics" not in record.getMessage()


def _is_no_wrong_shape(record: logging.LogRecord) -> bool:
    """Shapes that do not fit are raised: they need not be logged as well, with a traceback."""
    return "failed while attempting to run meta" not in record.getMessage()


def _is_no_break(record: logging.LogRecord) -> bool:
    """Drop records of graph breaks, which users are told otherwise; cut failures to one line."""
    message = record.getMessage()
    if message.startswith("WON'T CONVERT") and record.exc_info:
        error = record.exc_info[1]
        why = next(iter(str(error).splitlines()), "")
        what = message.splitlines()[0].strip()
        record.msg = f"{what}, it runs as it is: {type(error).__name__}: {why}"
        record.args, record.exc_info, record.exc_text = (), None, None
    return not message.startswith("Graph break from")


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
        "skip_nnmodule_hook_guards": False,  # hooks may be added, or removed, later
        # A function that Dynamo fails at runs as it is; one that must be whole is refused anyway.
        "suppress_errors": True,
        "optimize_ddp": False,  # inside one that wraps the model the graph would be cut
    }
    if not hasattr(config, "ignore_logging_functions"):
        settings["ignore_logger_methods"] = settings.pop("ignore_logging_functions")
    return settings


_functions = count()

_OWN = "call_"


def with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``function``. Dynamo keeps what it captures by code objects.

    It also remembers sizes that were seen to vary, by file, line and name: of one function's
    nothing must be known to another.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=f"{_OWN}{next(_functions)}")
    return call


def compile_function(
    function: Callable[..., Any], backend: Callable[..., Any], *, whole: bool, dynamic: bool
) -> Any:
    """``function`` compiled, ``whole``: as one graph; ``dynamic``: sizes may become symbols.

    It is captured with :func:`capture_settings`; all else that a call of it runs has the user's.
    """
    optimize: Any = torch._dynamo.optimize
    context = optimize(backend, nopython=whole, dynamic=None if dynamic else False)
    if callable(getattr(context, "callback", None)):  # compiling may be disabled
        context.callback = _Capturing(context.callback)
    return context(function)


class _Capturing:
    """Dynamo's callback for frames that it has not captured, under :func:`capture_settings`."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._torchdynamo_orig_backend = callback._torchdynamo_orig_backend  # asked at each call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with capture_settings():
            return self._callback(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._callback, name)


def break_of(module: object) -> str | None:
    """Why Dynamo ends a graph that it captures now, and the user's line; ``None``: it is all of its
    function.
    """
    reason: Any = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    lines = [f"{line.filename}:{line.lineno}" for line in reason.user_stack[-1:]]
    return ": ".join([*lines, *reason.reason.splitlines()[:1]])


def caller_of_captured(own: str) -> tuple[str, bool]:
    """The line that calls the function that Dynamo captures now, and whether it is left to Python
    below a function that :func:`compile_function` was given.

    Args:
        own: folder of a package whose lines are nobody's.
    """
    library, caller = str(Path(torch.__file__).parent), ""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        code = frame.f_code
        if code.co_filename == __file__ and code.co_name.startswith(_OWN):
            return caller, True
        if not caller and not code.co_filename.startswith((library, own, "<")):
            caller = f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return caller, False


def captured_separately(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which is captured by itself where its caller is."""

    def captured(*args: Any, **kwargs: Any) -> Any:  # torch's own forwards are seen from here only
        return function(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        return captured(*args, **kwargs)

    compiler: Any = torch.compiler
    disabled: Callable[..., Any] = compiler.disable(call, recursive=False)  # but not what it calls
    return disabled


def seen(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which is captured where Dynamo comes to it: torch's own files it passes by."""

    def captured(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return captured


def is_passed_by(module: torch.nn.Module) -> bool:
    """Whether Dynamo runs calls of ``module`` as they are where their caller is not captured.

    Modules without parts, one operation each, are left to Python there: nothing is gained by a
    plan of one.
    """
    from torch._dynamo import trace_rules  # noqa: PLC0415

    has_parts = any(True for _ in module.children()) and "forward" not in vars(module)
    return has_parts and bool(trace_rules.check(type(module).forward))


def not_wrapped(error: Exception) -> Exception:
    """``error``, of a class that is Dynamo's too, so that it raises this and no error of its own
    that tells of it.
    """
    from torch._dynamo.exc import ShortenTraceback  # noqa: PLC0415

    own = type(error)
    if not issubclass(own, ShortenTraceback):
        named = {"__module__": own.__module__, "__doc__": own.__doc__, "first_useful_frame": None}
        error.__class__ = type(own.__name__, (own, ShortenTraceback), named)
    return error


def options_of(compiled: object, backend: Callable[..., Any]) -> Any:
    """The options of ``torch.compile(…, backend=backend, options=…)`` by its result ``compiled``;
    ``None``: it is not that.
    """
    from torch._dynamo import OptimizedModule  # noqa: PLC0415

    if isinstance(compiled, OptimizedModule):
        contexts: list[Any] = [compiled.dynamo_ctx]
    else:
        called: Any = getattr(compiled, "_compiled_call_impl", None) or compiled
        closure = getattr(called, "__closure__", None) or ()
        contexts = [cell.cell_contents for cell in closure]
    for context in contexts:
        found: Any = getattr(context, "callback", None)
        while hasattr(found, "_torchdynamo_orig_backend"):
            found = found._torchdynamo_orig_backend
        if getattr(found, "compiler_fn", None) is backend:
            return found.kwargs.get("options")
    return None


def results_of_captured(module: torch.fx.GraphModule) -> tuple[torch.Tensor, ...]:
    """Tensors, without data, that a graph of Dynamo's returns, each of its sizes at the capture."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    found = (node.meta.get("example_value") for node in output.all_input_nodes)
    return tuple(
        torch.empty(
            [hint_of(size) for size in value.shape],
            dtype=value.dtype,
            device=value.device,
        )
        for value in found
        if isinstance(value, torch.Tensor)
    )


_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")


@contextlib.contextmanager
def sizes_vary(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """A capture in here takes all sizes of ``tensors`` for symbols, where it can.

    They keep no mark of it: Dynamo would capture once more whatever it captured without.
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
    """``tensor``, and those that it is a wrapper of."""
    yield tensor
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        for name in wrapper.__tensor_flatten__()[0]:
            yield from _parts_of(getattr(wrapper, name))


_compiling = threading.local()


def compiled_now() -> CodeType | None:
    """The code that Dynamo compiles now in this thread."""
    found: CodeType | None = getattr(_compiling, "code", None)
    return found


@dataclass(frozen=True)
class Rules:
    """How Dynamo treats code that backends of ours are given.

    Attributes:
        ours: whether a backend is.
        too_often: what is raised where code may not be compiled again, from the backend, the name
            of the setting that is the limit, and its value.
        as_it_is: whether code is not to be compiled again for a backend: from then on it runs as
            it is, and what it calls is compiled for itself.
        in_mode: is called where code runs as it is, as it is called under a mode that sees each
            operation.
    """

    ours: Callable[[object], bool]
    too_often: Callable[[object, str, int], BaseException]
    as_it_is: Callable[[object, CodeType], bool]
    in_mode: Callable[[], None]


@cache
def never_uncompiled(rules: Rules) -> None:
    """Let no code of ours run as it is where Dynamo may not compile it again.

    Dynamo runs code that it has compiled too often eagerly, and says so in its log alone; and code
    that was once called under a ``TorchDispatchMode`` ever after, and says nothing. All other
    backends' code is treated as before.
    """
    from torch._dynamo import config, convert_frame  # noqa: PLC0415

    module: Any = convert_frame
    exceeds: Callable[..., tuple[bool, str]] = module.exceeds_recompile_limit
    entered: Callable[..., Any] = module.CatchErrorsWrapper.__call__

    def asked(*args: Any) -> tuple[bool, str]:
        exceeded, name = exceeds(*args)
        # Who asks, for which code and backend, is told by nothing but its own frame.
        asking = sys._getframe(1).f_locals
        backend, code = _innermost(asking["compiler_fn"]), asking["code"]
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
    def enter(own: Any, *args: Any, **kwargs: Any) -> Any:
        if in_dispatch_mode() and rules.ours(_innermost(own)):
            rules.in_mode()
            return _skipped_once()
        return entered(own, *args, **kwargs)

    module.exceeds_recompile_limit = asked
    module.CatchErrorsWrapper.__call__ = enter


def _innermost(backend: Any) -> object:
    """What Dynamo was given, inside all that it wraps that in."""
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return getattr(backend, "compiler_fn", backend)


def _skipped_once() -> Any:
    """What has Dynamo leave a call to Python, and all that it calls, but no later one."""
    from torch._dynamo import types  # noqa: PLC0415

    names = vars(types)
    skip = names["FrameAction"].SKIP
    return types.ConvertFrameReturn(names["FrameExecStrategy"](skip, skip), apply_to_code=False)


def runs_eagerly(*, captured: bool) -> bool:
    """Whether ``torch.compiler.set_stance`` has what is called now run as it is.

    Args:
        captured: it was captured before.
    """
    from torch._dynamo import eval_frame  # noqa: PLC0415

    stance: str = eval_frame._stance.stance
    return stance == "force_eager" or (stance == "eager_on_recompile" and not captured)


def _runs_as_it_is() -> BaseException:
    """An error by which Dynamo leaves one function to Python, but not the functions it calls."""
    from torch._dynamo import exc, types  # noqa: PLC0415

    error, names = exc.Unsupported("the same graph at each step"), vars(types)
    action = names["FrameAction"]
    error.frame_exec_strategy = names["FrameExecStrategy"](action.SKIP, action.DEFAULT)
    return error


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The module that ``torch.compile`` was given; any other module as it is."""
    from torch._dynamo import OptimizedModule  # noqa: PLC0415

    if not isinstance(model, OptimizedModule):
        return model
    inner: torch.nn.Module = model._orig_mod
    return inner


def capture_failures() -> tuple[type[Exception], ...]:
    """Types of errors that Dynamo raises when a model cannot be captured as one graph."""
    from torch._dynamo.exc import TorchDynamoException  # noqa: PLC0415

    return (TorchDynamoException,)


def may_be_the_models(cause: BaseException) -> bool:
    """Whether Dynamo's error may be one that the function itself raises, and not only its own."""
    from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError  # noqa: PLC0415

    if not isinstance(cause, TorchDynamoException) or isinstance(cause, TorchRuntimeError):
        return True
    return any(sign in str(cause).lower() for sign in _OF_THE_MODEL)


_OF_THE_MODEL = (
    "observed exception",
    "failed to bind arguments",
    "typeerror when making fake tensor call",
    "failed to convert args/kwargs to proxy",
    "\n    raise ",  # the function's line: torch 2.11 fails itself at ``raise … from …``
)
"""What Dynamo says where a line of the function itself raises, or would."""


def leading_to(error: BaseException) -> list[BaseException]:
    """Exceptions that ``error`` was raised for, or after; what Dynamo has wrapped among them."""
    found = error.__cause__, error.__context__, getattr(error, "inner_exception", None)
    return [other for other in found if other is not None]


def failure_cause(error: BaseException) -> BaseException:
    """The error inside those that Dynamo wraps errors of a backend in."""
    from torch._dynamo.exc import BackendCompilerFailed  # noqa: PLC0415

    while isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    return error
