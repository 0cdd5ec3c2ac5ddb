"""What a sample may be, and what passes through a call."""

import contextlib
import gc
import io
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

import fxremat
from tests.models import ZOO


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 16)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, times: int = 1, by: float = 1.0, flag: bool
    ) -> dict[str, Any]:
        for _ in range(times):
            x = self.layer(x).tanh() * by
        if mask is not None:
            x = x * mask
        return {"x": x if flag else -x, "times": times, "nothing": None}


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def test_flags_none_and_numbers_pass_through():
    kwargs = {"times": 3, "by": 0.5, "flag": False}
    compiled = fxremat.compile(Mixed(), fxremat.Sample((X, None), kwargs), "min")
    found, wanted = compiled(X, None, **kwargs), Mixed()(X, None, **kwargs)
    assert found["times"] == 3 and found["nothing"] is None
    assert torch.equal(found["x"], wanted["x"])
    del found
    compiled(X, X, times=1, flag=True)["x"].sum().backward()
    assert len(compiled.plans) == 2


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out = self.layer(x).tanh()
        return out if y is None else out * y


@pytest.mark.parametrize(
    "sample",
    [X, (X,), [X], {"x": X}, (X, X[:, :4]), {"x": X, "y": X[:, :4]}, fxremat.Sample((X,), {})],
)
def test_a_sample_is_a_call(sample: Any):
    assert fxremat.compile(Plain(), sample, 1.0).plan.baseline_peak_bytes > 0


@pytest.mark.parametrize(
    "sample",
    [
        (X, X[:, :4], X), (), {"zzz": X}, [[X]], (None,), ("X",), (object(),), X[:, :3],
        X.double(),
    ],
)  # fmt: skip
def test_a_sample_that_is_no_call_raises_what_the_model_does(sample: Any):
    """And leaves the model as it was: the next call is planned as one graph."""
    call = fxremat.Sample.of(sample)
    with pytest.raises((TypeError, RuntimeError)) as own:
        Plain()(*call.args, **call.kwargs)
    model = Plain()
    with pytest.raises(type(own.value)) as caught:
        fxremat.compile(model, sample, 1.0)
    assert str(caught.value) == str(own.value)
    compiled = fxremat.compile(model, budget=1.0)
    with pytest.raises(type(own.value)):
        compiled(*call.args, **call.kwargs)
    compiled(X).sum().backward()
    assert isinstance(compiled.plan, fxremat.Plan)


class Chatty(Plain):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        print("forward")
        return super().forward(x, y)


def test_a_graph_break_names_line_and_reason():
    with (
        contextlib.redirect_stdout(io.StringIO()),
        pytest.raises(fxremat.CaptureError, match=r"(?s)Chatty.*print.*test_compiler\.py"),
    ):
        fxremat.compile(Chatty(), X, 1.0, regions="one")


class Caches(Plain):
    """Makes a table at its first call and counts its calls."""

    def __init__(self):
        super().__init__()
        self.table: Tensor | None = None
        self.tables: dict[int, Tensor] = {}
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(16.0)
        if x.shape[0] not in self.tables:
            self.tables[x.shape[0]] = torch.ones(x.shape[0], 1)
        return super().forward(x * self.table * self.tables[x.shape[0]], y)


@pytest.mark.parametrize("called", [False, True])
def test_tensors_in_plain_attributes_stay_what_they_are(called: bool):
    model = Caches()
    if called:
        model(X)
    table, tables, calls = model.table, dict(model.tables), model.calls
    fxremat.compile(model, X, 1.0)
    assert model.table is table and model.calls == calls
    assert model.tables.keys() == tables.keys()
    assert all(model.tables[k] is tables[k] for k in tables)


LOCK = threading.Lock()


class Prepared(Plain):
    """Does in its first call what Dynamo cannot trace."""

    def __init__(self):
        super().__init__()
        self.made = False

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if not self.made:
            with LOCK:
                self.made = True
        return super().forward(x, y)


def test_what_a_first_call_alone_does_leaves_the_others_whole():
    torch._dynamo.reset()
    model = Prepared()
    with pytest.raises(fxremat.CaptureError, match=r"(?s)with LOCK.*call the model once"):
        fxremat.compile(Prepared(), X, 1.0, regions="one")
    called = Prepared()
    called(X)
    assert fxremat.compile(called, X, 1.0, regions="one").plan.counted_bytes > 0
    compiled, wanted = fxremat.compile(model, X, 1.0), Plain()
    wanted.load_state_dict(model.state_dict())
    for step in range(3):
        for call in (compiled, wanted):
            call.zero_grad()
            call(X).square().sum().backward()
        assert all(map(torch.equal, *([p.grad for p in m.parameters()] for m in (model, wanted))))
        assert compiled._training.regions.several == (step == 0)
    assert isinstance(compiled.plan, fxremat.Plan)
    assert len(compiled.plans) == 1


class WithSpare(nn.Module):
    """Returns what a layer of its own makes as well, after something that it does once."""

    def __init__(self, once: Callable[[], object] | None):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.spare = nn.Linear(16, 4), nn.Linear(16, 4)
        self.once = once

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.once is not None:
            once, self.once = self.once, None
            once()
        return self.layer(x).tanh(), self.spare(x)


