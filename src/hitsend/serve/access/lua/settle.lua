-- End a hold. KEYS[3..] its levels. ARGV[4] request id, 5-7 what was reserved and not used (less than 0: a debt), 8 money held,
-- 9 cost, 10 for a settlement that comes late: the last moment known to be before it, '' otherwise; then per level three
-- digits, 1 where it limits that rate. Answers ok; gone: it has ended already; lost: the server knows nothing of the gateway.
local id, held, cost, since = 'q:' .. ARGV[4], tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local is_reserved = redis.call('HGET', KEYS[2], id)
if not is_reserved then
  return {redis.call('EXISTS', KEYS[2]) == 1 and 'gone' or 'lost', now}
end
redis.call('HDEL', KEYS[2], id)

local function give_back(level, i, unused)
  local missing = level['m' .. i]
  if unused >= 0 then
    missing = math.max(0, missing - unused * UNITS)
  elseif -unused * UNITS > MOST_UNITS - missing then
    missing = MOST_UNITS
  else
    missing = missing - unused * UNITS
  end
  level['m' .. i] = missing
end

for k = 3, #KEYS do
  if redis.call('EXISTS', KEYS[k]) == 1 then
    local level = load(KEYS[k])
    for i = 1, 3 do
      if is_reserved == '1' and string.sub(ARGV[8 + k], i, i) == '1' then
        give_back(level, i, tonumber(ARGV[4 + i]))
      end
    end
    run(level, -1, held)
    -- spending that is being read from the ledger right now may lack this one; read later, the ledger has it
    local is_missing = level.mark > 0 and not since
    if level.seeded > 0 then
      is_missing = not since or level.seeded <= since
    end
    if is_missing then
      spend(level, cost)
    end
    save(level)
  end
end
return {'ok', now}
