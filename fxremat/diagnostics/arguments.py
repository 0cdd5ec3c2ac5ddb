"""Errors about arguments and samples."""

from __future__ import annotations

from fxremat.diagnostics.entry import Diagnostic
from fxremat.errors import ArgumentError, NoGradientError, SampleError

ARGUMENTS = (
    Diagnostic(
        "FXR401",
        ArgumentError,
        "An argument has a wrong type or value",
        why="The message names the argument, what it must be, and what was passed, which "
        "`error.argument` and `error.value` have as well.",
        remedy="Pass one of the values that the message names.",
        trouble="""
        fxremat.compile(model, x, "64 MiB", offload="yes")
        """,
        remedies=(
            """
            fxremat.compile(model, x, "64 MiB", offload="auto")
            """,
        ),
    ),
    Diagnostic(
        "FXR402",
        ArgumentError,
        "`loss='own'`, but the model returns no loss",
        why="With `loss='own'` the model must return its loss: a tensor of one number, as `.loss` "
        "or `['loss']`, as the first of a tuple, or as its only output.",
        remedy="Add the inputs of the loss, such as labels, to the sample, or pass a function of "
        "the outputs as `loss=`.",
        trouble="""
        fxremat.compile(model, x, "64 MiB", loss="own")
        """,
        remedies=(
            """
            fxremat.compile(model, x, "64 MiB", loss=lambda y: y.square().mean())
            """,
        ),
    ),
    Diagnostic(
        "FXR403",
        ArgumentError,
        "The loss and its target do not belong together",
        why="A loss of outputs and a target needs the target to be measured. A loss of outputs "
        "only, and a loss that the model computes by itself, take none.",
        remedy="Pass both, as in `loss=fxremat.Loss(criterion, target=y)`, or omit the target.",
        trouble="""
        fxremat.compile(model, x, "64 MiB", loss=nn.MSELoss())
        """,
        remedies=(
            """
            y = torch.randn(512, 64)
            fxremat.compile(model, x, "64 MiB", loss=fxremat.Loss(nn.MSELoss(), target=y))
            """,
        ),
    ),
    Diagnostic(
        "FXR404",
        ArgumentError,
        "`loss=` does not compute a loss from the outputs",
        why="The function must return a real tensor of one number, computed from the outputs of "
        "the model with a gradient. `torch.compile` calls it with the tensors of the outputs, "
        "without the structure in which the model returns them.",
        remedy="Reduce the result to one number, such as by `.mean()`. Where the loss needs the "
        "structure of the outputs, use `fxremat.compile`.",
        trouble="""
        fxremat.compile(model, x, "64 MiB", loss=lambda y: y.square())
        """,
        remedies=(
            """
            fxremat.compile(model, x, "64 MiB", loss=lambda y: y.square().mean())
            """,
        ),
    ),
    Diagnostic(
        "FXR405",
        ArgumentError,
        "The state of `optimizer=` cannot be counted",
        why="The optimizer has none of the parameters of the model, or its state cannot be "
        "measured by a trial step. Or its class was passed to `torch.compile`, which gives a "
        "backend no parameters.",
        remedy="Create the optimizer from `model.parameters()` after anything that replaces them, "
        "and pass it. Otherwise pass the bytes of its state as `reserve=`.",
        trouble="""
        optimizer = torch.optim.AdamW(block().parameters())
        fxremat.compile(model, x, "64 MiB", optimizer=optimizer)
        """,
        remedies=(
            """
            optimizer = torch.optim.AdamW(model.parameters())
            fxremat.compile(model, x, "64 MiB", optimizer=optimizer)
            """,
        ),
    ),
    Diagnostic(
        "FXR406",
        ArgumentError,
        "An answer of `policy=` cannot be followed",
        why="The policy failed, returned something else than `'keep'`, `'recompute'`, `'offload'` "
        "or `None`, or asks for what the plan may not do: to offload with `offload=False`, or to "
        "recompute an operation that must run once.",
        remedy="Return one of these answers. Pass `offload='auto'` for `'offload'`, and `None` to "
        "let the planner decide.",
        trouble="""
        fxremat.compile(model, x, "64 MiB", policy=lambda operation: "offload")
        """,
        remedies=(
            """
            fxremat.compile(model, x, "64 MiB", policy=lambda operation: None)
            """,
        ),
    ),
    Diagnostic(
        "FXR407",
        ArgumentError,
        "Two options contradict each other",
        why="Both options decide the same thing, or one of them rules out the other. A trainer "
        "that compiles the model or checkpoints activations by itself contradicts the callback "
        "of fxremat.",
        remedy="Omit one of them, as the message says.",
        trouble="""
        fxremat.plan(model, x, 0.9, check=True, offload="auto")
        """,
        remedies=(
            """
            fxremat.plan(model, x, 0.9, offload="auto")
            """,
        ),
    ),
    Diagnostic(
        "FXR408",
        ArgumentError,
        "An option needs a package, a compiler or a device that is missing",
        why="`executor='inductor'` needs a C++ compiler on a CPU, and Triton on a GPU. "
        "`check=True` needs ortools, and `verify=True` a CUDA device or a stand-in for one.",
        remedy="Install what the message names, or omit the option.",
        trouble="""
        import torch._inductor.config as config

        with config.patch({"cpp.cxx": ("/no/compiler",)}):
            fxremat.compile(model, x, "64 MiB", executor="inductor")
        """,
        remedies=(
            """
            with config.patch({"cpp.cxx": ("/no/compiler",)}):
                fxremat.compile(model, x, "64 MiB", executor="eager")
            """,
        ),
    ),
    Diagnostic(
        "FXR409",
        ArgumentError,
        "The trainer does not run the step that was planned",
        why="A strategy of Lightning or Accelerate shards the model or replaces the training "
        "step, or something has replaced the model's forward after the plan was made.",
        remedy="Train in one process, or in DistributedDataParallel. Replace a forward before the "
        "training begins.",
        needs="Lightning, Accelerate or the Trainer of transformers",
        test="tests/integrations/test_integrations.py::test_a_forward_replaced_while_training_is_told",
    ),
    Diagnostic(
        "FXR410",
        ArgumentError,
        "The model was compiled by something else",
        why="`fxremat.plan_of` reads the plan of a module that fxremat, or `torch.compile` with "
        "`backend='fxremat'`, has compiled. A callback plans a model that is not compiled.",
        remedy="Pass the compiled module to `plan_of`, and the original model to a callback.",
        trouble="""
        compiled = fxremat.compile(model, x, "64 MiB")
        fxremat.plan_of(model)
        """,
        remedies=(
            """
            fxremat.plan_of(compiled)
            """,
        ),
    ),
    Diagnostic(
        "FXR411",
        ArgumentError,
        "An optimizer cannot step some parameters at a time",
        why="With `HostMemory(state=True)` an optimizer steps some parameters after the others, so "
        "that only their state is on the device. That is tried on small parameters, and it changes "
        "numbers if a step of one parameter depends on others, or counts its calls.",
        remedy="Keep the state on the device, or use an optimizer that steps each parameter by "
        "itself.",
        trouble="""
        class Clipping(torch.optim.SGD):
            def step(self, closure=None):
                torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
                return super().step(closure)


        host = fxremat.HostMemory("auto", state=True)
        optimizer = Clipping(model.parameters(), lr=0.1)
        fxremat.compile(model, x, "64 MiB", optimizer=optimizer, offload=host)
        """,
        remedies=(
            """
            optimizer = Clipping(model.parameters(), lr=0.1)
            fxremat.compile(model, x, "64 MiB", optimizer=optimizer, offload="auto")
            """,
            """
            host = fxremat.HostMemory("auto", state=True)
            optimizer = torch.optim.AdamW(model.parameters())
            fxremat.compile(model, x, "64 MiB", optimizer=optimizer, offload=host)
            """,
        ),
    ),
    Diagnostic(
        "FXR412",
        ArgumentError,
        "`HostMemory(state=True)` without the optimizer",
        why="The state is moved by the step of the optimizer itself, so `compile` needs the object "
        "that will step the model. A class only says how many bytes to count.",
        remedy="Create the optimizer before `compile`, and pass it.",
        trouble="""
        host = fxremat.HostMemory("auto", state=True)
        fxremat.compile(model, x, "64 MiB", optimizer="AdamW", offload=host)
        """,
        remedies=(
            """
            host = fxremat.HostMemory("auto", state=True)
            optimizer = torch.optim.AdamW(model.parameters())
            fxremat.compile(model, x, "64 MiB", optimizer=optimizer, offload=host)
            """,
        ),
    ),
    Diagnostic(
        "FXR413",
        ArgumentError,
        "`HostMemory(state=True)` has nothing to move",
        why="Only plain parameters are moved. The state of distributed and quantized parameters "
        "stays on the device, and so does that of parameters that the optimizer does not step.",
        remedy="Omit `state=True`.",
        trouble="""
        class Wrapped(torch.nn.Parameter):
            pass


        linear = nn.Linear(64, 64, bias=False)
        linear.weight = Wrapped(linear.weight.data)
        optimizer = torch.optim.SGD(linear.parameters())
        host = fxremat.HostMemory("auto", state=True)
        fxremat.compile(linear, x[:, :64], "64 MiB", optimizer=optimizer, offload=host)
        """,
        remedies=(
            """
            optimizer = torch.optim.SGD(linear.parameters())
            fxremat.compile(linear, x[:, :64], "64 MiB", optimizer=optimizer, offload="auto")
            """,
        ),
    ),
    Diagnostic(
        "FXR414",
        ArgumentError,
        "Parameters of a wrapped model cannot move to host memory",
        why="`DistributedDataParallel`, `fully_shard` and `DTensor` work on the memory of "
        "parameters on the device, so these cannot move.",
        remedy="Omit `parameters=True` of `HostMemory`. Activations may still move to host memory.",
        trouble="""
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        wrapped = nn.parallel.DistributedDataParallel(model)
        host = fxremat.HostMemory(parameters=True)
        fxremat.compile(wrapped, x, "64 MiB", offload=host)
        """,
        remedies=(
            """
            fxremat.compile(wrapped, x, "64 MiB", offload="auto")
            torch.distributed.destroy_process_group()
            """,
        ),
    ),
    Diagnostic(
        "FXR415",
        ArgumentError,
        "A parameter cannot move to host memory, because other code refers to it",
        why="A parameter that moves stays the same object, but its memory is replaced. Views of "
        "it, autograd graphs of unfinished steps, and libraries in C++ would keep the old memory.",
        remedy="Compile the model before such code refers to its parameters, or delete the views "
        "and the unfinished steps.",
        trouble="""
        model[0].requires_grad_(False)
        rows = model[0][0].weight[:10]
        host = fxremat.HostMemory(parameters=True)
        fxremat.compile(model, x, "min", offload=host)
        """,
        remedies=(
            """
            del rows
            fxremat.compile(model, x, "min", offload=host)
            """,
        ),
    ),
)

