"""What a GPU is asked for, in which order, with streams that only write down (tests/gpu: real)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from psdist.transfers import ToGpu, Transfers


class Streams:
    """In place of torch.cuda."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.current = "compute"
        self.has_come = False

    def make(self, _device: Any) -> Stream:
        return Stream(self, "side")

    def current_stream(self, _device: Any) -> Stream:
        return Stream(self, self.current)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def event(self, *, blocking: bool) -> Event:
        assert blocking
        return Event(self, "copied")


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def record_event(self) -> Event:
        self.streams.said.append(f"{self.name} marks")
        return Event(self.streams, f"mark of {self.name}")

    def wait_event(self, event: Event) -> None:
        self.streams.said.append(f"{self.name} waits for {event.name}")


class Event:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def record(self, stream: Stream) -> None:
        self.streams.said.append(f"{stream.name} says {self.name}")

    def query(self) -> bool:
        return self.streams.has_come

    def synchronize(self) -> None:
        self.streams.said.append(f"host waits for {self.name}")


class Target(torch.Tensor):
    streams: Streams

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        waits = "" if non_blocking else ", waiting"
        self.streams.said.append(f"{self.streams.current} copies {len(source)}{waits}")
        return self


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", streams.make)
    monkeypatch.setattr(torch.cuda, "Event", streams.event)
    monkeypatch.setattr(torch.cuda, "current_stream", streams.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", streams.stream)
    return streams


def test_a_gpu_copies_beside_what_it_computes_behind_every_mark_and_says_when(
    streams: Streams,
) -> None:
    gpu = ToGpu(torch.device("cuda", 0))
    marks = [gpu.mark()]
    streams.current = "autograd's"
    marks.append(gpu.mark())
    streams.current = "compute"
    target = torch.zeros(3).as_subclass(Target)
    target.streams = streams
    del streams.said[:]
    copy = gpu.begin([(torch.ones(3), target), (torch.ones(2), target)], after=marks)
    assert streams.said == [
        "side waits for mark of compute",
        "side waits for mark of autograd's",
        "side copies 3",
        "side copies 2",
        "side says copied",
    ]
    del streams.said[:]
    copy.join()
    assert streams.said == ["compute waits for copied"]
    assert not copy.is_done()
    streams.has_come = True
    assert copy.is_done()
    copy.wait()
    assert streams.said[1:] == ["host waits for copied"]


def test_memory_is_zeroed_before_anything_is_copied_there(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    def zeros(num_elements: int, **_of: Any) -> torch.Tensor:
        streams.said.append(f"{streams.current} zeroes {num_elements}")
        return torch.empty(0)

    monkeypatch.setattr(torch, "zeros", zeros)
    ToGpu(torch.device("cuda", 0)).device_memory("float32", 3)
    assert streams.said == ["compute zeroes 3", "compute marks", "side waits for mark of compute"]


def test_what_is_computed_for_a_copy_is_asked_for_on_its_stream_behind_every_mark(
    streams: Streams,
) -> None:
    gpu = ToGpu(torch.device("cuda", 0))
    mark = gpu.mark()
    target = torch.zeros(3).as_subclass(Target)
    target.streams = streams
    del streams.said[:]

    def compute() -> list[tuple[torch.Tensor, torch.Tensor]]:
        streams.said.append(f"{streams.current} computes, gradients {torch.is_grad_enabled()}")
        return [(torch.ones(3), target)]

    copy: Any = gpu.begin_computed(compute, after=[mark])
    assert streams.said == [
        "side waits for mark of compute",
        "side computes, gradients False",
        "side copies 3",
        "side says copied",
    ]
    assert len(copy._pairs) == 1
    assert streams.current == "compute"


def test_what_is_copied_is_kept_until_it_is_there(streams: Streams) -> None:
    target = torch.zeros(3).as_subclass(Target)
    target.streams = streams
    gpu: Any = ToGpu(torch.device("cuda", 0))
    copy: Any = gpu.begin([(torch.ones(3), target)], after=[])
    assert not copy.is_done()
    assert len(copy._pairs) == 1
    copy.wait()
    assert copy.is_done()
    assert copy._pairs is None


def test_on_the_host_a_copy_is_made_at_once() -> None:
    host = Transfers()
    target = torch.zeros(3)
    copy = host.begin([(torch.ones(3), target)], after=[host.mark()])
    assert copy.is_done()
    assert target.tolist() == [1.0, 1.0, 1.0]
    host.begin([], after=[]).wait()
    host.begin_computed(lambda: [(torch.full((3,), 2.0), target)], after=[]).wait()
    assert target.tolist() == [2.0, 2.0, 2.0]
