"""Optimizer state on the chief: what it describes, sends and puts together, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from psdist.errors import InvariantError, OptimizerRefusedError, ProtocolError
from psdist.protocol import optimizer_state
from psdist.protocol.control import StateHeld, StateTaken, StateWanted
from psdist.protocol.ids import server_id
from psdist.protocol.optimizer_state import (
    MOST_KEYS,
    OneValue,
    PerElement,
    PieceState,
    Plain,
    Uncut,
    pack_states,
    parts_of,
)
from psdist.protocol.partition import Partition
from psdist.workers.model.description import ModelDescription
from psdist.workers.model.optimizer_state import (
    OwnState,
    ServersState,
    all_parts,
    describe_state,
)
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import Action, KeepState, SendControl, SendState, Warn
from psdist.workers.protocol.core import WorkerCore
from psdist.workers.protocol.optimizer_state import StateTransfer
from tests.support.virtual.worker_machine import OWNERS, SETUP, control, make_core

ALL_PARTS = [(chunk, 0) for chunk in range(len(OWNERS))]


# -- the machine -----------------------------------------------------------------------------------


def sent(actions: list[Action]) -> list[tuple[int, int]]:
    """(server's id, chunk) of the parts that leave."""
    found = []
    for each in actions:
        assert isinstance(each, SendState)
        found.append((each.peer, each.chunk))
    return found


def taken(core: WorkerCore, chunk: int, start: int = 0, server: int | None = None) -> list[Action]:
    peer = server_id(OWNERS[chunk] if server is None else server)
    return control(core, peer, StateTaken(chunk=chunk, start=start))


def test_one_part_at_a_time_is_on_its_way_to_each_server() -> None:
    core = make_core()
    assert sent(core.begin_sending_state(ALL_PARTS)) == [(server_id(0), 0), (server_id(1), 1)]
    assert core.awaits() == "servers to take the optimizer's state"
    assert sent(taken(core, 0)) == [(server_id(0), 2)]
    assert sent(taken(core, 1)) == [(server_id(1), 3)]
    assert sent(taken(core, 2)) == [(server_id(0), 4)]
    assert taken(core, 4) == []
    assert sent(taken(core, 3)) == [(server_id(1), 5)]
    assert not core.state.is_idle
    assert core.ask_who_is_missing() == [Warn("waiting for server 1: optimizer state of chunk 5")]
    with pytest.raises(InvariantError, match="began during"):
        core.begin_collective("mean")
    assert taken(core, 5) == []
    assert core.state.is_idle
    assert core.awaits() == "nothing"


def test_a_server_without_parts_is_sent_none() -> None:
    core = make_core()
    assert core.begin_sending_state([]) == []
    assert core.state.is_idle
    assert sent(core.begin_sending_state([(1, 0), (1, 64)])) == [(server_id(1), 1)]
    with pytest.raises(InvariantError, match="before what it began before has ended"):
        core.begin_sending_state([(0, 0)])


@pytest.mark.parametrize(("chunk", "start", "server"), [(2, 0, 0), (0, 1, 0), (0, 0, 1), (9, 0, 0)])
def test_an_answer_to_what_is_not_under_way_is_refused(chunk: int, start: int, server: int) -> None:
    core = make_core()
    core.begin_sending_state(ALL_PARTS)
    with pytest.raises(ProtocolError, match=f"worker 0: server {server} sent StateTaken about"):
        taken(core, chunk, start, server)


def held(chunk: int, *, number: int = 1, server: int | None = None) -> tuple[int, StateHeld]:
    peer = server_id(OWNERS[chunk] if server is None else server)
    return peer, StateHeld(number=number, chunk=chunk, start=0, described=b"", values=b"")


def test_all_parts_are_asked_for_one_after_the_other_and_kept() -> None:
    core = make_core()
    for number in (1, 2):
        actions = core.begin_fetching_state(ALL_PARTS)
        assert core.awaits() == "servers to bring the optimizer's state"
        kept = []
        while actions:
            action = actions.pop(0)
            if isinstance(action, KeepState):
                kept.append(action.message.chunk)
                continue
            assert isinstance(action, SendControl)
            assert isinstance(action.message, StateWanted)
            assert action.message.number == number
            assert action.peer == server_id(OWNERS[action.message.chunk])
            assert not core.state.is_idle
            actions += control(core, *held(action.message.chunk, number=number))
        assert sorted(kept) == list(range(len(OWNERS)))
        assert core.state.is_idle


def test_what_was_not_asked_for_or_the_last_time_is_refused() -> None:
    core = make_core()
    with pytest.raises(ProtocolError, match="sent StateHeld about chunk 0"):
        control(core, *held(0))
    core.begin_sending_state(ALL_PARTS)
    with pytest.raises(ProtocolError, match="sent StateHeld about chunk 0"):
        control(core, *held(0))

    core = make_core()
    core.begin_fetching_state(ALL_PARTS)
    with pytest.raises(ProtocolError, match="which this worker does not wait for"):
        control(core, *held(0, number=2))
    with pytest.raises(ProtocolError, match="which this worker does not wait for"):
        control(core, *held(0, server=1))
    with pytest.raises(ProtocolError, match="sent StateTaken"):
        taken(core, 0)


def test_a_second_delivery_of_an_answer_is_dropped_and_counted() -> None:
    core = make_core()
    core.begin_sending_state(ALL_PARTS)
    assert len(taken(core, 0)) == 1
    assert taken(core, 0) == []
    for chunk in (1, 2, 3, 4, 5):
        taken(core, chunk)
    assert core.state.is_idle
    assert taken(core, 4) == []
    core.begin_fetching_state([(0, 0), (2, 0)])
    assert len(control(core, *held(0))) == 2
    assert control(core, *held(0)) == []
    assert [type(each) for each in control(core, *held(2))] == [KeepState]
    assert control(core, *held(2)) == []
    assert core.counts().duplicates == 4
    with pytest.raises(ProtocolError, match="sent StateHeld about chunk 0"):
        control(core, *held(0))


def test_the_state_of_another_set_is_asked_for_in_its_name() -> None:
    seat = Seat(worker=0, group=7, members=(0,), num_servers=2)
    wanted = StateWanted(number=1, chunk=4, start=0)
    actions = StateTransfer(seat, set_index=5).begin_fetch({1: [(4, 0)]})
    assert actions == [SendControl(server_id(1), wanted, 5)]


def test_only_the_chief_sends_and_asks_between_collectives() -> None:
    other = make_core(worker=1, members=(1,))
    with pytest.raises(InvariantError, match="worker 1 sends optimizer state; the chief does"):
        other.begin_sending_state(ALL_PARTS)
    with pytest.raises(InvariantError, match="worker 1 asks for optimizer state; the chief does"):
        other.begin_fetching_state(ALL_PARTS)
    joining = make_core()
    joining.begin_setup(SETUP)
    with pytest.raises(InvariantError, match="between collectives"):
        joining.begin_fetching_state(ALL_PARTS)
    inside = make_core()
    inside.begin_collective("mean")
    with pytest.raises(InvariantError, match="between collectives"):
        inside.begin_fetching_state(ALL_PARTS)


# -- what the chief describes ----------------------------------------------------------------------


class Custom(torch.optim.Optimizer):
    """Whose state is whatever a test puts there."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})


def model_of(*shapes: tuple[int, ...]) -> torch.nn.Module:
    module = torch.nn.Module()
    for number, shape in enumerate(shapes):
        module.register_parameter(f"p{number}", torch.nn.Parameter(torch.zeros(shape)))
    return module


def described(module: torch.nn.Module, *states: dict[Any, Any]) -> dict[int, PieceState]:
    parameters = list(module.parameters())
    optimizer = Custom(parameters)
    for parameter, state in zip(parameters, states, strict=True):
        optimizer.state[parameter] = state
    return describe_state(optimizer, ModelDescription.of(module, optimizer))


def test_every_kind_of_state_is_described_in_the_optimizers_order() -> None:
    state = {
        "z": torch.zeros(3, 2, dtype=torch.float16),
        "step": torch.tensor(4.0),
        "a": torch.zeros(3, 2, dtype=torch.int32),
        "one": torch.tensor([[5]]),
        "none": None,
        "count": 7,
        "flag": False,
        "ratio": 0.5,
    }
    found = described(model_of((3, 2), (4,)), state, {})
    assert found == {
        0: {
            "z": PerElement("float16"),
            "step": OneValue("float32", 0, 4.0),
            "a": PerElement("int32"),
            "one": OneValue("int64", 2, 5),
            "none": Plain(None),
            "count": Plain(7),
            "flag": Plain(False),
            "ratio": Plain(0.5),
        }
    }
    assert list(found[0]) == list(state)


def test_of_a_parameter_of_one_element_its_neighbours_say_what_has_elements() -> None:
    """Where all have one element, torch's own names for what has not."""
    one, neighbour = torch.tensor(1.0), torch.zeros(3)
    found = described(
        model_of((), (3,)),
        {"step": one, "exp_avg": one, "scale": one},
        {"step": one, "exp_avg": neighbour, "scale": one},
    )
    assert [type(entry) for entry in found[0].values()] == [OneValue, PerElement, OneValue]
    alone = described(model_of(()), {"mu_product": one, "exp_avg": one})
    assert [type(entry) for entry in alone[0].values()] == [OneValue, PerElement]


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        (
            "row",
            torch.zeros(3, 1),
            r"'row' of parameter p0 is a float32 tensor of the shape \(3, 1",
        ),
        (
            "c",
            torch.zeros(3, 2, dtype=torch.complex64),
            "'c' of parameter p0 is a complex64 tensor",
        ),
        ("s", torch.zeros(3, 2).to_sparse(), "'s' of parameter p0 is a float32 tensor"),
        ("old", [1.0], r"'old' of parameter p0 is a list for a parameter of the shape \(3, 2\)"),
        ("big", 2**63, "'big' of parameter p0 is a int"),
        (3, 1.0, "state 3 of parameter p0 is a key that is no text"),
        ("k" * 129, 1.0, "is a key that is no text of 1 to 128 characters"),
    ],
)
def test_state_that_cannot_be_cut_is_refused_by_name(key: Any, value: Any, told: str) -> None:
    name = r"optimizer_state:Custom has state that cannot be cut into shards: state "
    with pytest.raises(OptimizerRefusedError, match=name) as caught:
        described(model_of((3, 2)), {key: value})
    with pytest.raises(OptimizerRefusedError, match=told):
        raise caught.value


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        (
            "exp_avg",
            torch.zeros(1),
            r"'exp_avg' of parameter p0 is a float32 tensor of the shape \(1,\)",
        ),
        (
            "exp_avg",
            torch.zeros(()),
            r"'exp_avg' of parameter p0 is a float32 tensor of the shape \(\)",
        ),
        (
            "exp_avg",
            torch.zeros(3, 2, dtype=torch.uint8),
            "'exp_avg' of parameter p0 is a uint8 tens",
        ),
        (
            "step",
            torch.zeros(3, 2),
            r"'step' of parameter p0 is a float32 tensor of the shape \(3, 2",
        ),
        ("step", 1, "'step' of parameter p0 is a int for a parameter of the shape"),
    ],
)
def test_a_checkpoint_of_another_model_does_not_reach_torchs_code_on_servers(
    key: str, value: Any, told: str
) -> None:
    """A head of one output, loaded into one of several: torch's load_state_dict compares no
    shapes, and its fused step would write behind the memory of such state."""
    module = model_of((3, 2), (1,))
    optimizer = torch.optim.Adam(module.parameters())
    (optimizer.state[module.p1], optimizer.state[module.p0]) = (
        {"step": torch.tensor(1.0), "exp_avg": torch.zeros(1)},
        {key: value},
    )
    with pytest.raises(OptimizerRefusedError, match=told):
        describe_state(optimizer, ModelDescription.of(module, optimizer))


