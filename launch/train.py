"""What torchrun starts: ``torchrun … launch/train.py CONFIG`` is ``torchrun … -m mlora train CONFIG``."""

import sys

from mlora.cli import main

sys.exit(main(["train", *sys.argv[1:]]))
