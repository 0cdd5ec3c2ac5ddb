"""The table and the targets of ``benchmarks.gpu_llama``, from its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.common import Spread, ratios
from benchmarks.gpu_llama_order import (
    COMPILED,
    COMPILED_CHECKPOINTED,
    MEMORY_BUDGETS,
    SHARE,
    Planned,
    Start,
    memory_budget_name,
)
from benchmarks.rows import Row
from fxremat.units import format_bytes

DENSE_FLOPS = {"H100": 989e12, "H200": 989e12}
"""Operations a second in bfloat16, without sparsity, by a part of a device's name."""

BYTES_OFF, SECONDS_OFF = 0.005, 0.08
"""By what share predictions may be off."""

COLUMNS = (
    "contender", "budget", "peak", "reserved", "ms", "÷ reference", "predicted bytes",
    "predicted ms", "held", "a second", "MFU", "to the first step", "note",
)  # fmt: skip


def dense_flops(device: str) -> float | None:
    """Most operations a second in bfloat16 of a device of that name, if it is one of these."""
    return next((flops for name, flops in DENSE_FLOPS.items() if name in device), None)


def utilization(flops: float, seconds: float, most_flops: float) -> float:
    """MFU: what a step has to compute over what the device could compute meanwhile."""
    return flops / seconds / most_flops


def ratio(row: Row) -> Spread | None:
    """A row's step time over its reference's, of the same rounds; nothing without a reference."""
    if "reference_seconds" not in row:
        return None
    values = {"row": row["seconds"], "reference": row["reference_seconds"]}
    return ratios(values, "row", "reference")


def bytes_off(row: Row) -> float:
    """By what share of the measured peak the predicted one is larger, without the optimizer."""
    return row["predicted_peak_bytes"] / row["promised_peak_bytes"] - 1.0


def seconds_off(row: Row) -> float:
    """By what share of the measured seconds the predicted ones are more, without the optimizer."""
    measured = [all_s - update_s for all_s, update_s in _pairs(row)]
    return row["predicted_s"] / Spread.of(measured).median - 1.0


def _pairs(row: Row) -> Iterator[tuple[float, float]]:
    return zip(row["seconds"], row["update_s"], strict=True)


def _why(row: Row) -> str:
    return next(
        (f"{key}: {row[key]}" for key in ("skipped", "refused", "failed") if key in row), ""
    )


def _first_step(row: Row) -> str:
    cache = f" ({row['cache']})" if row["cache"] else ""
    return f"{row['first_step_s']:.1f} s{cache}"


def progress(row: Row) -> str:
    """A row in a line."""
    if why := _why(row):
        return why
    first = f"first step {_first_step(row)}"
    if "seconds" not in row:
        return first
    spread = Spread.of(row["seconds"]).text(1e3)
    found = [format_bytes(row["peak_bytes"]), f"{spread} ms"]
    if (against := ratio(row)) is not None:
        found.append(f"{against.median:.3f} x {row['reference']}")
    if "held" in row:
        found.append("held" if row["held"] else "OVER")
    return ", ".join([*found, first, f"row {row['row_s']:.1f} s"])


