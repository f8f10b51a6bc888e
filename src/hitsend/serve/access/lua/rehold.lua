-- Hold again, in a new epoch, what still runs. KEYS[3] the holds of the epoch before, KEYS[4..] levels. ARGV[4] request id,
-- 5 money. Tokens stay as they are; a server that was emptied never took them, so it gives none back either.
local id, held = 'q:' .. ARGV[4], tonumber(ARGV[5])
if not is_alive(epoch) then
  return {'lost', now}
end
if redis.call('HEXISTS', KEYS[2], id) == 1 then
  return {'ok', now}
end
local is_reserved = redis.call('HGET', KEYS[3], id)
redis.call('HDEL', KEYS[3], id)
redis.call('HSET', KEYS[2], id, is_reserved or '0')
for i = 4, #KEYS do
  local level = load(KEYS[i])
  run(level, 1, held)
  save(level)
end
return {'ok', now}
