"""``python one_gpu.py ARGUMENTS`` is ``mlora ARGUMENTS`` as one of several NCCL processes that share a GPU.

NCCL refuses two ranks on one device of one host, so each gets a host id of its own before it makes a communicator.
"""

import os
import sys

os.environ["NCCL_HOSTID"] = f"host{os.environ.get('RANK', '0')}"
os.environ["NCCL_SOCKET_IFNAME"] = "lo"

from mlora.cli import main

sys.exit(main(sys.argv[1:]))
