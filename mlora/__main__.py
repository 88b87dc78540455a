"""``python -m mlora``, the form that torchrun starts."""

import sys

from mlora.cli import main

sys.exit(main())
