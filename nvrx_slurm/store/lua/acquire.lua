-- A controller takes over: a new epoch fences every older one.
-- A fresh store, of a job that was requeued, and one that has lost its data count on from the journal's copy in the
-- job folder. They give no epoch to who has not read the newest of the copy: it could be one that was given before.
-- KEYS: epoch lease journal_n cursor others...   ARGV: owner ttl_ms kept_n kept_epoch -> {epoch, journal_n, cursor}
--   kept_epoch: '' where the copy is not read.   epoch 0: it has to be, and nothing was changed.
local kept_n, kept_epoch = tonumber(ARGV[3]), ARGV[4]
local epoch, last = tonumber(redis.call('GET', KEYS[1]) or '0'), tonumber(redis.call('GET', KEYS[3]) or '0')
if last < kept_n and kept_epoch == '' then return {0, last, '0-0'} end
epoch, last = math.max(epoch, tonumber(kept_epoch) or 0) + 1, math.max(last, kept_n)
redis.call('SET', KEYS[1], epoch)
redis.call('SET', KEYS[3], last)
for _, key in ipairs(KEYS) do redis.call('PERSIST', key) end  -- an earlier generation may have retired them
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return {epoch, last, redis.call('GET', KEYS[4]) or '0-0'}
