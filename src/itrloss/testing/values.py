"""Checks of values: what a loss may depend on, and unusual batches."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from .registry import check
from .subject import Batch, Subject, normal, same, total


def _order(size: int, seed: int = 1) -> torch.Tensor:
    """Return a random order of so many rows."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


@check()
def result_is_a_number(subject: Subject) -> None:
    """The loss is one finite floating-point number with a gradient, float64 for float64 input.

    A trainer calls ``backward`` on it, and a loss that computes in float32 whatever it gets cannot
    be verified.
    """
    batch = subject.batch(7, 9)
    batch.images.requires_grad_()
    value = subject.output(batch)
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
        leaves = subject.batch(size, one=True).leaves()
        order = _order(size)
        subject.same_after(f"{size} pairs in another order", leaves, leaves.take(order, order))


@check("ids")
def order_of_each_side(subject: Subject) -> None:
    """Images and texts may come in any order, each with its ids.

    A loss that takes the first positive only, or the one at the anchor's own position, changes.
    """
    leaves = subject.batch(11, 17).leaves()
    subject.same_after("in another order", leaves, leaves.take(_order(11), _order(17, 2)))


@check()
def swapped_sides(subject: Subject) -> None:
    """Images and texts may change places.

    In retrieval both directions count. Losses of one direction fail, as do those that mix up rows
    and columns in one.
    """
    leaves = subject.batch().leaves()
    subject.same_after("swapped", leaves, leaves.swapped())


@check("ids")
def renamed_ids(subject: Subject) -> None:
    """Ids are names: negative, very large and unordered ones mean the same as 0, 1, 2.

    They are keys of a database or file numbers. As indices, in float32 or in small integers they
    would collide.
    """
    batch = subject.batch()
    expected = subject.result(batch)
    for factor, shift in ((-7, 3), (1000, 0), (1, 2**53), (2**40, -5)):
        renamed = batch.with_ids(*(factor * x + shift for x in batch.ids))
        same(f"ids {factor} * id + {shift}", subject.result(renamed), expected)


@check("ids")
def integer_types_of_ids(subject: Subject) -> None:
    """Ids may be int32. Loaders that come from NumPy have them."""
    batch = subject.batch()
    narrow = batch.with_ids(*(x.int() for x in batch.ids))
    same("int32 ids", subject.result(narrow), subject.result(batch))


@check("default ids")
def ids_left_out(subject: Subject) -> None:
    """Without ids, image i matches text i: the same as with distinct ids."""
    batch = subject.batch(one=True)
    same("without ids", subject.result(batch.with_ids(None, None)), subject.result(batch))


@check("ids")
def ids_matter(subject: Subject) -> None:
    """Further pairs with equal ids are no negatives: the value differs from the value with one
    positive for each anchor.

    The same image twice in a batch, or two captions of one, are false negatives of each other
    otherwise.
    """
    batch = subject.batch(one=True)
    ids = torch.arange(9)
    ids[5] = 0
    value = subject.value(batch)
    other = subject.value(batch.with_ids(ids, ids))
    unchanged = torch.isclose(value, other, rtol=1e-9)
    assert not unchanged, "two pairs of one class count as those of two"


@check()
def duplicates(subject: Subject) -> None:
    """Identical embeddings leave the value and its gradients finite.

    A frozen encoder returns the same row for the same image. Square roots of distances have
    infinite slopes there.
    """
    twice = torch.arange(6).repeat(2)
    for batch in (subject.batch(6, one=True), subject.axes(6)):
        subject.finite("duplicates", batch.take(twice, twice))
        equal = batch.of(batch.images, batch.images)
        subject.finite("texts that equal their images", equal)


@check("ids")
def without_positives(subject: Subject) -> None:
    """Anchors without a positive, a few or all of them, leave the value and its gradients finite.

    A mean over no positives is 0 / 0, which a mask behind it does not mend: the gradient stays nan.
    """
    batch = subject.batch()
    image_ids, text_ids = (x.clone() for x in batch.ids)
    image_ids[2] = 100
    text_ids[3] = 200
    few = batch.with_ids(image_ids, text_ids)
    subject.finite("one image and one text without a positive", few)
    none = batch.with_ids(torch.arange(9), torch.arange(14) + 50)
    subject.finite("no positives at all", none)


