-- A controller takes over: a new epoch fences every older one.
-- A fresh store, of a job that was requeued, and one that has lost its data count on from the journal's copy in the
-- job folder.
-- KEYS: epoch lease journal_n cursor others...   ARGV: owner ttl_ms kept_n kept_epoch   -> {epoch, journal_n, cursor}
local function largest(key, kept) return math.max(tonumber(redis.call('GET', key) or '0'), tonumber(kept)) end
local epoch, last = largest(KEYS[1], ARGV[4]) + 1, largest(KEYS[3], ARGV[3])
redis.call('SET', KEYS[1], epoch)
redis.call('SET', KEYS[3], last)
for _, key in ipairs(KEYS) do redis.call('PERSIST', key) end  -- an earlier generation may have retired them
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return {epoch, last, redis.call('GET', KEYS[4]) or '0-0'}
