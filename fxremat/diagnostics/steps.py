"""Errors of steps that run: backwards, host memory, transfers, processes; faults."""

from __future__ import annotations

from fxremat.diagnostics.entry import Diagnostic
from fxremat.errors import (
    FAULT,
    BackwardError,
    FxrematError,
    FxrematWarning,
    HostMemoryError,
    RankError,
    TorchVersionError,
    TransferError,
)

BACKWARD = (
    Diagnostic(
        "FXR701",
        BackwardError,
        "A tensor was written to between forward and backward",
        why="The backward reads a tensor that was changed in place after the forward. Eager "
        "autograd raises the same error.",
        remedy="Write to it after the backward.",
        trouble="""
        compiled = fxremat.compile(model, x, "64 MiB")
        loss = compiled(x).sum()
        with torch.no_grad():
            model[1][0].weight.add_(1)
        loss.backward()
        """,
        remedies=(
            """
            loss = compiled(x).sum()
            loss.backward()
            with torch.no_grad():
                model[1][0].weight.add_(1)
            """,
        ),
    ),
    Diagnostic(
        "FXR702",
        BackwardError,
        "The backward runs a second time",
        why="The first backward has freed what the forward saved.",
        remedy="Call `backward(retain_graph=True)` the first time.",
        needs="a backward that autograd itself does not refuse",
        test="tests/runtime/test_steps.py::test_a_step_that_hooks_give_to_two_backwards_is_read_once",
    ),
    Diagnostic(
        "FXR703",
        BackwardError,
        "Gradients of a planned step cannot be differentiated again",
        why="The backward is called with `create_graph=True`, but it was compiled without a "
        "separate graph.",
        remedy="Use the original model for that step, or call `backward()` without `create_graph`.",
        trouble="""
        compiled = fxremat.compile(model, x, "64 MiB")
        compiled(x).sum().backward(create_graph=True)
        """,
        remedies=(
            """
            torch.autograd.grad(model(x).sum(), list(model.parameters()), create_graph=True)
            """,
        ),
    ),
    Diagnostic(
        "FXR704",
        BackwardError,
        "Settings changed between forward and backward",
        why="The backward computes some operations again. Under other settings, such as "
        "deterministic algorithms, TF32 or the number of threads, they would have other bits.",
        remedy="Make the setting around both the forward and the backward.",
        trouble="""
        torch.use_deterministic_algorithms(True)
        compiled = fxremat.compile(model, x, 0.7)
        loss = compiled(x).sum()
        torch.use_deterministic_algorithms(False)
        loss.backward()
        """,
        remedies=(
            """
            del loss
            torch.use_deterministic_algorithms(True)
            compiled = fxremat.compile(model, x, 0.7)
            compiled(x).sum().backward()
            torch.use_deterministic_algorithms(False)
            """,
        ),
    ),
    Diagnostic(
        "FXR705",
        BackwardError,
        "Hooks on saved tensors returned a copy of another step's",
        why="`torch.autograd.graph.saved_tensors_hooks` replaced what the forward saved, so the "
        "step that the backward belongs to cannot be identified.",
        remedy="Do not use such hooks for the compiled model, or let them return "
        "what they were given.",
        trouble="""
        def train(keep, restore):
            compiled = fxremat.compile(model, x, "64 MiB")
            with torch.autograd.graph.saved_tensors_hooks(keep, restore):
                loss = compiled(x).sum()
            loss.backward()


        train(lambda tensor: None, lambda kept: torch.tensor([-7]))
        """,
        remedies=(
            """
            train(lambda tensor: tensor, lambda kept: kept)
            """,
        ),
    ),
    Diagnostic(
        "FXR706",
        BackwardError,
        "An output gets a gradient that `loss=` does not use",
        why="The step is planned without a backward for outputs that the function of `loss=` "
        "does not use, but the loss of the training loop uses one of them.",
        remedy="Give a `loss=` that uses all outputs that the loss of the training loop uses.",
        trouble="""
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = block(), block()

            def forward(self, x):
                y = self.first(x)
                return y, self.second(y)


        compiled = fxremat.compile(Two(), x, "64 MiB", loss=lambda outputs: outputs[0].sum())
        y, z = compiled(x)
        (y.sum() + z.sum()).backward()
        """,
        remedies=(
            """
            def both(outputs):
                return outputs[0].sum() + outputs[1].sum()


            compiled = fxremat.compile(Two(), x, "64 MiB", loss=both)
            y, z = compiled(x)
            (y.sum() + z.sum()).backward()
            """,
        ),
    ),
    Diagnostic(
        "FXR707",
        BackwardError,
        "A hook on a parameter received a part of its gradient",
        why="A parameter of the compiled model got a gradient from outside the model as well, for "
        "the first time, after its post-accumulate hooks had run. In a backward that Python code "
        "has started, fxremat sees this before.",
        remedy="Repeat the step. From now on the hooks run once the gradient is complete.",
        needs="a hook on a parameter that is used outside the compiled model in a later step, "
        "whose backward a program in C++ starts",
        test="tests/runtime/test_gradients.py::test_a_gradient_that_joins_after_the_hooks_is_an_error_and_then_is_not",
    ),
)

