"""The kernels of the device index, in Triton.

Three kernels make the drafts of a step, for all of its rows at once:

1. `match_texts` compares the end of each row's text with earlier places of the same text, and with the outputs of
   running requests that the row may read. It is a scan, so the longest match is exact.
2. `match_segments` finds the place of the row's context in the suffix array of each sealed segment of its namespace, by
   a binary search in the segment's own bytes. Around that place are the entries that share most with the context.
3. `draft` reads all matches on, side by side. At each place the matches that are left vote for the next token, and
   those that said another one are dropped.

A row names its sources in the table of rows (`rows.py`). The kernels compare the namespace of each source with that
of the row once more, so that a wrong list costs drafts and never reads another tenant's text.

Matches are packed into one number: the length of the match, how many of the same segment are as long, and the place of
the next token. Votes are whole numbers, whose sums do not depend on the order, so that all ranks of a tensor-parallel
group draft the same.
"""

import triton
import triton.language as tl

# A packed match: its place below the first bit, then the crowd of its segment, and its length from the second one.
CROWD_BIT, LENGTH_BIT, PLACES_MASK = tl.constexpr(40), tl.constexpr(48), tl.constexpr((1 << 40) - 1)
# Columns of the table of rows. Behind them are the rows' sources: first the rows of other requests, then segments.
NAMESPACE = tl.constexpr(0)
GROUP = tl.constexpr(1)
PROMPT_LEN = tl.constexpr(2)
VALUES = tl.constexpr(3)
SOURCES_AT = tl.constexpr(4)
# Columns of the table of segments.
TEXT_AT, ENDS_AT, ENDS, OWNER, SEGMENT_COLUMNS = (
    tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4),
)  # fmt: skip
# Kinds of sources, in the order of the tables of votes.
OWN, OF_GROUP, OF_NAMESPACE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
KINDS = 3
# Votes of a match that is continued rightly as often as not.
UNIT = tl.constexpr(64)
# Most votes of one match: those of all lanes together fit a word.
VOTES_MAX = 1 << 20


