-- One batch of decisions: all or nothing, only by the newest controller, only onto the journal as it saw it.
-- KEYS: epoch journal_n journal orders cursor shutdown controller inbox rendezvous...
-- ARGV: epoch first_n cursor shutdown controller #entries entry... #orders order... {#fields node assignment ...}...
--   -> {'ok' | 'already' | 'fenced' | 'lost', microseconds since the epoch}
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local newest, mine = tonumber(redis.call('GET', KEYS[1]) or '0'), tonumber(ARGV[1])
if newest ~= mine then return {newest > mine and 'fenced' or 'lost', now} end

local first, entries = tonumber(ARGV[2]), tonumber(ARGV[6])
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
if entries > 0 and first <= last then
  -- It was sent again. Or the entries are another controller's: a store that has lost its data, of which no copy has
  -- anything, gives an epoch again.
  local newest = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)[1]
  return {newest and newest[2][2] == ARGV[6 + entries] and 'already' or 'lost', now}
end
if entries > 0 and first ~= last + 1 then return {'lost', now} end

local at = 6
for i = at + 1, at + entries do redis.call('XADD', KEYS[3], '*', 'm', ARGV[i]) end
if entries > 0 then redis.call('SET', KEYS[2], last + entries) end
at = at + entries + 1

-- Assignments first, orders last: an agent that reads the close of a rendezvous can read its ranks.
local orders = tonumber(ARGV[at])
local field = at + orders + 1
for k = 9, #KEYS do
  local fields = tonumber(ARGV[field])
  for i = field + 1, field + fields, 2 do redis.call('HSET', KEYS[k], ARGV[i], ARGV[i + 1]) end
  redis.call('EXPIRE', KEYS[k], 3600)
  field = field + fields + 1
end
if ARGV[4] ~= '' then redis.call('SET', KEYS[6], ARGV[4], 'NX') end
if ARGV[5] ~= '' then redis.call('SET', KEYS[7], ARGV[5]) end
for i = at + 1, at + orders do redis.call('XADD', KEYS[4], 'MAXLEN', '~', 4096, '*', 'm', ARGV[i]) end
if ARGV[3] ~= '' then
  redis.call('SET', KEYS[5], ARGV[3])
  redis.call('XTRIM', KEYS[8], 'MINID', '~', ARGV[3])
end
return {'ok', now}
