"""What a line of emitted code takes."""

from fxremat.costs.calls import call_s


def test_a_call_takes_microseconds():
    call_s.cache_clear()
    found = call_s()
    assert 0 <= found < 1e-4
    assert call_s() == found