@check("ids")
def without_negatives(subject: Subject) -> None:
    """Anchors without a negative leave the value and its gradients finite.

    A batch of one class happens with class labels. The log-sum-exp of no negatives is -inf, and its
    slope nan.
    """
    batch = subject.batch(5, 7)
    same_class = batch.with_ids(*(torch.zeros_like(x) for x in batch.ids))
    subject.finite("one class", same_class)


@check("ids")
def more_texts_than_images(subject: Subject) -> None:
    """N and M may differ, either way: five captions an image, or several images of a text."""
    batch = subject.batch(5, 13)
    for what, x in (("5 images, 13 texts", batch), ("13 images, 5 texts", batch.swapped())):
        result = subject.finite(what, x)
        assert bool(result.images.any() and result.texts.any()), f"{what}: one side has no gradient"


@check()
def one_pair(subject: Subject) -> None:
    """A batch of one pair has a finite value and finite gradients.

    The last batch of an epoch may have one. The sample standard deviation of one score is nan.
    """
    for size in (1, 2):
        subject.finite(f"{size} pair(s)", subject.batch(size, one=True))


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
    """A rotation of all embeddings changes nothing: inner products decide the loss."""
    leaves = subject.batch().leaves()
    turn = torch.linalg.qr(normal((8, 8), torch.Generator().manual_seed(1))).Q
    subject.same_after("rotated", leaves, leaves.map(lambda x: x @ turn))


@check("normalizes")
def scaled_embeddings(subject: Subject) -> None:
    """The length of each embedding changes nothing: the loss is one of cosines. Gradients go as 1 /
    length.
    """

    def scaled(x: torch.Tensor) -> torch.Tensor:
        """Return the embeddings with other lengths."""
        return x * torch.linspace(0.1, 9, len(x), dtype=torch.float64)[:, None]

    leaves = subject.batch().leaves()
    subject.same_after("scaled", leaves, leaves.map(scaled))


def _learnt(subject: Subject, batch: Batch) -> None:
    """Raise an AssertionError unless 150 steps on a batch's embeddings put positives ahead."""
    leaves = batch.leaves()
    optimizer = torch.optim.Adam(leaves.embeddings, lr=0.05)
    values = subject.steps(subject.fresh(), optimizer, [leaves] * 150)
    first = values[0].item()
    last = values[-1].item()
    assert last < first, f"150 steps took the loss from {first:.4g} to {last:.4g}"
    images, texts = (x.detach() for x in leaves.embeddings)
    if subject.normalizes:
        images = normalize(images, dim=1)
        texts = normalize(texts, dim=1)
    scores = images @ texts.T
    image_ids, text_ids = batch.ids
    positive = image_ids[:, None] == text_ids
    best = scores.masked_fill(~positive, -torch.inf).amax(1)
    hardest = scores.masked_fill(positive, -torch.inf).amax(1)
    wrong = ((best <= hardest) & positive.any(1)).nonzero().flatten().tolist()
    assert not wrong, f"after 150 steps a negative scores above all positives of images {wrong}"
    right = scores[positive].mean() > scores[~positive].mean()
    assert right, "after 150 steps positives score below negatives"


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


def _refused(subject: Subject, batch: Batch, what: str) -> None:
    """Raise an AssertionError unless the loss raises an error for a batch."""
    try:
        subject.value(batch)
    except Exception:
        return
    raise AssertionError(f"{what}: expected an error, got a value")


@check("pairing")
def unpaired_batches_are_refused(subject: Subject) -> None:
    """Without ids, more images than texts raise an error: a loss that broadcasts would return a
    number.
    """
    batch = subject.batch(5, one=True).with_ids(None, None)
    for size in (4, 1):
        unpaired = batch.of(batch.images, batch.texts[:size])
        _refused(subject, unpaired, f"5 images and {size} text(s) without ids")


@check()
def other_dimensions_are_refused(subject: Subject) -> None:
    """Images and texts of different dimensions raise an error."""
    batch = subject.batch(5, one=True)
    for size in (7, 1):
        other = batch.of(batch.images, batch.texts[:, :size])
        _refused(subject, other, f"dimensions 8 and {size}")


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