def locked() -> None:
    with LOCK:
        pass


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("once", [None, torch._dynamo.graph_break, locked])
def test_what_no_loss_uses_is_decayed_as_in_its_first_step(once: Callable[[], object] | None):
    """It gets zeros from the first step on, or nothing: optimizers pass by what has nothing."""
    model = WithSpare(once)
    compiled = fxremat.compile(model, X, 1.0, loss=lambda out: out[0].square().sum())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)
    found = set[bool]()
    for _ in range(4):
        optimizer.zero_grad()
        compiled(X)[0].square().sum().backward()
        optimizer.step()
        found.add(model.spare.weight.grad is None)
    assert len(found) == 1
    assert isinstance(compiled.plan, fxremat.Plan)  # it is captured whole by now


def test_what_cannot_be_planned_whole_stays_in_pieces(monkeypatch: pytest.MonkeyPatch):
    torch._dynamo.reset()
    model = Prepared()
    compiled = fxremat.compile(model, X, 1.0)
    compiled(X).sum().backward()

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise fxremat.BudgetError("no room", least_budget_bytes=1)

    monkeypatch.setattr("fxremat.module.state.start", refuse)
    for _ in range(3):
        compiled(X).sum().backward()
        assert compiled._training.regions.several


class Annealed(Plain):
    """Scales by a float of its own, as a temperature is, or by one of its data."""

    def __init__(self, breaks: bool, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.breaks = 0.5, breaks
        self.layer = nn.Linear(16, 4, dtype=dtype)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        for _ in range(3):
            x = (self.layer(x) * self.scale).repeat(1, 4).tanh() + self.scale
        norm = float(x.detach().norm()) if self.breaks else self.scale
        return self.layer(x / (1 + norm)).square().mean()


@pytest.mark.parametrize(
    ("breaks", "dtype"),
    [
        (False, torch.float32),
        (True, torch.bfloat16),
        pytest.param(False, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(True, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_float_that_changes_is_captured_once_more_and_never_again(
    breaks: bool, dtype: torch.dtype
):
    torch._dynamo.reset()
    model = Annealed(breaks, dtype)
    x = X.to(dtype)
    compiled, counts = fxremat.compile(model, x, "min"), []
    for step in range(6):
        model.scale = 0.5 - 0.05 * step
        found = []
        for call in (model, compiled):
            model.zero_grad()
            loss = call(x)
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in model.parameters())])
        assert all(map(torch.equal, *found))
        counts.append(len(compiled._training.graphs))
    assert counts[1] == counts[-1] <= 2 * counts[0]


@pytest.mark.parametrize("breaks", [False, True])
def test_parameters_go_with_the_compiled_module(breaks: bool):
    """Not when the garbage of its circles is collected: the next model needs the room."""
    torch._dynamo.reset()
    model = Annealed(breaks, torch.float32)
    compiled = fxremat.compile(model, X, "min")
    for _ in range(4):
        outputs = compiled(X)
        outputs.backward()
    last = compiled(X)
    gone = [weakref.ref(p) for p in model.parameters()]
    gc.disable()
    try:
        del model, compiled, outputs
        last.backward()  # what waits for its backward has all it needs
        del last
        assert not any(parameter() is not None for parameter in gone)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["hf_gpt2", "hf_llama_states"])
def test_models_that_log_or_install_hooks_are_captured_whole(name: str):
    entry = ZOO[name]
    args, kwargs = entry.sample(0)
    compiled = fxremat.compile(entry.build(), fxremat.Sample(args, kwargs), 1.0)
    for _ in range(2):
        outputs = compiled(*args, **kwargs)
        entry.loss(outputs).backward()
    assert type(outputs).__name__.endswith("Output") or hasattr(outputs, "loss")
    assert len(compiled._training.graphs) == 1
    assert isinstance(compiled.plan, fxremat.Plan)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of this process only."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Gathering(nn.Module):
    """Layers whose outputs are gathered from all processes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            group: Any = torch.distributed.group.WORLD
            x = functional.all_gather_tensor_autograd(layer(x).relu(), 0, group)
        return x


@pytest.mark.usefixtures("group_of_one", "fresh_dynamo")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("ranks", [None, fxremat.Ranks()])
def test_a_group_of_one_process_needs_no_ranks(ranks: fxremat.Ranks | None) -> None:
    x, model, plain = torch.randn(64, 64), Gathering(), Gathering()
    compiled = fxremat.compile(model, x, "min", ranks=ranks)
    compiled(x).square().sum().backward()
    torch.compile(plain, backend="aot_eager")(x).square().sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(own.grad, other.grad) for own, other in pairs)


def test_plans_for_other_shapes_share_the_host_limit():
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())]
    model = nn.Sequential(*layers)
    batches = [torch.randn(rows, 32) for rows in (512, 480, 448)]
    needed = fxremat.plan(model, batches[0], "min", loss=torch.sum, offload="only").host_bytes
    torch._dynamo.reset()
    host = fxremat.HostMemory("only", limit=needed)
    call = fxremat.compile(model, batches[0], "min", loss=torch.sum, offload=host)
    for _ in range(2):
        for batch in batches:
            model.zero_grad()
            call(batch).sum().backward()
            arenas = [plan.arena for plan in call._training.plans if plan.arena is not None]
            assert call._training.options.host.limit.allocated_bytes <= needed
    assert len(arenas) >= 3
