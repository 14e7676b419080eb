"""The device index: segments and running texts on the device, and the drafts that are read from them.

Everything here works on the device without a wait: tensors are copied from pinned memory, and no value of a tensor is
read by the host.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton

from refrain_client.v2 import kernels

# The word that stands between documents. It is no token of a vocabulary.
SEPARATOR = -1
# The part of a step's mean that the gain of other drafts moves by.
LEARNT_PER_STEP = 0.05
# The part of a draft's path probabilities that the row's next draft is not expected to keep, and the part that the mean
# over all drafts moves by with each: as in the choice of lengths on the host.
CHANGE, MEAN_PER_DRAFT = 0.25, 0.01
# The longest match that is looked for, tokens.
DEPTH = 32
# Words behind the last segment that the kernel of drafts may read.
MARGIN = 1024


@dataclass(frozen=True)
class Limits:
    """The sizes of a device index. All ranks must have the same."""

    # Words of the arena: a token of a segment takes two, one for the text and one for the suffix array.
    words_max: int
    # Segments on the device.
    segments_max: int = 1024
    # Segments and running requests that one row drafts from.
    segments: int = 16
    siblings: int = 8
    # The longest match that is looked for.
    depth: int = DEPTH
    # Tables of votes.
    tables: int = 64
    # Matches that are kept of a text's part, and of a segment.
    top: int = 2
    near: int = 16
    # Different next tokens that are compared at each place of a draft.
    tokens: int = 4
    # Places of a text that one program compares, and those that it compares at once.
    chunk: int = 8192
    block: int = 1024


def upload(out, array):
    """Copies an array to a tensor on the device, without a wait of the host."""
    tensor = torch.from_numpy(array)
    if out.device.type == "cuda":
        tensor = tensor.pin_memory()
    out.copy_(tensor, non_blocking=True)


class DeviceIndex:
    """The segments of all namespaces, and what is drafted from them and from the rows of running requests."""

    def __init__(self, limits, rows, text_tokens_max, places, device):
        self.limits, self.device, self.places = limits, torch.device(device), places
        new = lambda *shape, fill, dtype: torch.full(shape, fill, dtype=dtype, device=self.device)  # noqa: E731
        self.arena = new(limits.words_max + MARGIN, fill=SEPARATOR, dtype=torch.int32)
        self.segments = new(limits.segments_max, kernels.SEGMENT_COLUMNS.value, fill=-1, dtype=torch.int64)
        self.columns = kernels.SOURCES_AT.value + limits.siblings + limits.segments
        self.table = new(rows, self.columns, fill=-1, dtype=torch.int32)
        self.votes = new(limits.tables, kernels.KINDS, limits.depth + 1, fill=0, dtype=torch.int32)
        upload(self.votes, default_votes(limits.depth))
        self.chunks = max(1, triton.cdiv(text_tokens_max, limits.chunk))
        self.of_source = self.chunks * limits.top
        self.text_matches = (1 + limits.siblings) * self.of_source
        self.segment_matches = limits.segments * limits.near
        self.texts = new(rows, self.text_matches, fill=0, dtype=torch.int64)
        self.found = new(rows, self.segment_matches, fill=0, dtype=torch.int64)
        self.drafts = new(rows, places, fill=0, dtype=torch.int64)
        self.drafted = new(rows, fill=0, dtype=torch.int32)
        self.scores = new(rows, fill=0, dtype=torch.float32)
        self.confidences = new(rows, places, fill=0, dtype=torch.float32)
        # The mean path probability of each place, over all drafts.
        self.mean_path = new(places, fill=0, dtype=torch.float32)
        # Beside drafts of another kind: accepted tokens of those, and the rows whose last draft was one.
        self.gain_of_others = new(1, fill=0, dtype=torch.float32)
        self.has_other = new(rows, fill=False, dtype=torch.bool)

    def load(self, number, namespace, at, words, text_len):
        """Puts a segment at a place of the arena: `words`, int32, are its text and behind it the suffix array."""
        upload(self.arena[at : at + len(words)], words)
        row = [at, at + text_len, len(words) - text_len, namespace]
        upload(self.segments[number], np.array(row, dtype=np.int64))

    def drop(self, number, at, length):
        """Takes a segment from the arena. Its text does not stay there."""
        self.segments[number].fill_(-1)
        self.arena[at : at + length].fill_(SEPARATOR)

    def set_odds(self, namespace, odds):
        """Sets what matches are worth for the rows of a namespace: the odds of [KINDS, depth + 1] matches."""
        votes = np.minimum(np.array(odds, dtype=np.float64) * kernels.UNIT.value, kernels.VOTES_MAX)
        votes = votes.astype(np.int32).reshape(kernels.KINDS, -1)
        upload(self.votes[namespace % self.limits.tables], votes)

    def set_rows(self, table):
        """Sets the table of rows, int32 [rows, columns]."""
        upload(self.table, table)

    def propose(self, tokens, lengths, rows, sampled, last, wanted):
        """Drafts for the rows of a step. Returns int64 [batch, places]; behind `wanted` there are fillers.

        `tokens` is int32 [rows, text], `lengths` int32 [rows], `rows` int64 [batch], `sampled` int32 [batch], and
        `last` int64 [rows].
        """
        limits, batch = self.limits, rows.shape[0]
        texts, found = self.texts[:batch], self.found[:batch]
        drafts, drafted = self.drafts[:batch], self.drafted[:batch]
        if wanted == 0 or batch == 0:
            return drafts
        kernels.match_texts[(batch, 1 + limits.siblings, self.chunks)](
            tokens, tokens.stride(0), lengths, rows, sampled, self.table, texts,
            COLUMNS=self.columns, SIBLINGS=limits.siblings, CHUNKS=self.chunks, CHUNK=limits.chunk,
            BLOCK=min(limits.block, triton.next_power_of_2(tokens.shape[1])), DEPTH=limits.depth, TOP=limits.top,
        )  # fmt: skip
        kernels.match_segments[(batch, limits.segments)](
            tokens, tokens.stride(0), lengths, rows, sampled, self.table, self.segments, self.arena, found,
            COLUMNS=self.columns, SIBLINGS=limits.siblings, SEGMENTS=limits.segments, DEPTH=limits.depth,
            NEAR=limits.near, num_warps=1,
        )  # fmt: skip
        kernels.draft[(batch,)](
            tokens, tokens.stride(0), lengths, rows, self.table, self.arena, last, self.votes, texts, found, drafts,
            drafted, self.scores, self.confidences, min(wanted, self.places), COLUMNS=self.columns, TEXT_MATCHES=self.text_matches,
            OF_SOURCE=self.of_source, SEGMENT_MATCHES=self.segment_matches,
            LANES=triton.next_power_of_2(self.text_matches + self.segment_matches), DEPTH=limits.depth,
            PLACES=self.places, PLACES_P2=triton.next_power_of_2(self.places), TOKENS=limits.tokens,
        )  # fmt: skip
        return drafts

    def next_confidences(self, confidences, sampled):
        """What to expect of the next drafts of the rows of a step, given the `confidences` of the present ones, float32
        [batch, places]. A match may end, and a new one begin, so both come closer to the mean of all drafts."""
        paths = confidences.cumprod(dim=1)
        drafting = (sampled > 0).to(torch.float32)
        count = drafting.sum()
        mean = (paths * drafting[:, None]).sum(dim=0) / count.clamp(min=1)
        self.mean_path += (1 - (1 - MEAN_PER_DRAFT) ** count) * (mean - self.mean_path)
        paths = (1 - CHANGE) * paths + CHANGE * self.mean_path
        before = torch.cat([torch.ones_like(paths[:, :1]), paths[:, :-1]], dim=1)
        return paths / before.clamp(min=1e-9)

    def is_better(self, rows, sampled, rejected):
        """For each row of a step whether its draft, which `propose` has just returned, is expected to bring more than
        that of another drafter, bool [batch]. What the other's drafts bring is learnt from the last ones, on the
        device. `rejected` is int32 [batch]: the drafted tokens of the step that were not accepted."""
        # With nothing verified, nothing is learnt.
        was_other = self.has_other[rows] & (sampled > 0) & (sampled + rejected > 1)
        accepted = torch.where(was_other, sampled - 1, 0).sum()
        count = was_other.sum()
        mean = accepted / count.clamp(min=1)
        self.gain_of_others += torch.where(count > 0, LEARNT_PER_STEP, 0.0) * (mean - self.gain_of_others)
        is_better = self.scores[: rows.shape[0]] > self.gain_of_others
        self.has_other.index_copy_(0, rows, ~is_better)
        return is_better


def default_votes(depth):
    """Votes until anything is learnt, int32 [1, KINDS, depth + 1]: they grow with the match, and a group's texts
    count more than others of the namespace."""
    lengths = np.arange(depth + 1, dtype=np.float64)
    weights = np.array([1.0, 1.5, 1.0])[:, None]
    odds = 0.25 * weights * np.minimum(lengths, 16) ** 1.5
    return (kernels.UNIT.value * odds).astype(np.int32)[None]
