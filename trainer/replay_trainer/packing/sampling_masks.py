"""SamplingMasks: for each token of a batch, the tokens that top_p, top_k or min_p kept for it, and the softmax over
them.

    log p(token) = logit[token] / temperature - logsumexp over the mask of logit / temperature

That is the distribution which the sampler drew from (`replay_client.sampling_masks`), so the ratio of the correction is
1 at staleness 0. A token without a mask gets the softmax over all tokens. Only the logits of the masks are gathered:
(C, K) for C tokens of a chunk and K ids of its largest mask, beside the (C, V) that are there anyway.

The masks of a batch lie on the host in one row, in the order of its tokens, and are cut with its rows. `over` brings
those of a micro-batch to its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replay_client.columns import OFFSETS
from replay_client.rollout import RolloutGroup
from replay_client.sampling_masks import SAMPLING_MASK, truncates

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SamplingMasks:
    """The masks of the tokens of a batch: B rows of T tokens."""

    ids_M: npt.NDArray[np.int32]
    """The ids of all masks, one mask after the other, row after row."""
    counts_BT: Ints
    """Ids of each token's mask; 0: it has none."""
    truncated_B: npt.NDArray[np.bool_]
    """Whether the tokens of the row were drawn from a part of the vocabulary."""

    @classmethod
    def of(cls, groups: Sequence[RolloutGroup], width: int) -> SamplingMasks | None:
        """Those of all sequences of the groups, each a row of `width` tokens; None: no group was drawn like this."""
        if not any(truncates(group.sampling) for group in groups):
            return None
        ids, counts, truncated = [np.zeros(0, np.int32)], [], []
        for group in groups:
            truncated += [truncates(group.sampling)] * group.num_sequences
            known = truncated[-1] and SAMPLING_MASK in group.extras
            counts_T = np.diff(group.extras[SAMPLING_MASK + OFFSETS]) if known else np.zeros(group.num_tokens, np.int64)
            if known:
                ids.append(group.extras[SAMPLING_MASK].astype(np.int32, copy=False))
            for span in group.sequence_spans():
                row = np.zeros(width, np.int64)
                row[: span.stop - span.start] = counts_T[span]
                counts.append(row)
        return cls(np.concatenate(ids), np.stack(counts), np.array(truncated, np.bool_))

    def select(self, rows: Ints, width: int) -> SamplingMasks:
        """Those of these rows; `width`: tokens of the longest."""
        assert not self.counts_BT[rows, width:].any(), "the mask of a token would be cut off"
        ends_B = np.cumsum(self.counts_BT.sum(axis=1))
        starts_B = np.concatenate(([0], ends_B))
        parts = [self.ids_M[starts_B[row] : ends_B[row]] for row in rows]
        ids_M = np.concatenate([np.zeros(0, np.int32), *parts])
        return SamplingMasks(ids_M, self.counts_BT[rows, :width], self.truncated_B[rows])

    def unknown(self, mask_BT: Tensor) -> int:
        """How many tokens of the mask were drawn from a part of the vocabulary that nobody knows."""
        return int((mask_BT.cpu().numpy() & self.truncated_B[:, None] & (self.counts_BT == 0)).sum())

    def over(self, mask_BT: Tensor) -> TokenMasks | None:
        """The masks of the N tokens of the mask, row after row, on its device; None: no token has one."""
        host_BT = mask_BT.cpu().numpy()
        assert host_BT.shape == self.counts_BT.shape, (host_BT.shape, self.counts_BT.shape)
        counts_N = self.counts_BT[host_BT]
        if not counts_N.any():
            return None
        starts_N = (np.cumsum(self.counts_BT).reshape(self.counts_BT.shape) - self.counts_BT)[host_BT]
        ids_M, starts, counts = (
            torch.from_numpy(np.ascontiguousarray(array)).to(mask_BT.device)
            for array in (self.ids_M, starts_N, counts_N)
        )
        return TokenMasks(ids_M, starts, counts, counts_N)


@dataclass(frozen=True)
class TokenMasks:
    """The masks of N tokens, on a device."""

    ids_M: Tensor
    """int32"""
    starts_N: Tensor
    """int64, where the mask of each token begins in ids_M."""
    counts_N: Tensor
    """int64, 0: the token has no mask."""
    host_counts_N: Ints

    def of_chunk(self, chunk: slice) -> ChunkMasks:
        """The masks of these tokens, padded to the largest."""
        assert len(self.counts_N) == len(self.host_counts_N), "host and device have the masks of different tokens"
        host_counts_C = self.host_counts_N[chunk]
        starts_C1, counts_C1 = self.starts_N[chunk, None], self.counts_N[chunk, None]
        columns_K = torch.arange(max(int(host_counts_C.max(initial=0)), 1), device=self.ids_M.device)
        inside_CK = columns_K < counts_C1
        ids_CK = self.ids_M[(starts_C1 + columns_K).clamp(max=len(self.ids_M) - 1)].long().masked_fill(~inside_CK, 0)
        return ChunkMasks(ids_CK, inside_CK, counts_C1[:, 0] > 0, bool((host_counts_C > 0).all()))


@dataclass(frozen=True)
class ChunkMasks:
    """The masks of C tokens, padded to K ids."""

    ids_CK: Tensor
    """int64, 0 in the padding."""
    inside_CK: Tensor
    """bool, False in the padding."""
    known_C: Tensor
    """bool, whether the token has a mask."""
    all_known: bool

    def logits_of(self, logits_CV: Tensor) -> Tensor:
        """(C, K) logits of the masks, -inf in the padding; what is said of a token without a mask means nothing.

        Differentiable: no row is -inf alone.
        """
        assert len(logits_CV) == len(self.ids_CK), (logits_CV.shape, self.ids_CK.shape)
        return logits_CV.gather(-1, self.ids_CK).masked_fill(~self.inside_CK & self.known_C[:, None], -torch.inf)

    def within(self, gradient_CV: Tensor) -> Tensor:
        """The gradient in place, 0 for the logits that a token did not keep."""
        kept_CK = gradient_CV.gather(-1, self.ids_CK).masked_fill_(~self.inside_CK, 0)
        gradient_CV.masked_fill_(self.known_C[:, None], 0)
        # Rows without a mask add nothing to themselves.
        return gradient_CV.scatter_add_(-1, self.ids_CK, kept_CK)
