"""Tables outside of a job, against torch's own modules: results, gradients of rows, errors."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import psdist
from psdist.errors import UsageError
from psdist.workers.tables.modules import LocalRows, Table

NUM_ROWS, DIM = 50, 6
BAGS = torch.tensor([[1, 2, 2], [3, 4, 1]])
FLAT = torch.tensor([1, 2, 2, 3, 3, 4, 1])
NOTHING = torch.zeros(0, dtype=torch.long)
CASES: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {
    "two-dimensional": (BAGS, None),
    "int32": (BAGS.int(), None),
    "offsets": (FLAT, torch.tensor([0, 2, 2, 5])),
    "all padding": (torch.full((2, 3), 3), None),
    "empty batch": (NOTHING, NOTHING),
    "empty bags": (NOTHING, torch.tensor([0, 0])),
}


@pytest.fixture(autouse=True)
def _outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalRows, "refusal", "")


def values_of(table: Table) -> torch.Tensor:
    """Return the first values of all rows, with zeros for padding."""
    ids = torch.arange(NUM_ROWS)
    with torch.no_grad():
        if isinstance(table, psdist.Embedding):
            return table(ids)
        of_bags = psdist.EmbeddingBag(NUM_ROWS, DIM, padding_idx=table.padding_idx)
        return of_bags(ids.view(-1, 1))


def gradient_of(table: Table, *, scale: float = 1.0) -> torch.Tensor:
    """Return the gradients of the next step as a dense one."""
    found = torch.zeros(NUM_ROWS, DIM)
    for each in table.gradients.take(scale=scale):
        assert (np.diff(each.ids) > 0).all()
        found[torch.from_numpy(each.ids)] += each.rows * each.factor
    return found


def require_alike(
    table: Table, torchs: nn.Module, *arguments: torch.Tensor | None, num_passes: int = 1
) -> None:
    ours, theirs = table(*arguments), torchs(*arguments)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    wanted = torch.randn_like(ours)
    for _ in range(num_passes):
        (ours * wanted).sum().backward(retain_graph=True)
        (theirs * wanted).sum().backward(retain_graph=True)
    torch.testing.assert_close(gradient_of(table), torchs.weight.grad, atol=1e-6, rtol=0)


@pytest.mark.parametrize("padding_idx", [None, 3, -1])
@pytest.mark.parametrize("name", [name for name, (_, offsets) in CASES.items() if offsets is None])
def test_an_embedding_is_torchs_on_its_rows(name: str, padding_idx: int | None) -> None:
    table = psdist.Embedding(NUM_ROWS, DIM, padding_idx=padding_idx)
    torchs = nn.Embedding(NUM_ROWS, DIM, padding_idx=padding_idx, _weight=values_of(table))
    require_alike(table, torchs, CASES[name][0], num_passes=2)


def test_an_embedding_takes_one_id() -> None:
    table = psdist.Embedding(NUM_ROWS, DIM)
    require_alike(table, nn.Embedding(NUM_ROWS, DIM, _weight=values_of(table)), torch.tensor(3))


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("name", CASES)
def test_a_bag_is_torchs_on_its_rows(name: str, mode: Any, padding_idx: int | None) -> None:
    table = psdist.EmbeddingBag(NUM_ROWS, DIM, mode=mode, padding_idx=padding_idx)
    weight = values_of(table)
    torchs = nn.EmbeddingBag(NUM_ROWS, DIM, mode=mode, padding_idx=padding_idx, _weight=weight)
    require_alike(table, torchs, *CASES[name])


def test_bags_have_weights_by_sample_and_a_last_offset() -> None:
    table = psdist.EmbeddingBag(NUM_ROWS, DIM, mode="sum", include_last_offset=True)
    torchs = nn.EmbeddingBag(
        NUM_ROWS, DIM, mode="sum", include_last_offset=True, _weight=values_of(table)
    )
    require_alike(table, torchs, FLAT, torch.tensor([0, 2, 2, 5, 7]), torch.rand(7))


def test_gradients_follow_what_the_script_does_to_the_parameters() -> None:
    table = psdist.Embedding(NUM_ROWS, DIM)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    table(torch.tensor([1, 2])).sum().backward()
    table(torch.tensor([2, 3])).sum().backward()
    assert gradient_of(table)[:5, 0].tolist() == [0, 1, 2, 1, 0]
    table.rows_on_servers.grad.mul_(0.5)  # as clipping, or a GradScaler's unscale_
    assert gradient_of(table, scale=4.0)[:5, 0].tolist() == [0, 2, 4, 2, 0]
    table(torch.tensor([4])).sum().backward()  # no zero_grad: gradients accumulate
    assert gradient_of(table)[:5, 0].tolist() == [0, 0.5, 1, 0.5, 1]
    optimizer.zero_grad(set_to_none=False)
    table(torch.tensor([1])).sum().backward()
    assert gradient_of(table)[:5, 0].tolist() == [0, 1, 0, 0, 0]
    optimizer.zero_grad()
    assert not gradient_of(table).any()


def test_torch_autograd_grad_leaves_no_gradient_behind() -> None:
    table = psdist.Embedding(NUM_ROWS, DIM)
    total = table(torch.tensor([1, 2])).sum()
    torch.autograd.grad(total, table.rows_on_servers, retain_graph=True)
    total.backward()
    assert gradient_of(table)[:4, 0].tolist() == [0, 1, 1, 0]


def test_gradients_that_are_not_finite_show_in_the_parameter() -> None:
    table = psdist.Embedding(NUM_ROWS, DIM)
    (table(torch.tensor([1])) * float("inf")).sum().backward()
    assert table.rows_on_servers.grad.isnan()


def test_a_frozen_table_and_a_pass_without_gradients_keep_none() -> None:
    table = psdist.Embedding(NUM_ROWS, DIM)
    with torch.no_grad():
        assert not table(torch.tensor([1])).requires_grad
    table.rows_on_servers.requires_grad_(False)
    assert not table(torch.tensor([1])).requires_grad


def test_any_id_has_a_row_of_a_table_without_a_number_of_rows() -> None:
    table = psdist.Embedding(None, DIM)
    ids = torch.tensor([-(2**63), -1, 2**63 - 1])
    rows = table(ids)
    assert len(set(map(tuple, rows.tolist()))) == 3
    assert rows.abs().max() <= 1 / DIM**0.5


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (torch.tensor([1, 50]), "id 50; it has 50 rows, ids 0 to 49"),
        (torch.tensor([-1, 5]), "id -1; it has 50 rows"),
        (torch.tensor([1.0]), r"ids of torch.float32; ids are int64 or int32: ids.long\(\)"),
    ],
)
def test_wrong_ids_are_named(ids: torch.Tensor, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        psdist.Embedding(NUM_ROWS, DIM)(ids)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(UsageError, match=r"psdist.Embedding\(0, 6, ...\): num_rows"):
        psdist.Embedding(0, DIM)
    with pytest.raises(UsageError, match="lru"):
        psdist.Embedding(5, DIM, evict="lur:7")
    for padding_idx in (5, -6):
        with pytest.raises(UsageError, match=f"padding_idx is {padding_idx}; expected -5 to 4"):
            psdist.Embedding(5, DIM, padding_idx=padding_idx)


def test_a_copy_is_a_table_of_its_own() -> None:
    table = psdist.Embedding(NUM_ROWS, DIM)
    other = copy.deepcopy(table)
    other(torch.tensor([1])).sum().backward()
    assert gradient_of(other).any()
    assert not gradient_of(table).any()
    assert torch.equal(other(BAGS), table(BAGS))


def test_a_table_that_was_not_prepared_is_refused_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalRows, "refusal", "call it first")
    with pytest.raises(UsageError, match="call it first"):
        psdist.Embedding(NUM_ROWS, DIM)(BAGS)


def test_the_state_has_no_rows() -> None:
    assert sum(each.numel() for each in psdist.Embedding(10**9, 16).state_dict().values()) == 1
