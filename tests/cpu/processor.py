"""Which CPU the tests run on: MKL has a mode in which the number of threads changes no sum on Intel's alone."""

from __future__ import annotations

from pathlib import Path

_FACTS = Path("/proc/cpuinfo")
INTEL = _FACTS.exists() and "GenuineIntel" in _FACTS.read_text()
STRICT = "MKL has its strict mode on Intel's CPUs"
