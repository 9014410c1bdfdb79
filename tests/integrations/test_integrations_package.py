"""What the integrations have in common: their names, and the counter of the calls that flash_cute served."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from flash_cute.integrations import _tally


def test_served_calls_are_counted_from_threads() -> None:
    tally = _tally.Tally()
    assert tally.report(False, reset=False).served == {}
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda i: [tally.serve("often") for _ in range(1000)], range(4)))
    tally.serve("once")
    for reset in (False, True):
        assert tally.report(False, reset).served == {"often": 4000, "once": 1}
    assert tally.report(False, reset=False).served == {}
    tally.serve("once")
    assert tally.report(False, reset=False).served == {"once": 1}


def test_modules_are_attributes(python: Callable[..., str]) -> None:
    """`import flash_cute` is all that a line of the README needs, and imports none of them."""
    code = """
import sys, flash_cute
assert not any(name.startswith("flash_cute.integrations") for name in sys.modules)
flash_cute.integrations.sdpa.enable(devices="cpu")
flash_cute.integrations.flash_attn.install()
print(flash_cute.integrations.sdpa.report().enabled, flash_cute.integrations.transformers.register.__name__)
for module in (flash_cute, flash_cute.integrations):
    try:
        module.nothing
    except AttributeError as error:
        print(error)
"""
    assert python(code).splitlines() == [
        "True register",
        "module 'flash_cute' has no attribute 'nothing'",
        "module 'flash_cute.integrations' has no attribute 'nothing'",
    ]
