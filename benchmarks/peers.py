"""Steps of plans at the peaks of what people use today, beside those steps.

* Small causal language models of transformers, made of random weights, at the peak of their own
  ``gradient_checkpointing_enable()``, which runs under eager.
* A GPT, a Llama, a mixture of experts and ResNet-50 at the peak of ``torch.compile`` with the
  backend ``aot_eager``, whose partitioner recomputes what costs next to nothing.

Each network gets the peer's measured peak as its budget. Steps of both are interleaved and timed by
CPU time; ratios are of the same round: median, least and greatest. Each network is measured in
another process: what one leaves changes nothing of the next.
Run: OMP_NUM_THREADS=1 python -m benchmarks.peers [name …] [--rounds N] [--more SHARE]
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import fxremat
from benchmarks.common import Spread, interleave, keep_freed_memory, ratios, rows_but, save, show
from fxremat.errors import BudgetError
from fxremat.units import format_bytes
from tests.models.bits import first_difference

Kwargs = Mapping[str, Any]

LAYERS = 8

SHAPES = {"64": (64, 4, 128, 1024), "256": (256, 4, 128, 1024), "64_long": (64, 2, 1024, 256)}
"""Of language models: width, batch, tokens and words."""

FAMILIES = ("llama", "mistral", "gpt2", "gemma")


@dataclass(frozen=True, slots=True)
class Network:
    """What is trained.

    Attributes:
        build: makes the model, in training mode.
        sample: keywords of a call, and what computes the loss of the result.
        peer: what it is held against.
    """

    build: Callable[[], nn.Module]
    sample: Callable[[], tuple[Kwargs, Callable[[Any], torch.Tensor]]]
    peer: str


def language_model(family: str, shape: str) -> nn.Module:
    """A causal language model of transformers, of random weights."""
    import transformers as hf

    width, _batch, tokens, words = SHAPES[shape]
    heads = max(2, width // 32)
    alike: dict[str, Any] = {"vocab_size": words, "use_cache": False}
    if family == "gpt2":
        alike |= {"bos_token_id": 0, "eos_token_id": 0}
        config: Any = hf.GPT2Config(
            n_embd=width, n_layer=LAYERS, n_head=heads, n_positions=tokens, **alike
        )
    else:
        kinds = {
            "llama": hf.LlamaConfig,
            "mistral": hf.MistralConfig,
            "gemma": hf.GemmaConfig,
            "experts": hf.MixtralConfig,
        }
        more: dict[str, Any] = {"head_dim": 32} if family == "gemma" else {}
        config = kinds[family](
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=LAYERS,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            max_position_embeddings=tokens,
            **alike,
            **more,
        )
    return hf.AutoModelForCausalLM.from_config(config).train()


def batch_of(shape: str) -> tuple[Kwargs, Callable[[Any], torch.Tensor]]:
    """A batch of a language model that returns its own loss."""
    _width, batch, tokens, words = SHAPES[shape]
    ids = torch.randint(0, words, (batch, tokens))
    return {"input_ids": ids, "labels": ids}, lambda found: found.loss


def images() -> tuple[Kwargs, Callable[[Any], torch.Tensor]]:
    """A batch of images."""
    return {"pixel_values": torch.randn(2, 3, 96, 96), "labels": torch.randint(0, 10, (2,))}, (
        lambda found: found.loss
    )


def resnet() -> nn.Module:
    """ResNet-50 of transformers."""
    import transformers as hf

    return hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=10)).train()


NETWORKS: dict[str, Network] = {
    **{
        f"{family}_{shape}": Network(
            partial(language_model, family, shape),
            partial(batch_of, shape),
            "gradient checkpointing",
        )
        for family in FAMILIES
        for shape in SHAPES
    },
    **{
        f"{family}_aot": Network(
            partial(language_model, family, "256"), partial(batch_of, "256"), "aot_eager"
        )
        for family in ("gpt2", "llama", "experts")
    },
    "resnet50_aot": Network(resnet, images, "aot_eager"),
}


class Steps:
    """Steps of one call of a model."""

    def __init__(
        self,
        model: nn.Module,
        call: Callable[..., Any],
        kwargs: Kwargs,
        loss: Callable[[Any], torch.Tensor],
    ) -> None:
        self.model, self.call, self.kwargs, self.loss = model, call, kwargs, loss

    def run(self) -> None:
        """One, whose gradients stay."""
        torch.manual_seed(1)
        found = self.call(**self.kwargs)
        self.loss(found).backward()

    def seconds(self) -> float:
        """CPU seconds of one, which leaves no gradients."""
        begin = time.process_time()
        self.run()
        taken_s = time.process_time() - begin
        self.model.zero_grad(set_to_none=True)
        return taken_s

    def warmed(self, count: int = 4) -> Steps:
        """The same after a few steps."""
        for _ in range(count):
            self.seconds()
        return self

    def peak_bytes(self) -> int:
        """The peak of one, parameters and batch included."""
        gc.collect()
        return fxremat.measure_step(self.model, self.seconds).peak_bytes

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of one."""
        self.run()
        found = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return found


