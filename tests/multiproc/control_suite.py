"""What every control channel must do; runs once per rank, at the same time."""

import torch

from mlora.pipeline.transport.control import Control

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def run_control(control: Control, large: int = 1_000_000):
    published_objects_arrive_in_order(control)
    tensors_are_copied_and_named(control)
    large_objects(control, large)
    assert control.gather_objects(("rank", control.rank)) == (
        [("rank", rank) for rank in range(control.world)] if control.rank == 0 else None
    )
    control.close()


def published_objects_arrive_in_order(control):
    if control.rank == 0:
        for i in range(200):
            control.publish({"window": i, "rows": list(range(i))})
        return
    for i in range(200):
        assert control.next() == {"window": i, "rows": list(range(i))}


def named(rank):
    sent = {f"{rank}.{dtype}": torch.arange(12).reshape(3, 4).to(dtype) + rank for dtype in DTYPES}
    return {**sent, "empty": torch.zeros(0, 5), "scalar": torch.tensor(2.5), "strided": torch.arange(6).view(2, 3).t()}


def tensors_are_copied_and_named(control):
    if control.rank:
        sent = named(control.rank)
        control.send_tensors(sent)
        for tensor in sent.values():
            tensor.fill_(77)
        return control.send_tensors({})
    for rank in reversed(range(1, control.world)):
        received, expected = control.receive_tensors(rank), named(rank)
        assert list(received) == list(expected)
        for name, tensor in expected.items():
            assert received[name].dtype == tensor.dtype
            assert torch.equal(received[name], tensor)
        assert control.receive_tensors(rank) == {}
    return None


def large_objects(control, size):
    if control.rank == 0:
        control.publish(b"x" * size)
        for rank in range(1, control.world):
            (big,) = control.receive_tensors(rank).values()
            assert big.numel() == size // 4 and (big == rank).all()
        return
    assert control.next() == b"x" * size
    control.send_tensors({"big": torch.full((size // 4,), float(control.rank))})
