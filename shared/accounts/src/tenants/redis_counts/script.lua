-- Checks and takes the amounts of a request from the buckets of its tenant and key, and keeps its place among those in
-- flight. The maths are those of `bucket.rs` and `limit_usage.rs`; a test compares them on random calls.
--
-- KEYS: for each subject its buckets, and its places.
-- ARGV: the act, the name of the place, and milliseconds until a place expires. Then for each subject doubles: the most
-- requests in flight, and for each bucket the amount that it holds and the amount to take. 0 in place of a limit means
-- none.
-- Returns doubles: the subject that is refused, or 0; the bucket, 0 for requests in flight; the seconds to wait. Then
-- for each subject the requests in flight and the levels of its buckets, after this call, or NaN where it has none. A
-- settlement, whose answer nobody reads, returns `-` alone.
--
-- Numbers are packed, because to print and to read them took a third of the time.

local act, place, expires_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local FIRST_SUBJECT = 3
-- The last index of the sizes and levels of four buckets.
local LAST = 9
-- When the buckets were filled, in microseconds, and the size and the level of each. The doubles of a subject in ARGV
-- have the same places.
local FORMAT = '<ddddddddd'
-- An amount that only asks whether there is a debt.
local LEAST = 2 ^ -52
-- A shorter time is none: gateways count in nanoseconds.
local WAIT_S_MIN = 0.5e-9

local max, min = math.max, math.min
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]

-- Fills the buckets of a subject up to now, and takes the present limits over.
local function read(key, wanted)
  local kept = redis.call('GET', key)
  local values = kept and { struct.unpack(FORMAT, kept) } or { 0, 0, 0, 0, 0, 0, 0, 0, 0 }
  local passed_s = max(0, now_us - values[1]) / 1000000
  values[1] = max(now_us, values[1])
  for i = 2, LAST, 2 do
    local per_minute, before = wanted[i], values[i]
    local level = per_minute
    if per_minute > 0 and before > 0 then
      level = min(before, values[i + 1] + passed_s * before / 60)
      if before ~= per_minute then
        level = level * (per_minute / before)
      end
    end
    values[i], values[i + 1] = per_minute, level
  end
  return values
end

-- Takes the amounts. The buckets are kept until they are full, because a missing bucket is a full one.
local function take(key, values, wanted)
  local full_s = 0
  for i = 2, LAST, 2 do
    local per_minute = values[i]
    if per_minute > 0 then
      local level = min(values[i + 1] - wanted[i + 1], per_minute)
      values[i + 1] = level
      full_s = max(full_s, (per_minute - level) * 60 / per_minute)
    end
  end
  local keep_ms = min(math.ceil(full_s * 1000) + 1000, 1e15)
  redis.call('SET', key, struct.pack(FORMAT, unpack(values)), 'PX', keep_ms)
end

-- The first bucket that the amounts are past, and the seconds until there is room.
local function refusal(values, wanted)
  for i = 2, LAST, 2 do
    local per_minute, amount = values[i], wanted[i + 1]
    if per_minute > 0 then
      if act == 'begin' then
        amount = max(amount, LEAST)
      end
      local wait_s = (min(amount, per_minute) - values[i + 1]) * 60 / per_minute
      if amount > 0 and wait_s >= WAIT_S_MIN then
        return i / 2, wait_s
      end
    end
  end
end

local subjects = #KEYS / 2
if act == 'settle' then
  for s = 1, subjects do
    -- Only the first settlement finds the place.
    if redis.call('ZREM', KEYS[2 * s], place) == 1 then
      local wanted = { struct.unpack(FORMAT, ARGV[FIRST_SUBJECT + s]) }
      local key = KEYS[2 * s - 1]
      take(key, read(key, wanted), wanted)
    end
  end
  return '-'
end

local now_ms = math.floor(now_us / 1000)
local all_wanted, all_values, in_flight = {}, {}, {}
local refused, refused_bucket, refused_wait_s = 0, 0, 0
for s = 1, subjects do
  local wanted = { struct.unpack(FORMAT, ARGV[FIRST_SUBJECT + s]) }
  local values = read(KEYS[2 * s - 1], wanted)
  local places, most = KEYS[2 * s], wanted[1]
  local count = redis.call('ZCARD', places)
  if most > 0 and count >= most then
    -- Some places may be those that a dead gateway left.
    redis.call('ZREMRANGEBYSCORE', places, '-inf', now_ms)
    count = redis.call('ZCARD', places)
  end
  all_wanted[s], all_values[s], in_flight[s] = wanted, values, count
  if refused == 0 then
    if act == 'begin' and most > 0 and count >= most then
      refused = s
    else
      local bucket, wait_s = refusal(values, wanted)
      if bucket then
        refused, refused_bucket, refused_wait_s = s, bucket, wait_s
      end
    end
  end
end

local answer = { refused, refused_bucket, refused_wait_s }
for s = 1, subjects do
  local values = all_values[s]
  local count = in_flight[s]
  if refused == 0 then
    local places = KEYS[2 * s]
    count = count + redis.call('ZADD', places, now_ms + expires_ms, place)
    redis.call('PEXPIRE', places, expires_ms + 1000)
    take(KEYS[2 * s - 1], values, all_wanted[s])
  end
  answer[#answer + 1] = count
  for i = 2, LAST, 2 do
    answer[#answer + 1] = values[i] > 0 and values[i + 1] or 0 / 0
  end
end
return struct.pack('<' .. string.rep('d', #answer), unpack(answer))
