"""Checks of what is passed: options, arrays and ids, and warnings of what is probably a mistake.

An error names the argument, what was expected and what it got.
"""

from .arrays import (
    EMBEDDINGS,
    IMAGES_AND_TEXTS,
    ROWS_AND_COLUMNS,
    Names,
    all_finite,
    as_bias,
    as_embeddings,
    as_mask,
    check_alike,
    check_biases,
    check_embeddings,
    check_matrix,
    from_numpy,
    host_may_read,
    repeated_rows,
    require_finite,
)
from .ids import (
    IdsLike,
    are_strings,
    as_id_numbers,
    as_ids,
    as_indices,
    as_int64,
    as_integers,
    as_labels,
    check_range,
    check_same_kind,
    ids_of_both,
    ids_of_one_side,
    if_transposed,
    kind_of,
    no_default_pairing,
)
from .options import (
    CheckedModule,
    KeepsDtypes,
    Learnt,
    Option,
    Options,
    WholeState,
    is_sharded,
    option,
)
from .values import (
    as_number,
    as_size,
    as_tensor,
    as_value,
    check_number,
    did_you_mean,
    no_parameter,
    one_of,
    unknown_keyword,
)
from .words import in_own_words, own_name, takes_queries
