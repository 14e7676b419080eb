-- Checks and takes the amounts of a request from the buckets of its tenant and key, and keeps its place among those in
-- flight. The maths are those of `bucket.rs` and `limit_usage.rs`; a test compares them on random calls.
--
-- KEYS: for each subject its buckets, and its places.
-- ARGV: the act, the name of the place, and milliseconds until a place expires. Then for each subject the most requests
-- in flight, and for each bucket the amount that it holds and the amount to take. 0 in place of a limit means none.
-- Returns words: `-`, or the subject, the bucket (0 for requests in flight) and the seconds to wait, with commas. Then
-- for each subject the requests in flight and the levels of its buckets, after this call. A settlement, whose answer
-- nobody reads, returns `-` alone.

local act, place, expires_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local BUCKETS = 4
-- When the buckets were filled, in microseconds, and the size and the level of each.
local FORMAT = '<' .. string.rep('d', 1 + 2 * BUCKETS)
-- An amount that only asks whether there is a debt.
local LEAST = 2 ^ -52
-- A shorter time is none: gateways count in nanoseconds.
local WAIT_S_MIN = 0.5e-9

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now_ms = math.floor(now_us / 1000)

-- Fills the buckets of a subject up to now, and takes the present limits over.
local function read(key, at)
  local kept = redis.call('GET', key)
  local values = kept and { struct.unpack(FORMAT, kept) }
  local buckets = { filled_us = math.max(now_us, values and values[1] or 0) }
  for i = 1, BUCKETS do
    local per_minute, amount = tonumber(ARGV[at + 2 * i - 1]), tonumber(ARGV[at + 2 * i])
    if per_minute > 0 then
      local level, before = per_minute, values and values[2 * i] or 0
      if before > 0 then
        local passed_s = math.max(0, now_us - values[1]) / 1000000
        level = math.min(before, values[2 * i + 1] + passed_s * before / 60)
        if before ~= per_minute then
          level = level * (per_minute / before)
        end
      end
      buckets[i] = { per_minute = per_minute, level = level, amount = amount }
    end
  end
  return buckets
end

-- Keeps the buckets until they are full, because a missing bucket is a full one.
local function write(key, buckets)
  local values, full_s = { buckets.filled_us }, 0
  for i = 1, BUCKETS do
    local bucket = buckets[i] or { per_minute = 0, level = 0 }
    table.insert(values, bucket.per_minute)
    table.insert(values, bucket.level)
    if bucket.per_minute > 0 then
      full_s = math.max(full_s, (bucket.per_minute - bucket.level) * 60 / bucket.per_minute)
    end
  end
  local keep_ms = string.format('%.0f', math.min(math.ceil(full_s * 1000) + 1000, 1e15))
  redis.call('SET', key, struct.pack(FORMAT, unpack(values)), 'PX', keep_ms)
end

local function number(value)
  return string.format('%.17g', value)
end

-- The first bucket that the amounts are past, and the seconds until there is room.
local function refusal(buckets)
  for i = 1, BUCKETS do
    local bucket = buckets[i]
    if bucket then
      local amount = bucket.amount
      if act == 'begin' then
        amount = math.max(amount, LEAST)
      end
      local missing = math.min(amount, bucket.per_minute) - bucket.level
      local wait_s = missing * 60 / bucket.per_minute
      if amount > 0 and wait_s >= WAIT_S_MIN then
        return i, wait_s
      end
    end
  end
end

local function take(buckets)
  for i = 1, BUCKETS do
    local bucket = buckets[i]
    if bucket then
      bucket.level = math.min(bucket.level - bucket.amount, bucket.per_minute)
    end
  end
end

if act == 'settle' then
  for s = 1, #KEYS / 2 do
    -- Only the first settlement finds the place.
    if redis.call('ZREM', KEYS[2 * s], place) == 1 then
      local buckets = read(KEYS[2 * s - 1], 4 + (s - 1) * (1 + 2 * BUCKETS))
      take(buckets)
      write(KEYS[2 * s - 1], buckets)
    end
  end
  return '-'
end

local subjects, refused = {}, nil
for s = 1, #KEYS / 2 do
  local at = 4 + (s - 1) * (1 + 2 * BUCKETS)
  local subject = { key = KEYS[2 * s - 1], places = KEYS[2 * s], buckets = read(KEYS[2 * s - 1], at) }
  local most = tonumber(ARGV[at])
  subject.in_flight = redis.call('ZCARD', subject.places)
  if subject.in_flight >= most then
    -- Some places may be those that a dead gateway left.
    redis.call('ZREMRANGEBYSCORE', subject.places, '-inf', now_ms)
    subject.in_flight = redis.call('ZCARD', subject.places)
  end
  subjects[s] = subject
  if not refused then
    if act == 'begin' and most > 0 and subject.in_flight >= most then
      refused = s .. ',0,0'
    else
      local bucket, wait_s = refusal(subject.buckets)
      refused = bucket and s .. ',' .. bucket .. ',' .. number(wait_s)
    end
  end
end

local answer = { refused or '-' }
for _, subject in ipairs(subjects) do
  if not refused then
    take(subject.buckets)
    subject.in_flight = subject.in_flight + redis.call('ZADD', subject.places, now_ms + expires_ms, place)
    redis.call('PEXPIRE', subject.places, expires_ms + 1000)
  end
  table.insert(answer, tostring(subject.in_flight))
  for i = 1, BUCKETS do
    local bucket = subject.buckets[i]
    table.insert(answer, bucket and number(bucket.level) or '-')
  end
  if not refused then
    write(subject.key, subject.buckets)
  end
end
return table.concat(answer, ' ')
