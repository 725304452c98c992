"""Conformance checks of contrastive losses, of this library and of others."""

from .runner import ConformanceError as ConformanceError
from .runner import Report as Report
from .runner import check_loss as check_loss
from .runner import loss_checks as loss_checks
