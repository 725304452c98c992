"""The functions of scores that the losses sum over negatives or positives, with
:meth:`itrloss.Anchors.sum` and others.

Each takes scores, and parameters with one value for each anchor or for all. See
:func:`itrloss.pair_term` for more.
"""

from .engine.answers import hinge as hinge
from .engine.answers import identity as identity
from .engine.answers import log1p_clamp as log1p_clamp
from .engine.answers import log1p_relu as log1p_relu
from .engine.answers import negative_log_likelihood as negative_log_likelihood
from .engine.answers import pair_term as pair_term
from .engine.answers import shifted_exponential as shifted_exponential
from .engine.answers import softplus as softplus
