"""Checks of values: what a loss may depend on, and unusual batches."""

from __future__ import annotations

import torch

from .registry import check
from .subject import Batch, Subject, finite, same, total


def _order(size: int, seed: int = 1) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


@check()
def result_is_a_number(subject: Subject) -> None:
    """The loss is one finite floating-point number with a gradient, float64 for float64 input.

    A trainer calls ``backward`` on it, and a loss that computes in float32 whatever it gets cannot
    be verified.
    """
    batch = subject.batch(7, 9)
    value = subject.output(batch._replace(images=batch.images.requires_grad_()))
    if getattr(subject.loss, "reduction", None) != "none":
        assert isinstance(value, torch.Tensor), f"expected a tensor, got {type(value).__name__}"
        assert value.dim() == 0, f"expected a 0-dim tensor, got shape {tuple(value.shape)}"
    value = total(value)
    assert value.requires_grad, "the value has no gradient"
    assert value.dtype == torch.float64, f"expected float64 for float64 input, got {value.dtype}"
    assert bool(value.isfinite()), f"expected a finite value, got {value.item()}"


@check()
def order_of_pairs(subject: Subject) -> None:
    """The order of the pairs in the batch changes nothing, and moves gradients along.

    Labels by position, blocks that are merged wrongly and a tail that is dropped show up here.
    """
    for size in (11, 131):
        batch, p = subject.batch(size, one=True), _order(size)
        got, expected = subject.result(batch.take(p, p)), subject.result(batch)
        expected = expected._replace(images=expected.images[p], texts=expected.texts[p])
        same(f"{size} pairs in another order", got, expected)


@check("ids")
def order_of_each_side(subject: Subject) -> None:
    """Images and texts may come in any order, each with its ids.

    A loss that takes the first positive only, or the one at the anchor's own position, changes.
    """
    batch, p, q = subject.batch(11, 17), _order(11), _order(17, 2)
    got, expected = subject.result(batch.take(p, q)), subject.result(batch)
    same(
        "in another order",
        got,
        expected._replace(images=expected.images[p], texts=expected.texts[q]),
    )


@check()
def swapped_sides(subject: Subject) -> None:
    """Images and texts may change places.

    In retrieval both directions count. Losses of one direction fail, as do those that mix up rows
    and columns in one.
    """
    batch = subject.batch(9, 14)
    expected = subject.result(batch)
    same(
        "swapped",
        subject.result(batch.swapped()),
        expected._replace(images=expected.texts, texts=expected.images),
    )


@check("ids")
def renamed_ids(subject: Subject) -> None:
    """Ids are names: negative, very large and unordered ones mean the same as 0, 1, 2.

    They are keys of a database or file numbers. As indices, in float32 or in small integers they
    would collide.
    """
    batch = subject.batch(9, 14)
    expected = subject.result(batch)
    for factor, shift in ((-7, 3), (1000, 0), (1, 2**53), (2**40, -5)):
        renamed = batch.with_ids(*(factor * x + shift for x in batch[2:]))  # type: ignore[operator]
        same(f"ids {factor} * id + {shift}", subject.result(renamed), expected)


@check("ids")
def integer_types_of_ids(subject: Subject) -> None:
    """Ids may be int32. Loaders that come from NumPy have them."""
    batch = subject.batch(9, 14)
    narrow = batch.with_ids(*(x.int() for x in batch[2:]))  # type: ignore[union-attr]
    same("int32 ids", subject.result(narrow), subject.result(batch))


@check("default ids")
def ids_left_out(subject: Subject) -> None:
    """Without ids, image i matches text i: the same as with distinct ids."""
    batch = subject.batch(9, one=True)
    same("without ids", subject.result(batch.with_ids(None, None)), subject.result(batch))


@check("ids")
def ids_matter(subject: Subject) -> None:
    """Further pairs with equal ids are no negatives: the value differs from that of one positive
    for each anchor.

    The same image twice in a batch, or two captions of one, are false negatives of each other
    otherwise.
    """
    batch, ids = subject.batch(9, one=True), torch.arange(9)
    ids[5] = 0
    value, other = (subject.value(x) for x in (batch, batch.with_ids(ids, ids)))
    assert not torch.isclose(value, other, rtol=1e-9), (
        "two pairs of one class count as those of two"
    )


@check()
def duplicates(subject: Subject) -> None:
    """Identical embeddings leave the value and its gradients finite.

    A frozen encoder returns the same row for the same image. Square roots of distances have
    infinite slopes there.
    """
    twice = torch.arange(6).repeat(2)
    for batch in (subject.batch(6, one=True), subject.axes(6)):
        finite("duplicates", subject.result(batch.take(twice, twice)))
        finite("texts that equal their images", subject.result(batch._replace(texts=batch.images)))


@check("ids")
def without_positives(subject: Subject) -> None:
    """Anchors without a positive, a few or all of them, leave the value and its gradients finite.

    A mean over no positives is 0 / 0, which a mask behind it does not mend: the gradient stays nan.
    """
    batch = subject.batch(9, 14)
    ids = [x.clone() for x in batch[2:]]  # type: ignore[union-attr]
    ids[0][2], ids[1][3] = 100, 200
    finite("one image and one text without a positive", subject.result(batch.with_ids(*ids)))
    finite(
        "no positives at all",
        subject.result(batch.with_ids(torch.arange(9), torch.arange(14) + 50)),
    )