HOST = (
    Diagnostic(
        "FXR711",
        HostMemoryError,
        "Host memory would exceed its limit",
        why="Each step that has begun and not ended has separate host memory. A step begins "
        "before earlier ones ended, or one step needs more than `HostMemory(limit=)` allows.",
        remedy="Raise the limit, or end one step before the next one begins: outputs that are "
        "still held keep the host memory of their step.",
        trouble="""
        deep = nn.Sequential(*(block() for _ in range(5)))
        host = fxremat.HostMemory("only", limit="8 MiB")
        compiled = fxremat.compile(deep, x, "min", offload=host)
        first = compiled(x)
        second = compiled(x)
        """,
        remedies=(
            """
            del first
            for _ in range(2):
                compiled(x).sum().backward()
                compiled.zero_grad()
            """,
        ),
    ),
    Diagnostic(
        "FXR712",
        HostMemoryError,
        "Host memory cannot be allocated",
        why="On a CPU, host memory is a file, and the disk is full or the folder cannot be "
        "written to. On a GPU, the machine or the container's control group has less memory than "
        "is asked for.",
        remedy="Name another folder by `HostMemory(folder=)`, or use less by `HostMemory(limit=)`.",
        needs="a disk that is full, or a machine with little memory",
        test="tests/runtime/test_arena.py::test_a_full_disk_is_an_error_when_made",
    ),
    Diagnostic(
        "FXR721",
        TransferError,
        "A step goes on in a forked child",
        why="The activations are in the host memory of the parent process, which a forked child "
        "cannot use. CUDA does not work in a forked child either.",
        remedy="Run forward and backward in one process. Start workers with `spawn`, or compile "
        "the model in the child.",
        trouble="""
        import os

        deep = nn.Sequential(*(block() for _ in range(5)))
        compiled = fxremat.compile(deep, x, "min", offload="only")
        loss = compiled(x).sum()
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                loss.backward()
            except fxremat.TransferError as error:
                os.write(write, error.message.encode())
            os._exit(0)
        os.close(write)
        raise fxremat.TransferError(os.read(read, 1000).decode(), code="FXR721")
        """,
        remedies=(
            """
            loss.backward()
            """,
        ),
    ),
    Diagnostic(
        "FXR722",
        TransferError,
        "A copy between device and host memory failed",
        why="The copy failed or was interrupted, so tensors of this step have wrong values.",
        remedy="Do not use the results of the step, and run it again.",
        needs="a disk that fails",
        test="tests/runtime/test_transfer_failures.py::test_what_would_end_the_worker_is_an_error_at_the_next_operation",
    ),
    Diagnostic(
        "FXR723",
        TransferError,
        "A step with host memory cannot run while a CUDA graph is being captured",
        why="A replay of the CUDA graph would use host memory that belongs to another step by "
        "then.",
        remedy="Run the step outside `torch.cuda.graph`, or compile with `offload=False`.",
        needs="a GPU",
        test="tests/runtime/test_cuda_graph.py::test_a_step_with_host_memory_does_not_run_then",
    ),
    Diagnostic(
        "FXR724",
        TransferError,
        "The host memory of a graph is gone",
        why="The compiled module that owned it was deleted, while an emitted graph of its plan "
        "still runs.",
        remedy="Keep the compiled module for as long as its graphs run, or compile the model "
        "again.",
        needs="an emitted graph that is run by itself",
        test="tests/runtime/test_arena.py::test_a_module_that_is_gone",
    ),
    Diagnostic(
        "FXR725",
        TransferError,
        "A gradient in host memory cannot do what a plain one does",
        why="With `HostMemory(state=True)` gradients and optimizer state are in host memory "
        "between operators. Every operator takes them. They have no address on the device, and "
        "their shape, strides and storage cannot be changed in place.",
        remedy="Use `.clone()`, which is a plain tensor on the device.",
        trouble="""
        optimizer = torch.optim.AdamW(model.parameters())
        host = fxremat.HostMemory("auto", state="all")
        compiled = fxremat.compile(model, x, "64 MiB", optimizer=optimizer, offload=host)
        compiled(x).sum().backward()
        gradients = [p.grad for p in model.parameters()]
        addresses = [gradient.data_ptr() for gradient in gradients]
        """,
        remedies=(
            """
            copies = [gradient.clone() for gradient in gradients]
            addresses = [copy.data_ptr() for copy in copies]
            """,
        ),
    ),
)