def line(row: Row) -> list[str]:
    """A line of the table."""
    if why := _why(row):
        return [row["what"], *[""] * (len(COLUMNS) - 2), why[:120]]
    first = _first_step(row)
    if "seconds" not in row:
        return [row["what"], *[""] * (len(COLUMNS) - 3), first, ""]
    spread = Spread.of(row["seconds"])
    against = ratio(row)
    planned = "held" in row
    number, what = row["items"]
    most, flops = row.get("most_flops"), row.get("flops")
    return [
        row["what"],
        format_bytes(row["budget_bytes"]) if planned else "",
        format_bytes(row["peak_bytes"]),
        format_bytes(row["reserved_peak_bytes"]),
        spread.text(1e3),
        f"{against.median:.3f}" if against else "",
        f"{bytes_off(row):+.2%}" if planned else "",
        f"{seconds_off(row):+.1%}" if planned else "",
        ("yes" if row["held"] else "NO") if planned else "",
        f"{number / spread.median:.0f} {what}",
        f"{utilization(flops, spread.median, most):.1%}" if most and flops else "",
        first,
        f"reference: {row['reference']}" if against else row.get("reference_failed", "")[:60],
    ]


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table."""
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows
    )


@dataclass(frozen=True, slots=True)
class Target:
    """What the figures should be, and are.

    Attributes:
        holds: nothing while rows are missing.
    """

    text: str
    wanted: str
    found: str
    holds: bool | None


def targets(rows: Sequence[Row]) -> list[Target]:
    """Those of a Llama, from its rows."""
    by_name = {row["what"]: row for row in rows}

    def at(budget: float, reference: str) -> Row:
        return by_name.get(Planned("inductor", budget, reference).name, {})

    budgets = [at(1.0, memory_budget_name(setting)) for setting in MEMORY_BUDGETS]
    peak = f"fxremat (inductor) at the peak of {COMPILED}"
    return [
        _ratios(f"{peak} / its time", 1.00, [at(1.0, COMPILED)]),
        _ratios(f"at {SHARE:.0%} of that peak / its time", 1.05, [at(SHARE, COMPILED)]),
        _ratios(f"at the peak of {COMPILED_CHECKPOINTED} / its time", 0.90,
                [at(1.0, COMPILED_CHECKPOINTED)]),
        _ratios("at each peak of activation_memory_budget / its time", 1.00, budgets),
        *_predictions([row for row in rows if "held" in row]),
        _first_steps("cold", by_name.get(COMPILED, {}), at(1.0, COMPILED)),
        _first_steps("warm", *(
            by_name.get(Start(name).name, {})
            for name in (COMPILED, Planned("inductor", 1.0, COMPILED).name)
        )),
    ]  # fmt: skip


def _ratios(text: str, most: float, rows: Sequence[Row]) -> Target:
    found = [ratio(row) for row in rows]
    medians = [each.median for each in found if each is not None]
    refused = sum("refused" in row for row in rows)
    shown = ", ".join(f"{median:.3f}" for median in medians)
    if refused:
        shown += f" ({refused} refused)"
    missing = len(medians) + refused < len(rows)
    holds = all(median <= most for median in medians) and not refused
    return Target(text, f"<= {most:.2f}", shown, None if missing and holds else holds)


def _predictions(planned: Sequence[Row]) -> Iterator[Target]:
    held = sum(row["held"] for row in planned)
    every = held == len(planned) if planned else None
    yield Target("measured peak <= budget", "all rows", f"{held} of {len(planned)}", every)
    offs: tuple[tuple[str, Callable[[Row], float], float], ...] = (
        ("predicted bytes", bytes_off, BYTES_OFF),
        ("predicted ms", seconds_off, SECONDS_OFF),
    )
    for text, off, most in offs:
        found = [off(row) for row in planned]
        within = sum(abs(each) <= most for each in found)
        shown = f"{within} of {len(found)}"
        if found:
            shown += f", {min(found):+.2%} to {max(found):+.2%}"
        yield Target(text, f"+-{most:.1%}", shown, within == len(found) if found else None)


def _first_steps(state: str, peer: Row, planned: Row) -> Target:
    """Seconds to the first step: fxremat's over those of ``torch.compile``."""
    text = f"seconds to the first step, {state}, / {COMPILED}"
    if any(row.get("cache") != state for row in (peer, planned)):
        states = " and ".join(str(row.get("cache", "missing")) for row in (peer, planned))
        return Target(text, "<= 1.00", f"caches were {states}", None)
    seconds = peer["first_step_s"], planned["first_step_s"]
    found = seconds[1] / seconds[0]
    shown = f"{found:.2f} ({seconds[1]:.1f} s / {seconds[0]:.1f} s)"
    return Target(text, "<= 1.00", shown, found <= 1.0)


def summary(rows: Sequence[Row]) -> str:
    """All tables, in markdown."""
    parts = []
    for network in dict.fromkeys(row["network"] for row in rows if row["network"]):
        chosen = [row for row in rows if row["network"] == network]
        parts.append(f"{network}\n\n{markdown(COLUMNS, [line(row) for row in chosen])}")
        if network == "llama":
            lines = [
                [each.text, each.wanted, each.found, _answer(each.holds)]
                for each in targets(chosen)
            ]
            parts.append(markdown(("on a GPU, Llama-1B", "target", "measured", "holds"), lines))
    return "\n\n".join(parts) + "\n"


def _answer(holds: bool | None) -> str:
    return "" if holds is None else "yes" if holds else "NO"