def test_integers_of_64_bits_pass_and_no_others() -> None:
    for value in (-(2**63), 2**63 - 1):
        assert described(model_of((3,)), {"n": value}) == {0: {"n": Plain(value)}}
    for value in (-(2**63) - 1, 2**63):
        with pytest.raises(OptimizerRefusedError, match="'n' of parameter p0 is a int"):
            described(model_of((3,)), {"n": value})


def test_a_parameter_that_the_optimizer_has_never_stepped_has_no_state() -> None:
    module = model_of((3,), (2,))
    optimizer = Custom(list(module.parameters()))
    optimizer.state[next(module.parameters())] = {"n": 1}
    assert describe_state(optimizer, ModelDescription.of(module, optimizer)) == {0: {"n": Plain(1)}}


def test_one_element_in_another_shape_says_nothing_of_other_parameters() -> None:
    one = torch.tensor(1.0)
    found = described(model_of((1,), ()), {"a": one}, {"a": one})
    assert found == {0: {"a": OneValue("float32", 0, 1.0)}, 1: {"a": PerElement("float32")}}


def test_state_of_no_parameter_is_refused_not_forgotten() -> None:
    module = model_of((3,))
    optimizer = Custom(list(module.parameters()))
    optimizer.state["all"] = {"count": 1}
    model = ModelDescription.of(module, optimizer)
    with pytest.raises(OptimizerRefusedError, match="Custom has state under 'all', which is no p"):
        describe_state(optimizer, model)
    optimizer.state["all"] = {}
    assert describe_state(optimizer, model) == {}
    optimizer.state[next(module.parameters())] = {"count": 1}
    assert describe_state(optimizer, model) == {0: {"count": Plain(1)}}


