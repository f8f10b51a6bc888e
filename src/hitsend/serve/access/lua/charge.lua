-- Add the cost of a request that was served while nobody could count it. KEYS[3..] levels with a budget. ARGV[4] its number:
-- each counts once, 5 cost, 6 the last moment known to be before it: what the ledger was read for later has it already.
local number, cost, since = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
if not is_alive(epoch) then
  return {'lost', now}
end
if tonumber(redis.call('HGET', KEYS[2], 'charged') or '0') >= number then
  return {'gone', now}
end
redis.call('HSET', KEYS[2], 'charged', text(number))
for i = 3, #KEYS do
  local level = load(KEYS[i])
  if level.seeded > 0 and level.seeded <= since then
    spend(level, cost)
    save(level)
  end
end
return {'ok', now}
