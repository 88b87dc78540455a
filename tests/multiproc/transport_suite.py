"""What every transport must do. Each function runs once per stage, at the same time, in a thread or a process."""

import random
import threading
import time

import pytest
import torch

from mlora.pipeline.transport.base import Direction, Spec, Transport, TransportError

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8)


def routes(transport):
    """(direction, sends, receives) for this stage."""
    last = transport.stages - 1
    for direction in Direction:
        yield direction, 0 <= transport.stage + direction <= last, 0 <= transport.stage - direction <= last


def messages(stage, direction, count):
    """The messages that ``stage`` sends, the same on both sides: 0 to 3 tensors, some of them empty."""
    rng = random.Random(1000 * stage + direction)
    return [(i, [(rng.choice(DTYPES), rng.choice(SHAPES)) for _ in range(rng.randrange(4))]) for i in range(count)]


SHAPES = ((1,), (3, 5), (0, 7), (), (16, 64), (513,))


def tensors(number, kinds, device):
    return [torch.full(shape, (number + k) % 100, dtype=dtype, device=device) for k, (dtype, shape) in enumerate(kinds)]


def check_message(received, number, kinds):
    assert len(received) == len(kinds)
    for tensor, expected in zip(
        received, tensors(number, kinds, received[0].device if received else "cpu"), strict=True
    ):
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), f"message {number} was mixed up"


def specs(kinds):
    return [Spec(shape, dtype) for dtype, shape in kinds]


def order_of_a_thousand(transport: Transport, device):
    """1,000 messages each way at once, sends and receives up to 60 ahead of the message that is waited for.

    Fewer on a GPU, which several processes may share.
    """
    count = 1000 if device == "cpu" else 200
    rng = random.Random(transport.stage)
    sends = [(d, iter(messages(transport.stage, d, count))) for d, sends, _ in routes(transport) if sends]
    receives = [(d, iter(messages(transport.stage - d, d, count)), []) for d, _, due in routes(transport) if due]
    for i in range(count):
        for direction, due, posted in rng.sample(receives, len(receives)):
            for number, kinds in up_to(due, i + rng.randrange(60)):
                posted.append((transport.receive(direction, specs(kinds)), number, kinds))
        for direction, unsent in rng.sample(sends, len(sends)):
            for number, kinds in up_to(unsent, i + rng.randrange(60)):
                transport.send(direction, tensors(number, kinds, device))
        for *_, posted in receives:
            check_first(posted)


def up_to(numbered, last):
    """The next items up to number ``last``, at least one if any is due."""
    for number, kinds in numbered:
        yield number, kinds
        if number >= last:
            return


def check_first(posted):
    pending, number, kinds = posted.pop(0)
    check_message(pending.wait(), number, kinds)


def many_in_flight(transport: Transport, device):
    """All sends leave before any receive is posted, with more bytes than sockets buffer."""
    for direction, sends, _ in routes(transport):
        for i in range(40 if sends else 0):
            transport.send(direction, [torch.full((100_000,), float(i), device=device)])
    for direction, _, receives in routes(transport):
        for i in range(40 if receives else 0):
            (x,) = transport.receive(direction, [Spec((100_000,), torch.float32)]).wait()
            assert (x == i).all()


def early_receives_hold_up_nothing(transport: Transport, device):
    """All receives are posted first; a token then goes up and down the stages many times."""
    rounds, spec = 30, [Spec((1000,), torch.float32)]
    early = {d: [transport.receive(d, spec) for _ in range(rounds if r else 0)] for d, _, r in routes(transport)}
    for i in range(rounds):
        x = torch.full((1000,), float(i), device=device)
        if early[Direction.FORWARD]:
            (x,) = early[Direction.FORWARD][i].wait()
        if transport.stage < transport.stages - 1:
            transport.send(Direction.FORWARD, [x + 1])
            (x,) = early[Direction.BACKWARD][i].wait()
        if transport.stage:
            transport.send(Direction.BACKWARD, [x + 1])
    assert (x == i + 2 * (transport.stages - 1) - transport.stage).all() or transport.stages == 1


def waits_in_any_order(transport: Transport, device):
    for direction, sends, _ in routes(transport):
        for i in range(4 if sends else 0):
            transport.send(direction, [torch.tensor([i], device=device)])
    for direction, _, receives in routes(transport):
        posted = [transport.receive(direction, [Spec((1,), torch.int64)]) for _ in range(4 if receives else 0)]
        for i in reversed(range(len(posted))):
            assert posted[i].wait()[0].item() == i


def sender_keeps_its_tensor(transport: Transport, device):
    """What is received is the receiver's own, and what was sent may be forgotten at once."""
    for direction, sends, _ in routes(transport):
        for i in range(20 if sends else 0):
            x = torch.full((50_000,), float(i), device=device)
            transport.send(direction, [x, x.view(100, 500).t()])
            del x
            torch.full((50_000,), -1.0, device=device)
    for direction, _, receives in routes(transport):
        for i in range(20 if receives else 0):
            x, y = transport.receive(
                direction, [Spec((50_000,), torch.float32), Spec((500, 100), torch.float32)]
            ).wait()
            assert (x == i).all()
            x.zero_()
            assert (y == i).all()


def close_delivers_pending_sends(transport: Transport, device):
    """The last stage posts its receives long after the others have begun to close."""
    if transport.stage < transport.stages - 1:
        for i in range(10):
            transport.send(Direction.FORWARD, [torch.full((300_000,), float(i), device=device)])
    if transport.stage:
        time.sleep(0.5)
        for i in range(10):
            (x,) = transport.receive(Direction.FORWARD, [Spec((300_000,), torch.float32)]).wait()
            assert (x == i).all()


def abort_wakes_a_waiting_receive(transport: Transport, device):
    """Ends with an aborted transport: every stage waits for a message that nobody sends."""
    direction = Direction.FORWARD if transport.stage else Direction.BACKWARD
    pending = transport.receive(direction, [Spec((4,), torch.float32)])
    threading.Timer(0.3, transport.abort).start()
    started = time.monotonic()
    with pytest.raises(TransportError):
        pending.wait()
    assert time.monotonic() - started < 5
    with pytest.raises(TransportError):
        transport.send(Direction(-direction), [torch.zeros(1, device=device)])
    with pytest.raises(TransportError):
        transport.receive(direction, [Spec((4,), torch.float32)])


CLOSING = (
    order_of_a_thousand,
    many_in_flight,
    early_receives_hold_up_nothing,
    waits_in_any_order,
    sender_keeps_its_tensor,
    close_delivers_pending_sends,
)
NAMES = [check.__name__ for check in (*CLOSING, abort_wakes_a_waiting_receive)]


def run_check(name, transport: Transport, device, close=True):
    globals()[name](transport, device)
    if close and name != abort_wakes_a_waiting_receive.__name__:
        transport.close()
