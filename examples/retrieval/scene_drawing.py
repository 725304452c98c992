"""Pictures of scenes: flat shapes with an outline and a soft shadow, drawn large and
downsampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

if TYPE_CHECKING:
    from .scenes import Scene, SceneObject

CANVAS = 96  # pixels
SUPERSAMPLING = 3  # for anti-aliasing
SIDE = CANVAS * SUPERSAMPLING  # pixels at which pictures are drawn
COLOURS = {
    "red": (214, 48, 49),
    "orange": (243, 140, 38),
    "yellow": (250, 212, 62),
    "green": (52, 160, 84),
    "blue": (44, 104, 210),
    "purple": (130, 68, 180),
    "pink": (246, 142, 182),
    "brown": (134, 86, 54),
    "white": (250, 249, 244),
}
BACKGROUNDS = {  # colours from the top edge to the bottom edge
    "sky": ((118, 186, 238), (214, 236, 251)),
    "night": ((14, 18, 50), (58, 56, 112)),
    "sunset": ((96, 70, 132), (238, 132, 104), (253, 206, 132)),
    "sand": ((241, 223, 178), (222, 193, 138)),
    "grass": ((168, 212, 122), (104, 166, 78)),
    "sea": ((86, 178, 198), (20, 84, 128)),
    "stripes": ((236, 224, 226), (236, 224, 226)),
    "paper": ((243, 238, 226), (236, 230, 216)),
}


def _arc(
    radius: float, start: float, stop: float, points: int = 40, centre: float = 0.0
) -> np.ndarray:
    angles = np.radians(np.linspace(start, stop, points))
    return np.stack((centre + radius * np.cos(angles), radius * np.sin(angles)), 1)


@cache
def _loops(shape: str) -> list[np.ndarray]:
    """Closed outlines of a shape around the origin, in units of its radius: (points, 2) each, y
    downwards.
    """
    if shape == "circle":
        return [_arc(0.94, 0, 360)]
    if shape == "ring":
        return [_arc(1.0, 0, 360), _arc(0.6, 360, 0)]
    if shape == "crescent":  # a disc without its overlap with a second disc, shifted to the right
        return [np.concatenate((_arc(1.0, 50, 310), _arc(0.77, 275, 85, centre=0.62)))]
    if shape == "star":
        radii = np.where(np.arange(10) % 2, 0.46, 1.1)[:, None]
        return [radii * _arc(1.0, -90, 234, 10) + (0, 0.06)]
    if shape == "cross":
        arm = [(-0.32, -1), (0.32, -1), (0.32, -0.32)]
        quarter = np.array([[0, 1], [-1, 0]])
        turns = [np.linalg.matrix_power(quarter, turn) for turn in range(4)]
        return [np.concatenate([np.array(arm) @ turn for turn in turns])]
    corners = {
        "square": [(-0.84, -0.84), (0.84, -0.84), (0.84, 0.84), (-0.84, 0.84)],
        "triangle": [(0, -1.0), (1.0, 0.8), (-1.0, 0.8)],
        "diamond": [(0, -1.12), (0.82, 0), (0, 1.12), (-0.82, 0)],
    }
    return [np.array(corners[shape], dtype=float)]


@cache
def _background(kind: str) -> Image.Image:
    """Background at drawing size: its gradient and a few strokes that identify it."""
    image = _gradient(BACKGROUNDS[kind])
    draw = ImageDraw.Draw(image, "RGBA")
    rng = np.random.default_rng(7)  # strokes independent of the data set's seed
    if kind in WAVES:
        _draw_waves(draw, rng, WAVES[kind])
    elif kind == "sky":
        _draw_clouds(draw, rng)
        image = image.filter(ImageFilter.GaussianBlur(3))
    elif kind == "night":
        _draw_stars(draw, rng)
    elif kind == "grass":
        _draw_grass(draw, rng)
    elif kind == "stripes":
        _draw_stripes(draw)
    return image


def _gradient(colours: Sequence[tuple[int, int, int]]) -> Image.Image:
    """Colours from the top edge to the bottom edge, at equal distances."""
    heights = np.linspace(0, len(colours) - 1, SIDE)
    places = range(len(colours))
    channels = [np.interp(heights, places, levels) for levels in zip(*colours, strict=True)]
    column = np.stack(channels, 1)  # (SIDE, 3)
    return Image.fromarray(np.repeat(column[:, None], SIDE, 1).round().astype(np.uint8))


def _draw_clouds(draw: ImageDraw.ImageDraw, rng: np.random.Generator) -> None:
    for left, top, width in rng.uniform((-0.1, 0.02, 0.25), (0.8, 0.85, 0.45), (7, 3)) * SIDE:
        for puff in range(3):
            x = left + puff * width / 4
            lift = width / 10 * (puff == 1)
            draw.ellipse((x, top - lift, x + width / 2, top + width / 4), (255, 255, 255, 90))


def _draw_stars(draw: ImageDraw.ImageDraw, rng: np.random.Generator) -> None:
    for x, y, radius in rng.uniform((0, 0, 0.6), (SIDE, SIDE, 2.2), (70, 3)):
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), (255, 250, 220, 190))


def _draw_grass(draw: ImageDraw.ImageDraw, rng: np.random.Generator) -> None:
    for x, y, lean in rng.uniform((0, 0, -5), (SIDE, SIDE, 5), (420, 3)):
        draw.line((x, y, x + lean, y - 11), (48, 112, 44, 80), 2)


def _draw_stripes(draw: ImageDraw.ImageDraw) -> None:
    for left in range(0, SIDE, 48):
        draw.rectangle((left, 0, left + 23, SIDE), (178, 190, 206, 255))


class _Waves(NamedTuple):
    """How waves are drawn: their colour, height, distance and width."""

    ink: tuple[int, int, int, int]
    height: float
    distance: int
    width: int


WAVES = {
    "sea": _Waves((255, 255, 255, 60), 4, 20, 3),
    "sand": _Waves((150, 112, 60, 50), 2.5, 20, 3),
    "sunset": _Waves((255, 226, 190, 46), 0.6, 34, 8),
}


def _draw_waves(draw: ImageDraw.ImageDraw, rng: np.random.Generator, waves: _Waves) -> None:
    xs = np.arange(-4, SIDE + 8, 4)
    for level in range(10, SIDE, waves.distance):
        ys = level + waves.height * np.sin(xs / 11 + rng.uniform(0, 6.3))
        draw.line(np.column_stack([xs, ys]).ravel().tolist(), waves.ink, waves.width)


def render(scene: Scene) -> Image.Image:
    """Render the scene as an RGB picture of 96 x 96 pixels."""
    image = _background(scene.background).copy()
    draw = ImageDraw.Draw(image, "RGBA")
    for item in scene.objects:
        _draw_object(draw, item)
    return image.reduce(SUPERSAMPLING)


def _draw_object(draw: ImageDraw.ImageDraw, item: SceneObject) -> None:
    """Draw the shadow, the area and the outline of an object."""
    cosine = math.cos(math.radians(item.turn))
    sine = math.sin(math.radians(item.turn))
    rotation = np.array(((cosine, sine), (-sine, cosine)))
    centre = np.array((item.x, item.y)) * SIDE
    loops = []
    for loop in _loops(item.shape):
        placed = loop @ rotation * (item.radius * SIDE) + centre
        loops.append(np.concatenate((placed, placed[:1])))
    # a hole is connected to the outline by a path there and back
    filled = np.concatenate((*loops, loops[0][:1]))
    colour = COLOURS[item.colour]
    shadow = filled + np.array((3.5, 5))  # to the lower right
    draw.polygon(shadow.ravel().tolist(), (20, 20, 40, 70))
    draw.polygon(filled.ravel().tolist(), colour)
    draw.line(filled.ravel().tolist(), colour, 2)  # hides the seam of that path
    outline = tuple(int(0.62 * level) for level in colour)
    for loop in loops:
        draw.line(loop.ravel().tolist(), outline, 4, joint="curve")