@triton.jit
def match_texts(
    tokens_ptr,   # int32 [rows, stride]: the text of each row
    stride,
    lengths_ptr,  # int32 [rows]: tokens of each text
    rows_ptr,     # int64 [batch]: the row of each request of the step
    sampled_ptr,  # int32 [batch]: 0 for a prompt that is not read to its end
    table_ptr,    # int32 [rows, COLUMNS]: the table of rows
    found_ptr,    # out, int64 [batch, 1 + SIBLINGS, CHUNKS, TOP]: packed matches, 0 for none
    COLUMNS: tl.constexpr, SIBLINGS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    b, s, c = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    out = found_ptr + ((b * (1 + SIBLINGS) + s) * CHUNKS + c) * TOP
    for t in tl.static_range(TOP):
        tl.store(out + t, tl.zeros((), tl.int64))
    if tl.load(sampled_ptr + b) == 0:
        return
    row = tl.load(rows_ptr + b)
    own = table_ptr + row * COLUMNS
    source = row
    first = 1
    if s > 0:
        source = tl.load(own + SOURCES_AT + s - 1).to(tl.int64)
        if source < 0:
            return
        theirs = table_ptr + source * COLUMNS
        namespace = tl.load(own + NAMESPACE)
        if (namespace < 0) | (tl.load(theirs + NAMESPACE) != namespace):
            return
        # Prompts of others are matched and never offered.
        first = tl.maximum(tl.load(theirs + PROMPT_LEN), 1)
    context = tokens_ptr + row * stride
    length = tl.load(lengths_ptr + row)
    text = tokens_ptr + source * stride
    low = tl.maximum(first, c * CHUNK)
    high = tl.minimum(tl.load(lengths_ptr + source), (c + 1) * CHUNK)

    lane = tl.arange(0, BLOCK)
    best = tl.zeros([BLOCK], tl.int64)
    while low < high:
        place = high - 1 - lane
        alive = place >= low
        shared = tl.zeros([BLOCK], tl.int64)
        back = 0
        open_ = 1
        while (back < DEPTH) & (open_ > 0):
            mine = tl.load(context + length - 1 - back, mask=back < length, other=-2)
            there = tl.load(text + place - 1 - back, mask=alive & (place - 1 - back >= 0), other=-3)
            alive = alive & (there == mine)
            shared += alive.to(tl.int64)
            back += 1
            open_ = tl.max(alive.to(tl.int32), axis=0)
        best = tl.maximum(best, tl.where(shared > 0, (shared << LENGTH_BIT) | place, 0))
        high -= BLOCK
    # Among equals the latest place.
    for t in tl.static_range(TOP):
        most = tl.max(best, axis=0)
        tl.store(out + t, most)
        best = tl.where(best == most, 0, best)


@triton.jit
def match_segments(
    tokens_ptr, stride, lengths_ptr, rows_ptr, sampled_ptr, table_ptr,  # as above
    segments_ptr,  # int64 [segments, SEGMENT_COLUMNS]: the table of segments
    arena_ptr,     # int32: texts and suffix arrays of all segments
    found_ptr,     # out, int64 [batch, SEGMENTS, NEAR]: packed matches whose places are in the arena, 0 for none
    COLUMNS: tl.constexpr, SIBLINGS: tl.constexpr, SEGMENTS: tl.constexpr, DEPTH: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    b, s = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, NEAR)
    out = found_ptr + (b * SEGMENTS + s) * NEAR + lane
    tl.store(out, tl.zeros([NEAR], tl.int64))
    if tl.load(sampled_ptr + b) == 0:
        return
    row = tl.load(rows_ptr + b)
    own = table_ptr + row * COLUMNS
    number = tl.load(own + SOURCES_AT + SIBLINGS + s)
    if number < 0:
        return
    segment = segments_ptr + number.to(tl.int64) * SEGMENT_COLUMNS
    namespace = tl.load(own + NAMESPACE).to(tl.int64)
    if (namespace < 0) | (tl.load(segment + OWNER) != namespace):
        return
    text_at = tl.load(segment + TEXT_AT)
    text = arena_ptr + text_at
    ends = arena_ptr + tl.load(segment + ENDS_AT)
    count = tl.load(segment + ENDS)
    back = tl.arange(0, DEPTH)
    length = tl.load(lengths_ptr + row)
    # The context, newest token first. Separators are the highest token, and -1 as a signed number, so the order is
    # that of unsigned numbers.
    context = tl.load(tokens_ptr + row * stride + length - 1 - back, mask=back < length, other=-2).to(tl.uint32)

    low = count * 0
    high = count
    while low < high:
        middle = (low + high) // 2
        end = tl.load(ends + middle).to(tl.int64)
        there = tl.load(text + end - back, mask=end - back >= 0, other=-1).to(tl.uint32)
        differs = tl.min(tl.where(there != context, back, DEPTH), axis=0)
        is_less = tl.sum(tl.where((back == differs) & (there < context), 1, 0), axis=0) > 0
        low = tl.where(is_less, middle + 1, low)
        high = tl.where(is_less, high, middle)

    near = low - NEAR // 2 + lane
    valid = (near >= 0) & (near < count)
    end = tl.load(ends + near, mask=valid, other=0).to(tl.int64)
    there = tl.load(
        text + end[:, None] - back[None, :], mask=valid[:, None] & (end[:, None] - back[None, :] >= 0), other=-1
    ).to(tl.uint32)
    shared = tl.min(tl.where(there != context[None, :], back[None, :], DEPTH), axis=1).to(tl.int64)
    valid = valid & (shared > 0)
    crowd = tl.sum(((shared[None, :] >= shared[:, None]) & valid[None, :]).to(tl.int64), axis=1)
    tl.store(out, tl.where(valid, (shared << LENGTH_BIT) | (crowd << CROWD_BIT) | (text_at + end + 1), 0))


@triton.jit(do_not_specialize=["wanted"])
def draft(
    tokens_ptr, stride, lengths_ptr, rows_ptr, table_ptr, arena_ptr,  # as above
    last_ptr,   # int64 [rows]: the token that was sampled last
    votes_ptr,  # int32 [tables, KINDS, DEPTH + 1]: the votes of a match by its kind and length
    texts_ptr,  # int64 [batch, TEXT_MATCHES]: what `match_texts` found
    found_ptr,  # int64 [batch, SEGMENT_MATCHES]: what `match_segments` found
    drafts_ptr,  # out, int64 [batch, PLACES]
    drafted_ptr,  # out, int32 [batch]: how many of these are drafted; the others repeat the last token
    scores_ptr,   # out, float32 [batch]: tokens of the draft that are expected to be accepted
    confidences_ptr,  # out, float32 [batch, PLACES]: the probability of each token, if those before it are right
    wanted,       # places that are to be drafted
    COLUMNS: tl.constexpr, TEXT_MATCHES: tl.constexpr, OF_SOURCE: tl.constexpr, SEGMENT_MATCHES: tl.constexpr,
    LANES: tl.constexpr, DEPTH: tl.constexpr, PLACES: tl.constexpr, PLACES_P2: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    row = tl.load(rows_ptr + b)
    own = table_ptr + row * COLUMNS
    lane = tl.arange(0, LANES)
    is_text = lane < TEXT_MATCHES
    in_segment = lane - TEXT_MATCHES
    is_sealed = (in_segment >= 0) & (in_segment < SEGMENT_MATCHES)
    match = tl.load(texts_ptr + b * TEXT_MATCHES + lane, mask=is_text, other=0)
    match += tl.load(found_ptr + b * SEGMENT_MATCHES + in_segment, mask=is_sealed, other=0)
    shared = match >> LENGTH_BIT
    place = match & PLACES_MASK
    alive = shared > 0

    # The text that each lane reads on, and what its match is worth.
    number = lane // OF_SOURCE
    is_other = is_text & (number > 0) & alive
    source = tl.where(is_other, tl.load(own + SOURCES_AT + number - 1, mask=is_other, other=0).to(tl.int64), row)
    limit = tl.load(lengths_ptr + source, mask=is_text, other=0)
    group = tl.load(own + GROUP)
    group_of = tl.load(table_ptr + source * COLUMNS + GROUP, mask=is_other, other=-1)
    is_sibling = is_other & (group >= 0) & (group_of == group)
    kind = tl.where(is_text & (number == 0), OWN, tl.where(is_sibling, OF_GROUP, OF_NAMESPACE))
    votes_at = (tl.load(own + VALUES) * 3 + kind) * (DEPTH + 1) + tl.minimum(shared, DEPTH).to(tl.int32)
    votes = tl.load(votes_ptr + votes_at, mask=alive, other=0)
    # Many matches of one segment are no independent witnesses: together they have the square root of their votes.
    crowd = tl.maximum((match >> CROWD_BIT) & 0xFF, 1)
    votes = (votes.to(tl.float32) / tl.sqrt(crowd.to(tl.float32))).to(tl.int32) + 1

    last = tl.load(last_ptr + row)
    filler = tl.arange(0, PLACES_P2)
    is_filler = (filler >= wanted) & (filler < PLACES)
    tl.store(drafts_ptr + b * PLACES + filler, tl.full([PLACES_P2], 0, tl.int64) + last, mask=is_filler)
    tl.store(confidences_ptr + b * PLACES + filler, tl.full([PLACES_P2], 0, tl.float32), mask=is_filler)
    drafted = 0
    path = 1.0
    score = 0.0
    for k in range(wanted):
        beyond = place + k
        ahead = tl.load(tokens_ptr + source * stride + beyond, mask=alive & is_text & (beyond < limit), other=-1)
        ahead = tl.where(is_sealed, tl.load(arena_ptr + beyond, mask=alive & is_sealed, other=-1), ahead)
        alive = alive & (ahead >= 0)
        # The tokens of the lanes with the most votes are compared. Among equals the first lane wins: the newest place
        # of the nearest source.
        open_ = alive
        most = 0
        chosen = -1
        for _ in tl.static_range(TOKENS):
            single = tl.max(tl.where(open_, votes, 0), axis=0)
            first = tl.min(tl.where(open_ & (votes == single), lane, LANES), axis=0)
            candidate = tl.sum(tl.where(lane == first, ahead, 0), axis=0)
            agrees = open_ & (ahead == candidate)
            together = tl.sum(tl.where(agrees, votes, 0), axis=0)
            chosen = tl.where(together > most, candidate, chosen)
            most = tl.maximum(together, most)
            open_ = open_ & (ahead != candidate)
        # Votes are odds, so the share of the winner among all and the unknown is its probability.
        everyone = tl.sum(tl.where(alive, votes, 0), axis=0)
        confidence = most.to(tl.float32) / (everyone + UNIT).to(tl.float32)
        tl.store(confidences_ptr + b * PLACES + k, confidence)
        path *= confidence
        score += path
        alive = alive & (ahead == chosen)
        tl.store(drafts_ptr + b * PLACES + k, tl.where(most > 0, chosen.to(tl.int64), last))
        drafted += (most > 0).to(tl.int32)
    tl.store(drafted_ptr + b, drafted)
    tl.store(scores_ptr + b, score)
