"""Embeddings that would write to their weight in forward are refused, if servers hold it."""

from __future__ import annotations

import pytest
from torch import nn

from psdist.errors import ModelError
from psdist.workers.model.refusals import refuse_renormalised


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_with_max_norm_is_refused_by_its_name(
    kind: type[nn.Embedding | nn.EmbeddingBag],
) -> None:
    model = nn.Sequential(nn.Sequential(kind(10, 4, max_norm=1.5, norm_type=1)), nn.Linear(4, 2))
    told = (
        rf"module 0\.0 \({kind.__name__}\) has max_norm = 1\.5, .* 0\.0\.weight in forward.* "
        r"without max_norm .*weight\.renorm_\(1, 0, 1\.5\).* "
        r"job\.set_parameters\(\), after each opt"
    )
    with pytest.raises(ModelError, match=told):
        refuse_renormalised(model, list(model.parameters()))


def test_an_embedding_is_refused_whose_weight_is_that_of_another_module() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(10, 4, max_norm=1), "head": nn.Linear(4, 10)})
    model["words"].weight = model["head"].weight
    with pytest.raises(ModelError, match=r"module words \(Embedding\)"):
        refuse_renormalised(model, list(model["head"].parameters()))


def test_an_embedding_that_servers_do_not_hold_or_without_max_norm_is_trained() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Embedding(4, 4, max_norm=1.0), nn.Linear(4, 2))
    refuse_renormalised(model, [*model[0].parameters(), *model[2].parameters()])
