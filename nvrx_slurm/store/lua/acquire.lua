-- A controller takes over: a new epoch fences every older one.
-- KEYS: epoch lease journal_n cursor   ARGV: owner ttl_ms   -> {epoch, journal_n, cursor}
local epoch = redis.call('INCR', KEYS[1])
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return {epoch, tonumber(redis.call('GET', KEYS[3]) or '0'), redis.call('GET', KEYS[4]) or '0-0'}
