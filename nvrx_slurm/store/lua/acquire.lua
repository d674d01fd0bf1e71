-- A controller takes over: a new epoch fences every older one.
-- A fresh store of a job that was requeued counts on from the journal that the job folder has kept.
-- KEYS: epoch lease journal_n cursor others...   ARGV: owner ttl_ms kept_n   -> {epoch, journal_n, cursor}
local epoch = redis.call('INCR', KEYS[1])
for _, key in ipairs(KEYS) do redis.call('PERSIST', key) end  -- an earlier generation may have retired them
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[3], ARGV[3], 'NX')
return {epoch, tonumber(redis.call('GET', KEYS[3])), redis.call('GET', KEYS[4]) or '0-0'}
