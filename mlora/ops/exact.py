"""A sum that does not depend on the order of its terms."""

from __future__ import annotations

import math
from collections.abc import Iterable


def exact_sum(values: Iterable[float]) -> float:
    """The true sum, rounded once to float64; inf or nan where a term is."""
    terms = list(values)
    try:
        return math.fsum(terms) if all(map(math.isfinite, terms)) else sum(terms)
    except OverflowError:
        return math.inf