@check("ids")
def without_negatives(subject: Subject) -> None:
    """Anchors without a negative leave the value and its gradients finite.

    A batch of one class happens with class labels. The log-sum-exp of no negatives is -inf, and its
    slope nan.
    """
    batch = subject.batch(5, 7)
    same_class = batch.with_ids(
        torch.zeros(5, dtype=torch.int64), torch.zeros(7, dtype=torch.int64)
    )
    finite("one class", subject.result(same_class))


@check("ids")
def more_texts_than_images(subject: Subject) -> None:
    """N and M may differ, either way: five captions an image, or several images of a text."""
    batch = subject.batch(5, 13)
    for what, x in (("5 images, 13 texts", batch), ("13 images, 5 texts", batch.swapped())):
        result = subject.result(x)
        finite(what, result)
        assert bool(result.images.any() and result.texts.any()), f"{what}: one side has no gradient"


@check()
def one_pair(subject: Subject) -> None:
    """A batch of one pair has a finite value and finite gradients.

    The last batch of an epoch may have one. The sample standard deviation of one score is nan.
    """
    for size in (1, 2):
        finite(f"{size} pair(s)", subject.result(subject.batch(size, one=True)))


@check()
def every_row_counts(subject: Subject) -> None:
    """All images and texts get a gradient, also where no block size divides their number.

    A loop over N // size blocks leaves out the tail.
    """
    for size in (17, 131):
        result = subject.result(subject.batch(size, one=True))
        for name, x in (("images", result.images), ("texts", result.texts)):
            lost = (x == 0).all(1).nonzero().flatten().tolist()
            assert not lost, f"of {size} {name} no gradient for rows {lost}"


@check()
def rotation(subject: Subject) -> None:
    """A rotation of all embeddings changes nothing: the loss is a function of their inner products."""
    batch = subject.batch(9, 14)
    generator = torch.Generator().manual_seed(1)
    turn = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64)).Q
    expected = subject.result(batch)
    got = subject.result(batch.of(batch.images @ turn, batch.texts @ turn))
    same(
        "rotated",
        got,
        expected._replace(images=expected.images @ turn, texts=expected.texts @ turn),
    )


@check("normalizes")
def scaled_embeddings(subject: Subject) -> None:
    """The length of each embedding changes nothing: the loss is one of cosines. Gradients go as 1 /
    length.
    """
    batch = subject.batch(9, 14)
    by = [torch.linspace(0.1, 9, len(x), dtype=torch.float64)[:, None] for x in batch[:2]]
    expected = subject.result(batch)
    got = subject.result(batch.of(batch.images * by[0], batch.texts * by[1]))
    same(
        "scaled",
        got,
        expected._replace(images=expected.images / by[0], texts=expected.texts / by[1]),
    )


def _learnt(subject: Subject, batch: Batch) -> None:
    loss = subject.fresh(torch.float64)
    leaves = [x.clone().requires_grad_() for x in batch[:2]]
    optimizer = torch.optim.Adam(leaves, lr=0.05)
    values = []
    for _ in range(150):
        value = subject.value(batch.of(*leaves), loss)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[-1] < values[0], (
        f"150 steps took the loss from {values[0]:.4g} to {values[-1]:.4g}"
    )
    images, texts = (x.detach() for x in leaves)
    if subject.normalizes:
        images, texts = (torch.nn.functional.normalize(x, dim=1) for x in (images, texts))
    scores = images @ texts.T
    first, second = batch[2:] if subject.ids else (torch.arange(len(scores)),) * 2
    positive = first[:, None] == second  # type: ignore[index]
    best = scores.masked_fill(~positive, float("-inf")).amax(1)
    hardest = scores.masked_fill(positive, float("-inf")).amax(1)
    wrong = ((best <= hardest) & positive.any(1)).nonzero().flatten().tolist()
    assert not wrong, f"after 150 steps a negative scores above all positives of images {wrong}"
    assert scores[positive].mean() > scores[~positive].mean(), (
        "after 150 steps positives score below negatives"
    )


@check()
def learns_pairs(subject: Subject) -> None:
    """Descent on free embeddings of eight pairs ends with each image's own text ahead of all
    others.
    """
    _learnt(subject, subject.batch(8, d=4, one=True))


@check("ids")
def learns_classes(subject: Subject) -> None:
    """Descent on free embeddings of four classes ends with a positive of each image ahead of its
    negatives.

    On the mean, positives score higher than negatives.
    """
    _learnt(subject, subject.batch(8, 12, d=4, classes=4))


@check("pairing")
def unpaired_batches_are_refused(subject: Subject) -> None:
    """Without ids, more images than texts raise an error: a loss that broadcasts would return a
    number.
    """
    batch = subject.batch(5, one=True)
    for size in (4, 1):
        try:
            subject.value(Batch(batch.images, batch.texts[:size]))
        except Exception:
            continue
        raise AssertionError(
            f"5 images and {size} text(s) without ids: expected an error, got a value"
        )


@check()
def other_dimensions_are_refused(subject: Subject) -> None:
    """Images and texts of different dimensions raise an error."""
    batch = subject.batch(5, one=True)
    for size in (7, 1):
        try:
            subject.value(batch._replace(texts=batch.texts[:, :size]))
        except Exception:
            continue
        raise AssertionError(f"dimensions 8 and {size}: expected an error, got a value")


@check()
def nan_is_not_hidden(subject: Subject) -> None:
    """A nan in an embedding makes the loss nan, or raises an error: training must not go on
    unnoticed.
    """
    batch = subject.batch(5, one=True)
    batch.images[2, 3] = float("nan")
    try:
        value = subject.value(batch)
    except Exception:
        return
    assert not bool(value.isfinite()), f"a nan among the images gives {value.item():.4g}"