def test_more_keys_than_a_message_carries_are_refused() -> None:
    state = {f"k{n}": 1 for n in range(MOST_KEYS + 1)}
    with pytest.raises(OptimizerRefusedError, match="17 entries of state for parameter p0"):
        described(model_of((3,)), state)


def test_an_optimizer_is_fresh_before_its_first_step_adagrad_too() -> None:
    module = model_of((2,))
    (parameter,) = module.parameters()
    parameter.grad = torch.ones(2)
    for make in (torch.optim.Adagrad, torch.optim.Adam):
        optimizer = make([parameter])
        model = ModelDescription.of(module, optimizer)
        assert describe_state(optimizer, model) == {}
        optimizer.step()
        assert describe_state(optimizer, model)[0]["step"] == OneValue("float32", 0, 1.0)
    changed = torch.optim.Adagrad([parameter])
    changed.state[parameter]["sum"] += 1
    assert describe_state(changed, ModelDescription.of(module, changed))


# -- there and back --------------------------------------------------------------------------------


@pytest.mark.parametrize("part_elements", [64, 100, 1 << 18])
def test_what_leaves_in_parts_is_put_together_as_it_was(
    part_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_state, "PART_ELEMENTS", part_elements)
    module = model_of((9, 30), (), (500,))
    first, _, third = module.parameters()
    first.data = torch.zeros(30, 9).t()
    optimizer = Custom(list(module.parameters()))
    for number, parameter in enumerate(module.parameters()):
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        optimizer.state[parameter] = {
            "a": values,
            "b": (100 * values).to(torch.int8),
            "c": torch.empty_like(parameter).copy_(values),
            "step": number,
        }
    optimizer.state[third].pop("b")
    model = ModelDescription.of(module, optimizer)
    partition = Partition.cut(model.pieces, chunk_bytes=64 * 4 * 3)
    states = describe_state(optimizer, model)
    source = OwnState(partition, model.parameters, optimizer, states)
    sink = ServersState(partition)
    with_bytes = {(p.chunk, p.start) for each in partition.chunks for p in parts_of(each, states)}
    for chunk, start in all_parts(partition):
        pieces = {segment.piece for segment in partition.chunks[chunk].segments}
        values = source.part(chunk, start)
        assert bool(values) == ((chunk, start) in with_bytes)
        message = StateHeld(
            number=1,
            chunk=chunk,
            start=start,
            described=pack_states({piece: states[piece] for piece in pieces}),
            values=values,
        )
        sink.keep(message, sender="server 0")
    for piece, state in sink.by_piece("x").items():
        theirs = optimizer.state[model.parameters[piece]]
        assert list(state) == list(theirs)
        for key, value in theirs.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(state[key], value)
                assert state[key].stride() == model.parameters[piece].stride()
            else:
                assert state[key] == value


