import sys
import threading
import traceback
from pathlib import Path

import pytest
import torch

from mlora.pipeline.transport.base import Direction, Spec, TransportError
from mlora.pipeline.transport.local import local_controls, local_transports

sys.path.insert(0, str(Path(__file__).parents[1] / "multiproc"))
from control_suite import run_control
from transport_suite import NAMES, run_check


def in_threads(function, arguments, deadline_s=30):
    """Run function(argument) in one thread each; fail with their tracebacks, or when one does not end in time."""
    errors = []

    def guarded(argument):
        try:
            function(argument)
        except BaseException:
            errors.append(traceback.format_exc())

    threads = [threading.Thread(target=guarded, args=(argument,), daemon=True) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_s)
    assert not errors, "\n".join(errors)
    assert not any(thread.is_alive() for thread in threads), "a stage is stuck"


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_conformance(name, stages):
    in_threads(lambda transport: run_check(name, transport, "cpu"), local_transports(stages))


@pytest.mark.parametrize("world", [1, 3])
def test_control(world):
    in_threads(run_control, local_controls(world))


def test_one_abort_reaches_stages_that_are_not_neighbours():
    transports = local_transports(4)
    pending = transports[3].receive(Direction.FORWARD, [Spec((1,), torch.float32)])
    transports[0].abort()
    with pytest.raises(TransportError):
        pending.future.result(timeout=5)


def test_a_message_of_another_shape_is_noticed():
    first, second = local_transports(2)
    first.send(Direction.FORWARD, [torch.zeros(3)])
    with pytest.raises(AssertionError, match="expected"):
        second.receive(Direction.FORWARD, [Spec((4,), torch.float32)]).wait()


def test_the_ends_have_no_neighbour():
    first, _ = local_transports(2)
    with pytest.raises(AssertionError, match="no stage -1"):
        first.send(Direction.BACKWARD, [torch.zeros(1)])