RANKS = (
    Diagnostic(
        "FXR731",
        RankError,
        "A process did not arrive",
        why="Processes that train one model agree on each plan. One of them does not compile the "
        "model, does not make the same calls, or is slow. `error.ranks` names it.",
        remedy="Compile the same model in the same order in every process of the group. For slow "
        "starts pass `fxremat.Ranks(timeout=1800)`; processes that train models of their own need "
        "a `group=` of those that belong together.",
        trouble="""
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
        fxremat.compile(model, x, "64 MiB", ranks=fxremat.Ranks(timeout=1))
        """,
        remedies=(
            """
            dist.destroy_process_group()
            fxremat.compile(model, x, "64 MiB")
            """,
        ),
    ),
    Diagnostic(
        "FXR732",
        RankError,
        "Processes have different arguments",
        why="Processes that train one model must have the same budget and options, since they "
        "follow one plan.",
        remedy="Pass the same arguments in all processes. With "
        "`ranks=fxremat.Ranks(budgets='least')`, budgets may differ, and the least is used.",
        needs="several processes",
        test="tests/ranks/test_combine.py::test_budgets_must_be_the_same_or_the_least_is_taken",
    ),
    Diagnostic(
        "FXR733",
        RankError,
        "Processes run different steps",
        why="The processes have captured different graphs, compile models in another order, or "
        "make calls of other sizes. With collectives in the graph, they would wait for each other "
        "forever.",
        remedy="Train the same model in all processes, with one version of fxremat and torch, "
        "and with batches of one size.",
        needs="several processes",
        test="tests/ranks/test_combine.py::test_other_steps_are_refused",
    ),
    Diagnostic(
        "FXR734",
        RankError,
        "Another process failed",
        why="A process of the group raised the error that the message contains while it planned, "
        "so no process can follow the plan.",
        remedy="Look up the code of that error in the output of the process that failed.",
        needs="several processes",
        test="tests/ranks/test_combine.py::test_who_fails_on_the_way_is_named",
    ),
)

OTHERS = (
    Diagnostic(
        "FXR801",
        FxrematError,
        "This version of torch has no interface for other partitioners",
        why="`activation_memory_budget` of `fxremat.integrations.torch` uses an interface that "
        "later versions of torch have.",
        remedy="Install torch 2.13 or later, or use `fxremat.compile` with a budget in bytes.",
        needs="an earlier version of torch",
        test="tests/integrations/test_torch.py::test_a_torch_without_hooks_is_named_with_its_remedy",
    ),
    Diagnostic(
        "FXR802",
        TorchVersionError,
        "The installed torch is too old",
        why="It lacks the interfaces by which fxremat captures a training step.",
        remedy="Upgrade torch by the command that the message names.",
        needs="an earlier version of torch",
        test="tests/test_torch_versions.py::test_an_older_version_is_refused_with_the_remedy",
    ),
    Diagnostic(
        "FXR803",
        FxrematWarning,
        "The installed torch was not tried",
        why="It is newer than the versions that this release of fxremat was tested with. Plans are "
        "made, measured and watched as always, but may fail or exceed their budget.",
        remedy="Install a newer fxremat, or a torch of the range that the message names. To hide "
        "the warning, see SUPPORT.md.",
        needs="a later version of torch",
        test="tests/test_torch_versions.py::test_a_newer_version_gives_a_warning_with_the_range",
    ),
    Diagnostic(
        FAULT,
        FxrematError,
        "A fault of fxremat",
        why="Something is not as the code assumes. A pass or a generator of your own can be the "
        "reason; otherwise fxremat is wrong.",
        remedy="Please report it, with the message and, if possible, the model. `fxremat env` "
        "prints the versions that a report needs.",
        needs="a fault",
        test="tests/costs/measured/test_cost.py::test_an_operation_that_was_not_measured_is_named",
    ),
)
