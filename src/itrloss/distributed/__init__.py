"""Communication between the processes of ``torch.distributed``.

=========== ========================================================================================
collectives the collectives with their gradients
consensus   what processes compare before they compute, and gathered tensors
shards      a batch that processes share: whose anchors are where, and what they exchange
parts       a process's part of such a batch as it is passed in, and what it learns of the others'
=========== ========================================================================================
"""

from .collectives import ProcessGroup as ProcessGroup
from .collectives import world_size as world_size
from .consensus import consensus as consensus
from .consensus import digest as digest
from .consensus import gather as gather
from .consensus import gather_parts as gather_parts
from .consensus import is_trained as is_trained
from .consensus import numbered as numbered
from .consensus import padded as padded
from .consensus import rows_of_all as rows_of_all

__all__ = ["gather"]
