"""The public names of the terms that losses sum over negatives or positives, as
:meth:`itrloss.Anchors.sum` does.

Nothing is defined here: :class:`Term`, :func:`itrloss.pair_term`, which makes one of your own
function, and every term are defined in ``engine/terms.py``. A term takes scores, and parameters
with one value for each anchor or for all.
"""

from .engine.terms import Term as Term
from .engine.terms import excess as excess
from .engine.terms import exponential as exponential
from .engine.terms import hinge as hinge
from .engine.terms import identity as identity
from .engine.terms import log1p_clamp as log1p_clamp
from .engine.terms import log1p_relu as log1p_relu
from .engine.terms import negative_log_likelihood as negative_log_likelihood
from .engine.terms import pair_term as pair_term
from .engine.terms import shifted_exponential as shifted_exponential
from .engine.terms import softplus as softplus
from .engine.terms import square as square