def one_chunk() -> Partition:
    module = model_of((3,))
    optimizer = Custom(list(module.parameters()))
    return Partition.cut(ModelDescription.of(module, optimizer).pieces, chunk_bytes=None)


@pytest.mark.parametrize(
    ("described_as", "values"),
    [
        (b"\xc1", b""),
        (pack_states({1: {"a": Plain(1)}}), b""),
        (pack_states({0: {"a": PerElement("float32")}}), bytes(11)),
        (b"", bytes(4)),
    ],
)
def test_a_server_that_describes_something_else_is_named(
    described_as: bytes, values: bytes
) -> None:
    message = StateHeld(number=1, chunk=0, start=0, described=described_as, values=values)
    with pytest.raises(ProtocolError, match=r"^server 3 sent .* state"):
        ServersState(one_chunk()).keep(message, sender="server 3")


def test_parts_of_one_parameter_that_do_not_fit_together_are_refused() -> None:
    """Else each part could bring keys of its own, and memory for the whole parameter with each."""
    sink = ServersState(one_chunk())
    for number, state in enumerate(
        ({"a": PerElement("int8")}, {"b": PerElement("int8")}, {"a": PerElement("uint8")})
    ):
        packed = pack_states({0: {**state, "step": Plain(number)}})
        message = StateHeld(number=1, chunk=0, start=0, described=packed, values=bytes(3))
        if not number:
            sink.keep(message, sender="server 3")
            continue
        with pytest.raises(
            ProtocolError, match=r"^server 3 sent other .* of parameter p0 in chunk"
        ):
            sink.keep(message, sender="server 3")


