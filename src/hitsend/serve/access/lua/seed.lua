-- What the ledger has of a level, KEYS[3]. ARGV[4] the mark that was given when reading began, 5 the day it was read for,
-- 6 spent that day, 7 spent that month. Costs settled since the mark come on top.
local level = load(KEYS[3])
if level.seeded > 0 or level.mark ~= tonumber(ARGV[4]) then
  return {'stale', now}
end
local day = tonumber(ARGV[5])
if day == level.day then
  level.sd = math.min(MOST_MONEY, level.sd + tonumber(ARGV[6]))
end
if month_of(day) == month_of(level.day) then
  level.sm = math.min(MOST_MONEY, level.sm + tonumber(ARGV[7]))
end
level.seeded, level.mark = latest, 0
save(level)
return {'ok', now}
