"""Standard deviations, lengths of vectors and scores of pairs by Triton, a launch each.

`test_triton_random` has deviations of all relations.
"""

from __future__ import annotations

import pytest
import torch
from support.cases import embeddings
from support.on_triton import DEVICE, HALF, OF_KERNELS, moved

from itrloss import Similarity
from itrloss.engine import pair_scores, vectors
from itrloss.engine import triton as engine
from itrloss.engine.inputs import Inputs, Side

pytestmark = OF_KERNELS

N, M = 21, 37


def deviations(scores, engine_name):
    """The standard deviations of the negatives' scores, as losses that do not train them ask."""
    ids = torch.arange(N) // 2, torch.arange(M) // 3
    with torch.no_grad():
        return Similarity.from_scores(scores, *ids, engine=engine_name).both.std()


def test_scores_far_from_zero_cost_standard_deviations_no_digits(few_tiles, poisoned):
    scores = torch.randn(N, M, generator=torch.Generator().manual_seed(1)) + 300.0
    found = deviations(*moved(scores), "triton").cpu().double()
    wanted = deviations(scores.double(), "dense")
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-9)


def test_nan_scores_show_in_standard_deviations(few_tiles):
    scores = torch.randn(N, M)
    scores[2, 0] = torch.nan
    found = deviations(*moved(scores), "triton")
    expected = torch.zeros(N + M, dtype=torch.bool)
    expected[[2, N]] = True
    assert found.isnan().cpu().tolist() == expected.tolist()


def of_some_lengths(dtype):
    """Vectors (7, 20) that are 0, short, long and usual, which are parts of longer ones."""
    x = torch.randn(7, 20, generator=torch.Generator().manual_seed(2))
    largest = 1e3 if dtype == torch.float16 else 1e17
    scales = torch.tensor([0.0, 1e-14, 1e-6, 1.0, largest, 3.0, 0.5])
    x = torch.nn.functional.normalize(x) * scales[:, None]
    behind = torch.full((7, 29), torch.nan)
    behind[:, 5:25] = x
    return behind.to(DEVICE, dtype)[:, 5:25]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_inverse_norms(dtype, layout, poisoned):
    x = of_some_lengths(dtype)
    if layout == "columns":
        x = x.T.contiguous().T
    found = engine.inverse_norms(x)
    assert found.shape == (7, 1)
    torch.testing.assert_close(found, vectors.inverse_norms(x), rtol=1e-6, atol=0)
    assert found[:2].tolist() == [[0.0], [0.0]]
    assert engine.inverse_norms(x[:0]).shape == (0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("normalize", [True, False])
def test_scores_of_pairs(dtype, normalize, poisoned):
    """Listed ones, with indices that are not next to each other in memory, or all (i, i)."""
    x, y = moved(*embeddings(7, 7, 20, dtype=dtype))
    sides = [Side(z, vectors.inverse_norms(z) if normalize else None, None, None) for z in (x, y)]
    inputs = Inputs(*sides, None)
    i, j = torch.tensor([[0, 6], [6, 2], [3, 3], [0, 1]], device=DEVICE).unbind(1)
    for pairs in ((i, j), (None, None), (i[:0], j[:0])):
        found = engine.pair_scores(inputs, *pairs)
        wanted = pair_scores.pair_scores(inputs, *pairs)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
