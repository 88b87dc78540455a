"""Tests keep their caches away from the user's."""

import os
import tempfile

_FOLDER = tempfile.TemporaryDirectory()
os.environ["XDG_CACHE_HOME"] = _FOLDER.name
