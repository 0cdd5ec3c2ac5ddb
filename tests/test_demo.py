"""The demonstration itself, shortened; and that it would notice a difference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from demo import train
from demo.model import Config
from demo.text import draw_batches, read_text


def _run(**changes) -> train.Run:
    run = train.Run("one", 100, 90, (1.0, 0.5), (torch.tensor([1.0, 2.0]),), 0.5)
    return replace(run, **changes)


def test_runs_are_equal_bit_for_bit_or_not_at_all():
    assert _run().equals(_run(name="other", budget_bytes=50))
    assert not _run().equals(_run(losses=(1.0, 0.5000000000000001)))
    nearly = torch.tensor([1.0, 2.0]).nextafter(torch.tensor(3.0))
    assert not _run().equals(_run(parameters=(nearly,)))


def test_a_peak_fits_up_to_the_last_byte():
    assert _run(peak_bytes=100).fits()
    assert not _run(peak_bytes=101).fits()
    assert _run(budget_bytes=None, peak_bytes=101).fits()


def test_the_text_is_english_and_long_enough():
    text = read_text()
    assert len(text) > 100_000
    assert int(text.max()) < Config().characters
    assert "statement" in bytes(text.tolist()).decode("ascii")


def test_batches_are_passages_and_what_follows():
    text = read_text()
    first, again = (
        list(draw_batches(text, count=3, batch=2, context=50, seed=1)) for _ in range(2)
    )
    assert len(first) == 3
    for (x, y), (same_x, same_y) in zip(first, again, strict=True):
        assert x.shape == y.shape == (2, 50)
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert torch.equal(x, same_x)
        assert torch.equal(y, same_y)


@pytest.mark.parametrize("different", ["losses", "parameters", "peak_bytes"])
def test_a_difference_is_told_and_is_the_exit_status(monkeypatch, capsys, different):
    """Of three runs that are alike, spoil the last."""
    spoiled = {"losses": (2.0, 0.5), "parameters": (torch.zeros(2),), "peak_bytes": 101}

    def fake(name, *, batches, config, budget_bytes, rounds):
        changes = {different: spoiled[different]} if name == "a quarter" else {}
        return _run(name=name, **changes)

    monkeypatch.setattr(train, "train", fake)
    assert train.main(["--steps", "2", "--batch", "1"]) == 1
    printed = capsys.readouterr().out
    assert ("EXCEEDS" in printed) == (different == "peak_bytes")
    assert ("DIFFER" in printed) == (different != "peak_bytes")


@pytest.mark.slow
@pytest.mark.filterwarnings("error::fxremat.BudgetWarning")
def test_the_demonstration_holds_its_budgets_and_its_bits(capsys):
    status = train.main(["--steps", "3", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "equal to the last bit" in printed
    assert "within its budget" in printed
