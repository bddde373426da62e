"""Pushes that the host's compiled kernels encode: the bytes and residuals of torch; and where the
compiled library is kept. Skipped without a compiler, except the last tests."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from psdist import c_libraries
from psdist.codecs import RAW, host_kernels
from psdist.codecs.chunks import Form, put, taken
from psdist.codecs.coders import HostCoder
from psdist.codecs.feedback import PushTerms
from psdist.codecs.host_kernels import HostKernels, kernels_for
from psdist.codecs.layout import Division, Stretch
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.wire import Wire
from psdist.errors import NonFiniteGradientError, ProtocolError
from psdist.protocol.events import Frame
from psdist.protocol.optimizers import pack_hyperparameters, traits
from psdist.servers.protocol.actions import Fold, Load, SlotContent, StartSum, Step
from psdist.servers.shard.executor import ShardSpec
from psdist.servers.shard.tensors import TensorShard
from psdist.transfers import Transfers
from tests.support.device_cases import (
    FORMS,
    LARGEST,
    Pair,
    hard_vector,
    require_same_steps,
    same_bits,
)

CODECS = {name: FORMS[name] for name in ("int8", "int4", "int2", "sign", "fp16", "bf16")}
ALL = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no compiler on PATH"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    # Each call looks for the library again, as another process would.
    monkeypatch.setattr(host_kernels, "of_this_process", host_kernels.of_this_process.__wrapped__)


@pytest.fixture
def kernels() -> HostKernels:
    found = kernels_for(CODECS.values())
    assert found is not None
    return found


@needs_compiler
@ALL
def test_every_codec_passes_its_trial(codec: Any, kernels: HostKernels) -> None:
    assert kernels.prove(codec)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@ALL
def test_step_by_step_payloads_and_residuals_are_those_of_torch(
    codec: Any, dtype: str, kernels: HostKernels
) -> None:
    coder = HostCoder(host_kernels=kernels)
    for shape, scale, ties in (
        ((1, 1), 1.0, False),
        ((1, 85), 1e-38, True),
        ((60, 77), 1e-44, False),
        ((60, 77), 1e36, True),
        ((300, 256), 1e-3, False),
        ((300, 257), 1e-3, True),
    ):
        num = require_same_steps(
            codec, coder, kernels, dtype=dtype, shape=shape, scale=scale, ties=ties
        )
        assert num == 6, "all: the first, which has no residual, and one with a checksum"


@needs_compiler
@pytest.mark.parametrize("exact", [("a",), ("b",), ("a", "c"), ("a", "b", "c")])
@ALL
def test_pieces_that_codecs_leave_alone_go_as_they_are(
    codec: Any, exact: tuple[str, ...], kernels: HostKernels
) -> None:
    coder = HostCoder(host_kernels=kernels)
    for dtype, shape in (("float32", (20, 16)), ("bfloat16", (77, 5)), ("float32", (1, 3))):
        num = require_same_steps(codec, coder, kernels, dtype=dtype, exact=exact, shape=shape)
        assert num == (0 if len(exact) == 3 else 6)


@needs_compiler
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), LARGEST])
@ALL
def test_a_gradient_that_is_not_finite_is_not_pushed(
    codec: Any, value: float, kernels: HostKernels
) -> None:
    pair = Pair([(0, codec)], Transfers(), coder=HostCoder(host_kernels=kernels))
    gradient, terms = hard_vector(pair.chunk.length, seed=1), PushTerms(1.0, ())
    pair.begin(gradient, terms)
    pair.push(gradient, terms)
    gradient[700] = value
    num = kernels.num_pushes
    pair.begin(gradient, terms)
    assert kernels.num_pushes == num + 1
    assert pair.device.is_finite(0) == (value == LARGEST)
    for encoder, values, into in (
        (pair.host, gradient, pair.memories[0]),
        (pair.device, pair.there, pair.memories[1]),
    ):
        if value == LARGEST:
            encoder.encode(0, values, into, clock=1, terms=terms)
        else:
            with pytest.raises(NonFiniteGradientError):
                encoder.encode(0, values, into, clock=1, terms=terms)
    pair.require_same_residuals()


@needs_compiler
@pytest.mark.parametrize("exact", [(), ("a",), ("b",), ("a", "c")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@ALL
def test_payloads_are_decoded_as_torch_does(
    codec: Any, dtype: str, exact: tuple[str, ...], kernels: HostKernels
) -> None:
    for shape, scale in (((1, 1), 1.0), ((60, 77), 1e-44), ((60, 77), 1e36), ((300, 257), 1e-3)):
        pair = Pair([(0, codec)], Transfers(), dtype=dtype, exact=exact, shape=shape)
        coding, terms = pair.host.codings[0], PushTerms(1.0, ())
        gradient = hard_vector(pair.chunk.length, seed=1, scale=scale).to(pair.there.dtype)
        payload = pair.memories[0]
        for clock in (1, 2):
            num = pair.host.encode(0, gradient, payload, clock=clock, terms=terms)
            found = torch.full((pair.chunk.length,), 7.0)
            assert kernels.decode(coding, payload[:num], found)
            values = coding.read(payload[:num]).values()
            assert same_bits(found, values)
            for weight in (1.0, 2.0, 0.7):
                total, expected = (found.clone() for _ in range(2))
                assert kernels.add(coding, payload[:num], total, weight)
                assert same_bits(total, expected.add_(values, alpha=weight))


@needs_compiler
def test_torch_decodes_payloads_of_other_forms_and_refuses_wrong_ones(
    kernels: HostKernels,
) -> None:
    for codec in CODECS.values():
        kernels.prove(codec)
    pair = Pair([(0, CODECS["int4"])], Transfers(), compare_every=3)  # type: ignore[list-item] # it is a codec
    coding, payload, gradient = pair.host.codings[0], pair.memories[0], pair.there + 1.0
    into = torch.empty(pair.chunk.length)

    def pushed(clock: int, absent: set[int]) -> memoryview:
        terms = PushTerms(1.0, absent)
        return payload[: pair.host.encode(0, gradient, payload, clock=clock, terms=terms)]

    assert kernels.decode(coding, pushed(1, set()), into)
    checked, total = bytearray(pushed(3, set())), torch.zeros_like(into)
    assert kernels.decode(coding, memoryview(checked), into), "with a checksum"
    assert not kernels.add(coding, memoryview(checked), total, 1.0)
    checked[5] ^= 1
    assert not kernels.decode(coding, memoryview(checked), into)
    assert not coding.read(memoryview(checked)).is_as_sent
    assert not kernels.decode(coding, pushed(1, {1}), into), "without a piece"
    assert not kernels.decode(coding, payload[: coding.encode_raw(gradient, payload)], into)
    good = bytes(pushed(1, set()))
    for place, value in ((len(good) - 1, 0), (11, 0x80)):  # no code of int4; a scale below 0
        bad = bytearray(good)
        bad[place] = value
        assert not kernels.decode(coding, memoryview(bad), into)
        with pytest.raises(ProtocolError):
            kernels.add(coding, memoryview(bad), total, 1.0)
        with pytest.raises(ProtocolError):
            coding.read(memoryview(bad))
    total.zero_()
    for num in (0, 7, len(good) - 8):
        assert not kernels.decode(coding, memoryview(bytearray(good[:num])), into)
        assert not kernels.add(coding, memoryview(bytearray(good[:num])), total, 1.0)
    assert not total.any()


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@ALL
def test_sums_and_steps_on_a_server_are_those_of_torch(
    codec: Any, dtype: str, kernels: HostKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernels.prove(codec)
    wire = Wire(push=codec, reply=RAW, seed=0, exact_in_pushes=("b",))
    pair = Pair(
        [(0, codec)], Transfers(), dtype=dtype, exact=("b",), shape=(60, 77), compare_every=3
    )
    (chunk,), hyper = pair.partition.chunks, pack_hyperparameters([{"lr": 0.5}])
    spec = ShardSpec(
        partition=pair.partition, chunks=(0,), optimizer="torch.optim.SGD",
        traits=traits("torch.optim.SGD"), hyper=hyper, wire=wire,
    )  # fmt: skip
    shards = [TensorShard(spec)]
    with monkeypatch.context() as patch:
        patch.setattr(host_kernels, "kernels_for", lambda _codecs: None)
        shards.append(TensorShard(spec))
    found = []
    for shard in shards:
        slots, sums = shard.make_slots(3), []

        def pushed(slot: Frame, clock: int, absent: set[int]) -> None:
            gradient = hard_vector(chunk.length, seed=clock).to(pair.there.dtype)
            into, terms = slot.payload, PushTerms(1.0, absent)
            assert into is not None
            num = pair.host.encode(0, gradient, into, clock=clock, terms=terms)
            slot.num_received = num

        pair.host.restore({"0": {}})
        shard.load(Load(0, slots[2]))
        for first, second, absent in ((1.0, 1.0, set()), (2.0, 0.7, set()), (1.0, 2.0, {1})):
            for clock in (1, 2, 3):  # one of them with a checksum
                pushed(slots[0], clock, set())
                shard.start_sum(StartSum(0, slots[0], first, clock))
                pushed(slots[1], clock + 10, absent)
                shard.fold(Fold(0, slots[1], slots[0], second, clock + 10))
                shard.step(
                    Step(
                        chunk=0, gradient=slots[0], content=SlotContent.SUM, gradient_scale=0.5,
                        lr_scale=1.0, hyper=hyper, absent=frozenset(), source=0, target=0,
                        contributions=(),
                    )
                )  # fmt: skip
                sums.append(bytes(shard.payload(0, 0)))
        found.append(sums)
    assert found[0] == found[1]
    assert any(found[0][0])


@needs_compiler
@ALL
def test_relative_replies_are_those_of_torch_at_both_ends(codec: Any, kernels: HostKernels) -> None:
    assert kernels.prove(codec)
    for exact, shape in (((), (300, 257)), (("b",), (60, 77)), (("a", "c"), (1, 3))):
        pair = Pair([(0, codec)], Transfers(), exact=exact, shape=shape)
        coding, length, into = pair.host.codings[0], pair.chunk.length, pair.memories[0]
        padded = coding.all.coded + coding.all.exact
        held = [torch.zeros(length) for _ in range(4)]
        for clock in range(4):
            values = torch.zeros(length)
            put(values, padded, taken(hard_vector(length, seed=clock), padded))
            num = coding.encode(values - held[0], into, whole=values, seed=0, form=Form.CHANGE)
            expected = bytes(into[:num])
            coding.read(into[:num]).change(held[0])
            num = kernels.encode_change(coding, values, held[1], into)
            assert bytes(into[:num]) == expected
            assert kernels.add(coding, into[:num], held[2], form=Form.CHANGE)
            assert not kernels.add(coding, into[:num], held[3]), "no push"
            assert not held[3].any()
            assert same_bits(held[0], held[1])
            assert same_bits(held[0], held[2])


@needs_compiler
def test_memory_is_used_again_only_when_no_tensor_refers_to_it(kernels: HostKernels) -> None:
    pair = Pair([(0, CODECS["int8"])], Transfers(), coder=HostCoder(host_kernels=kernels))  # type: ignore[list-item] # it is a codec
    terms, places = PushTerms(1.0, ()), set()
    gradient = hard_vector(pair.chunk.length, seed=1)
    for _ in range(2):
        pair.begin(gradient, terms)
        pair.push(gradient, terms)
    collected = pair.device.collect()["0"]["values"]  # of a checkpoint that is being written
    kept = collected.clone()
    for _ in range(10):
        pair.begin(gradient, terms)
        pair.push(gradient, terms)
        gc.collect()
        places.add(pair.device.residuals()[0].values.data_ptr())
    assert torch.equal(collected, kept)
    assert collected.data_ptr() not in places
    assert len(places) == 2


@needs_compiler
def test_a_library_is_compiled_once_for_a_kind_of_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernels_for(CODECS.values()) is not None
    (library,) = (tmp_path / "psdist").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", None)  # nothing is compiled
        assert kernels_for(CODECS.values()) is not None
    monkeypatch.setattr("platform.machine", lambda: "other")
    assert kernels_for(CODECS.values()) is not None
    assert len(list((tmp_path / "psdist").iterdir())) == 2, library


@needs_compiler
def test_a_library_that_others_may_have_written_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernels_for(CODECS.values()) is not None
    (library,) = (tmp_path / "psdist").iterdir()
    library.unlink()  # this process has loaded it
    library.write_bytes(b"no library")
    library.chmod(0o666)
    assert kernels_for(CODECS.values()) is not None
    assert library.stat().st_size > 100
    assert library.stat().st_mode & 0o022 == 0


@needs_compiler
def test_without_a_folder_to_write_to_the_library_is_loaded_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    num = len(os.listdir("/proc/self/fd"))
    assert kernels_for(CODECS.values()) is not None
    assert len(os.listdir("/proc/self/fd")) == num


@needs_compiler
def test_a_user_without_a_home_gets_no_folder_named_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr("os.path.expanduser", str)
    assert kernels_for(CODECS.values()) is not None
    assert list(tmp_path.iterdir()) == []


def test_messages_of_a_compiler_in_another_encoding_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_bytes(b"#!/bin/sh\nprintf 'Ger\\344t voll' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernels_for(CODECS.values()) is None


def test_without_a_compiler_torch_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert kernels_for(CODECS.values()) is None


@needs_compiler
def test_a_compiler_that_fails_leaves_the_push_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(c_libraries, "_FLAGS", ("--no-such-flag",))
    assert kernels_for(CODECS.values()) is None
    assert not (tmp_path / "psdist").exists()


@needs_compiler
def test_a_kernel_with_other_bits_leaves_the_push_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HostKernels, "push", lambda *_, **__: None)
    assert kernels_for([CODECS["sign"]]) is None
    assert "codec=sign: its bits differ" in caplog.text


def test_there_are_kernels_for_some_codecs_only() -> None:
    assert kernels_for([FORMS["topk:0.01"]]) is None


@needs_compiler
def test_a_codec_of_the_same_name_is_not_encoded_by_what_another_one_has_proved(
    kernels: HostKernels,
) -> None:
    class Mine(Quantized):
        """A codec of the user's."""

    values, mine = torch.randn(64), Mine("int8")
    for codec, is_encoded in (CODECS["int8"], True), (mine, False):
        payload = torch.empty(codec.num_bytes(64), dtype=torch.uint8)
        division = Division([Stretch(0, 64)], [], codec, (0,))
        pushed = kernels.push(division, values, None, 1.0, payload)
        assert (pushed is not None) == is_encoded