SAMPLES = (
    Diagnostic(
        "FXR501",
        SampleError,
        "The sample is not a call of the model",
        why="A sample is a tensor, a tuple of arguments, a dict of keywords, or "
        "`fxremat.Sample(args, kwargs)`. Often the budget is passed in its place. What the model "
        "itself raises at a sample, such as for a wrong shape, is no error of fxremat: it comes "
        "as the model raised it, with a note of the sample's shapes on Python 3.11 and later.",
        remedy="Pass a sample first and the budget after it. Without a sample, pass `budget=` by "
        "name.",
        trouble="""
        fxremat.compile(model, "64 MiB")
        """,
        remedies=(
            """
            fxremat.compile(model, fxremat.Sample((x,), {}), "64 MiB")
            fxremat.compile(model, budget="64 MiB")
            """,
        ),
    ),
    Diagnostic(
        "FXR502",
        SampleError,
        "The sample and the model are on different devices, or have no data",
        why="Planning runs operations on the device of the model, so parameters and the sample "
        "need data there.",
        remedy="Move the sample to the device of the model. A model on `meta` gets its weights by "
        "`model.to_empty(device=...)`; `fxremat.estimate` accepts it without weights.",
        trouble="""
        fxremat.compile(model, torch.randn(512, 64, device="meta"), "64 MiB")
        """,
        remedies=(
            """
            fxremat.compile(model, torch.zeros(512, 64), "64 MiB")
            """,
        ),
    ),
    Diagnostic(
        "FXR510",
        NoGradientError,
        "Nothing requires a gradient",
        why="All parameters are frozen, and no tensor of the sample requires a gradient, so there "
        "is no backward to plan.",
        remedy="Call `requires_grad_()` on the parameters to train.",
        trouble="""
        fxremat.compile(model.requires_grad_(False), x, "64 MiB")
        """,
        remedies=(
            """
            model[2].requires_grad_(True)
            fxremat.compile(model, x, "64 MiB")
            """,
        ),
    ),
)
