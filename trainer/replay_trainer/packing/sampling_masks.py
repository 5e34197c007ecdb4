"""SamplingMasks: for each token of a batch, the tokens that top_p, top_k or min_p kept for it, and the softmax over
them.

    log p(token) = logit[token] / temperature - logsumexp over the mask of logit / temperature

The sampler drew from this distribution (`replay_client.sampling_masks`), so the ratio of the correction is 1 at
staleness 0. A token without a mask gets the softmax over all tokens. Beside the (C, V) logits of a chunk of C tokens,
only the (C, K) logits of its masks are in memory, where K is the number of ids in the largest mask of the chunk.

The masks of a batch are stored on the host in one array, in the order of the tokens of the batch. `select` keeps the
masks of some rows. `over` copies the masks of the tokens to train on to their device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    """The number of ids in the mask of each token; 0: the token has no mask."""
    truncated_B: npt.NDArray[np.bool_]
    """True if the tokens of the row have log-probabilities of a softmax over a part of the vocabulary."""

    @classmethod
    def of(cls, groups: Sequence[RolloutGroup], width: int) -> SamplingMasks | None:
        """The masks of all sequences of the groups. Each sequence is a row of `width` tokens.

        None if the log-probabilities of all groups are those of the softmax over the whole vocabulary.
        """
        if not any(truncates(group.sampling) for group in groups):
            return None
        ids = [np.zeros(0, np.int32)]  # so that there is something to concatenate if no group has masks
        counts = []
        truncated = []
        for group in groups:
            is_truncated = truncates(group.sampling)
            counts_T = np.zeros(group.num_tokens, np.int64)
            # A group whose sampling was truncated but whose masks are not stored keeps counts of 0. By these counts,
            # `unknown` finds its tokens.
            if is_truncated and SAMPLING_MASK in group.extras:
                # One column has the ids of all masks of the group. The other says where the mask of each token begins.
                ids.append(group.extras[SAMPLING_MASK].astype(np.int32, copy=False))
                counts_T = np.diff(group.extras[SAMPLING_MASK + OFFSETS])
            for span in group.sequence_spans():
                length = span.stop - span.start
                row_counts = np.zeros(width, np.int64)
                row_counts[:length] = counts_T[span]
                counts.append(row_counts)
                truncated.append(is_truncated)
        return cls(np.concatenate(ids), np.stack(counts), np.array(truncated, np.bool_))

    def select(self, rows: Ints, width: int) -> SamplingMasks:
        """The masks of these rows. `width`: the tokens of the longest row."""
        assert not self.counts_BT[rows, width:].any(), "the mask of a token would be cut off"
        # The ids of row b are ids_M[bounds[b] : bounds[b + 1]].
        bounds = np.concatenate(([0], np.cumsum(self.counts_BT.sum(axis=1))))
        parts = [self.ids_M[bounds[row] : bounds[row + 1]] for row in rows]
        ids_M = np.concatenate([np.zeros(0, np.int32), *parts])
        return SamplingMasks(ids_M, self.counts_BT[rows, :width], self.truncated_B[rows])

    def unknown(self, mask_BT: Tensor) -> int:
        """The number of tokens of `mask_BT` that were drawn from an unknown part of the vocabulary."""
        unknown_BT = self.truncated_B[:, None] & (self.counts_BT == 0)
        return int((mask_BT.cpu().numpy() & unknown_BT).sum())

    def over(self, mask_BT: Tensor) -> TokenMasks | None:
        """The sampling masks of the N tokens of `mask_BT`, row after row, on the device of `mask_BT`; None: no token
        has a sampling mask."""
        host_mask_BT = mask_BT.cpu().numpy()
        assert host_mask_BT.shape == self.counts_BT.shape, (host_mask_BT.shape, self.counts_BT.shape)
        counts_N = self.counts_BT[host_mask_BT]
        if not counts_N.any():
            return None
        # ids_M has the masks of the tokens row after row. So the sum of the counts up to and including a token is the
        # index in ids_M at which the mask of the token ends.
        ends_BT = np.cumsum(self.counts_BT).reshape(self.counts_BT.shape)
        starts_BT = ends_BT - self.counts_BT
        device = mask_BT.device
        return TokenMasks(
            ids_M=_on_device(self.ids_M, device),
            starts_N=_on_device(starts_BT[host_mask_BT], device),
            counts_N=_on_device(counts_N, device),
            host_counts_N=counts_N,
        )


def _on_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


@dataclass(frozen=True)
class TokenMasks:
    """The masks of N tokens, on a device."""

    ids_M: Tensor
    """int32"""
    starts_N: Tensor
    """int64, the index in ids_M at which the mask of each token begins."""
    counts_N: Tensor
    """int64, the number of ids in the mask of each token; 0: the token has no mask."""
    host_counts_N: Ints
    """`counts_N` on the host, so that `of_chunk` need not wait for the device."""

    def of_chunk(self, chunk: slice) -> ChunkMasks:
        """The masks of the tokens of a chunk, padded to the size of the largest mask in the chunk."""
        assert len(self.counts_N) == len(self.host_counts_N), "host and device have the masks of different tokens"
        host_counts_C = self.host_counts_N[chunk]
        starts_C1 = self.starts_N[chunk, None]
        counts_C1 = self.counts_N[chunk, None]
        K = max(int(host_counts_C.max(initial=0)), 1)
        columns_K = torch.arange(K, device=self.ids_M.device)
        inside_CK = columns_K < counts_C1
        # In the padding of a mask, the indices lead to ids of the next mask. `masked_fill` replaces these ids. Without
        # `clamp`, the indices in the padding of the last mask would be beyond the end of ids_M.
        index_CK = (starts_C1 + columns_K).clamp(max=len(self.ids_M) - 1)
        ids_CK = self.ids_M[index_CK].long().masked_fill(~inside_CK, 0)
        return ChunkMasks(
            ids_CK=ids_CK,
            inside_CK=inside_CK,
            known_C=counts_C1[:, 0] > 0,
            all_known=bool((host_counts_C > 0).all()),
        )


@dataclass(frozen=True)
class ChunkMasks:
    """The masks of C tokens, padded to K ids."""

    ids_CK: Tensor
    """int64, 0 in the padding."""
    inside_CK: Tensor
    """bool, False in the padding."""
    known_C: Tensor
    """bool, True if the token has a mask."""
    all_known: bool
    """True if each token has a mask."""

    def logits_of(self, logits_CV: Tensor) -> Tensor:
        """(C, K) logits of the ids of the masks, -inf in the padding.

        The row of a token without a mask has no meaning, and no -inf. So every row has a finite logit, without which
        the gradient of its logsumexp would be NaN.
        """
        assert len(logits_CV) == len(self.ids_CK), (logits_CV.shape, self.ids_CK.shape)
        padding_CK = ~self.inside_CK & self.known_C[:, None]
        return logits_CV.gather(-1, self.ids_CK).masked_fill(padding_CK, -torch.inf)

    def within(self, gradient_CV: Tensor) -> Tensor:
        """Sets the gradient of all logits outside the mask of their token to 0, in place."""
        kept_CK = gradient_CV.gather(-1, self.ids_CK).masked_fill_(~self.inside_CK, 0)
        # The row of a token with a mask becomes 0 first, and then gets its kept values back. The row of a token without
        # a mask stays as it is, because all of its kept values are 0.
        gradient_CV.masked_fill_(self.known_C[:, None], 0)
        return gradient_CV.scatter_add_(-1, self.ids_CK, kept_CK)
