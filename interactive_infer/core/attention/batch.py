"""A packed step as paged kernels see it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepBatch:
    """`T` tokens of `R` rows in two regions, so that shapes stay the same under a CUDA graph.

    The first `num_decodes` tokens are decodes: token i is the only one of row i. The tokens after them are prefill
    chunks of the rows from `num_decodes` on, whose query token j of n sits at position `kv_len - n + j`. Rows of
    padding have `kv_len` 0 and, in the second region, no tokens; tokens after the last row belong to nobody.
    """

    num_decodes: int
    positions: Tensor  # int64 [T]
    write_to: Tensor  # int64 [T], a slot of the flattened pools; 0, on the null page, for tokens not to be stored
    query_start: Tensor  # int64 [R - num_decodes + 1], offsets into the step: the first is num_decodes
    kv_len: Tensor  # int64 [R], keys that a row attends over, those of this step included
    row_slot: Tensor  # int64 [R], rows of the page table
    page_table: Tensor  # int32 [slots + 1, most pages of a sequence]
    page_size: int
