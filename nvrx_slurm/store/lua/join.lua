-- An agent introduces itself: its join is in the inbox, and it gets all that it must know from that moment on.
-- Where the reply is lost and it asks again, the moment is still that of the first time: what was ordered since is
-- for it, too.
-- KEYS: inbox orders shutdown controller joins   ARGV: record incarnation
--   -> {id of the last order before it joined, shutdown or '', controller or ''}
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
if redis.call('HSETNX', KEYS[5], ARGV[2], last[1] and last[1][1] or '0-0') == 1 then
  redis.call('XADD', KEYS[1], '*', 'm', ARGV[1])
end
local since = redis.call('HGET', KEYS[5], ARGV[2])
return {since, redis.call('GET', KEYS[3]) or '', redis.call('GET', KEYS[4]) or ''}