@pytest.mark.parametrize("arriving", [(0, 1, 2), (2, 0, 1), (2, 1, 0), (1, 2, 0)])
def test_a_number_of_a_parameter_that_is_cut_is_that_of_its_first_chunk(
    arriving: tuple[int, ...],
) -> None:
    """Whichever server answers first."""
    module = model_of((192,))
    optimizer = Custom(list(module.parameters()))
    partition = Partition.cut(ModelDescription.of(module, optimizer).pieces, chunk_bytes=256)
    assert len(partition.chunks) == 3
    sink = ServersState(partition)
    for chunk in arriving:
        packed = pack_states({0: {"step": Plain(7 + chunk)}})
        message = StateHeld(number=1, chunk=chunk, start=0, described=packed, values=b"")
        sink.keep(message, sender="server 0")
    assert sink.by_piece("Name") == {0: {"step": 7}}


def test_what_servers_cannot_cut_is_refused_when_all_is_there() -> None:
    sink = ServersState(one_chunk())
    packed = pack_states({0: {"row": Uncut("a float32 tensor of the shape (3, 1)")}})
    message = StateHeld(number=1, chunk=0, start=0, described=packed, values=b"")
    sink.keep(message, sender="server 0")
    with pytest.raises(
        OptimizerRefusedError, match=r"^Name has state .* 'row' of parameter p0 is a float32 tensor"
    ):
        sink.by_piece("Name")