def peer_of(network: Network, kwargs: Kwargs, loss: Callable[[Any], torch.Tensor]) -> Steps:
    """Steps of the peer."""
    torch.manual_seed(0)
    model: Any = network.build()
    if network.peer == "aot_eager":
        return Steps(model, torch.compile(model, backend="aot_eager"), kwargs, loss)
    model.gradient_checkpointing_enable()
    return Steps(model, model, kwargs, loss)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of one network."""
    keep_freed_memory()
    torch.set_num_threads(1)
    network = NETWORKS[name]
    torch.manual_seed(0)
    kwargs, loss = network.sample()
    peer = peer_of(network, kwargs, loss).warmed()
    row: dict[str, Any] = {"network": name, "peer": network.peer, "more": options.more}
    row["peer_bytes"] = peer.peak_bytes()
    budget = int(row["peer_bytes"] * (1 + options.more))
    torch.manual_seed(0)
    model = network.build()
    begin = time.process_time()
    try:
        call = fxremat.compile(model, fxremat.Sample((), dict(kwargs)), budget, loss="own")
    except BudgetError as error:
        return row | {"least_bytes": error.least_budget_bytes}
    row["compile_s"] = time.process_time() - begin
    ours = Steps(model, call, kwargs, loss).warmed()
    plan = call.plans[-1]
    row |= {
        "least_bytes": plan.least_budget_bytes,
        "peak_bytes": ours.peak_bytes(),
        "kept_bytes": plan.baseline_peak_bytes,
        "parts": len(plan.fused),
        "form": str(plan.form),
        "predicted_s": plan.predicted_s,
        "predicted_over_kept": plan.predicted_s / plan.baseline_s,
        "same_bits": first_difference(ours.gradients(), peer.gradients()) is None,
    }
    plain = Steps(peer.model, peer.model, kwargs, loss)
    if network.peer != "aot_eager":
        torch.manual_seed(0)
        plain = Steps(again := network.build(), again, kwargs, loss).warmed()
    runs = {"ours": ours.seconds, "peer": peer.seconds, "eager": plain.seconds}
    values = interleave(runs, rounds=options.rounds)
    row["seconds"] = {who: list(vars_of(Spread.of(taken))) for who, taken in values.items()}
    row["over_peer"] = list(vars_of(ratios(values, "ours", "peer")))
    row["over_eager"] = list(vars_of(ratios(values, "ours", "eager")))
    row["over_predicted"] = Spread.of(values["ours"]).median / plan.predicted_s
    return row


def vars_of(spread: Spread) -> tuple[float, float, float]:
    """Median, least and greatest."""
    return spread.median, spread.low, spread.high


def text(row: dict[str, Any]) -> list[str]:
    """A line of the table."""
    peer_bytes, least_bytes = row["peer_bytes"], row["least_bytes"]
    shown = [row["network"], format_bytes(peer_bytes), f"{least_bytes / peer_bytes:.3f}"]
    if "over_peer" not in row:
        return [*shown, *["–"] * 7]
    return [
        *shown,
        f"{row['peak_bytes'] / peer_bytes:.3f}",
        f"{row['kept_bytes'] / peer_bytes:.2f}",
        Spread(*row["over_peer"]).text(1, 3),
        Spread(*row["over_eager"]).text(1, 2),
        f"{row['predicted_over_kept']:.2f}",
        f"{row['over_predicted']:.2f}",
        str(row["parts"]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--more", type=float, default=0.0, help="share of the peak on top")
    parser.add_argument("--one", action="store_true", help="print the row of one network as JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.names[0], options)))
        return
    rows = []
    for name in options.names:
        more = ["--rounds", str(options.rounds), "--more", str(options.more)]
        found = subprocess.run(
            [sys.executable, "-m", "benchmarks.peers", name, "--one", *more],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        rows.append(json.loads(found.stdout.splitlines()[-1]))
        print(" ".join(text(rows[-1])), flush=True)
    columns = ["network", "peer's peak", "least", "peak", "kept", "time ÷ peer's"]
    columns += ["÷ eager's", "predicted ÷ kept", "÷ predicted", "parts"]
    for peer in dict.fromkeys(row["peer"] for row in rows):
        show(f"At the peak of {peer}", columns, [text(r) for r in rows if r["peer"] == peer])
    kept = rows_but(
        "peers", lambda row: row["network"] in options.names and row["more"] == options.more
    )
    save("peers", {"rows": sorted([*kept, *rows], key=lambda row: (row["network"], row["more"]))})


if __name__ == "__main__":
    main()
