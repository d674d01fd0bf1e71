-- An agent introduces itself: its join is in the inbox, and it gets all that it must know from that moment on.
-- KEYS: inbox orders shutdown controller   ARGV: record   -> {id of the last order, shutdown or '', controller or ''}
redis.call('XADD', KEYS[1], '*', 'm', ARGV[1])
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
return {last[1] and last[1][1] or '0-0', redis.call('GET', KEYS[3]) or '', redis.call('GET', KEYS[4]) or ''}
