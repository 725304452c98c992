"""Masks of the elements of sets; the scores themselves are in losses/test_late_interaction.py."""

from __future__ import annotations

import pytest
import torch

from itrloss.functional import set_similarity

MASKS = {
    "left": [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]],
    "holes": [[1, 0, 1, 0, 1], [0, 1, 0, 1, 0]],
    "all": [[1] * 5] * 2,
    "one empty": [[0] * 5, [1, 1, 0, 0, 1]],
    "right": [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]],
}


@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
@pytest.mark.parametrize(
    "aggregation", ["max", "mean", "max_sum", "smooth_max_sum", "smooth_chamfer"]
)
@pytest.mark.parametrize("name", MASKS)
def test_masks_leave_out_elements_as_if_they_were_not_there(name: str, aggregation: str, kind):
    generator = torch.Generator().manual_seed(0)
    sets = torch.randn(2, 5, 6, dtype=torch.float64, generator=generator).requires_grad_()
    others = torch.randn(3, 4, 6, dtype=torch.float64, generator=generator)
    mask = torch.tensor(MASKS[name], dtype=kind)
    of_texts = set_similarity(others, sets, aggregation, text_mask=mask)
    of_images = set_similarity(sets, others, aggregation, image_mask=mask)
    for i in range(2):
        part = sets[i][mask[i].bool()][None]
        if part.shape[1] == 0:
            assert not of_texts[:, i].any()
            assert not of_images[i].any()
            continue
        alone = set_similarity(others, part, aggregation)
        torch.testing.assert_close(of_texts[:, i : i + 1], alone)
        alone = set_similarity(part, others, aggregation)
        torch.testing.assert_close(of_images[i : i + 1], alone)
    (gradient,) = torch.autograd.grad(of_texts.sum(), sets)
    assert not gradient[~mask.bool()].any()


BAD_MASKS = {
    "shape": (torch.ones(2, 4, dtype=torch.bool), {}, r"text_mask: expected shape \(2, 5\)"),
    "fractions": (torch.ones(2, 5), {}, "text_mask: expected a bool tensor"),
    "a string": ("1 1 0", {}, "text_mask: expected a bool tensor .*str"),
    "lengths": (
        torch.ones(2, 5, dtype=torch.bool),
        {"text_lengths": torch.tensor([1, 2])},
        "text_mask: expected None with text_lengths",
    ),
}


@pytest.mark.parametrize("name", BAD_MASKS)
def test_other_masks_are_refused(name: str):
    mask, options, message = BAD_MASKS[name]
    sets = torch.randn(2, 5, 4)
    with pytest.raises((TypeError, ValueError), match=message):
        set_similarity(sets, sets, text_mask=mask, **options)
