-- Take a request on all levels, or on none. KEYS[3..] levels. ARGV[4] request id, 5 input tokens, 6 output tokens, 7 money,
-- 8 '1': take nothing, only tell; then seven limits per level, '' for none.
-- Answers ok or no, with the levels' counters; seed: whose spending the ledger must tell first; twice; lost; late.
local id, asked, held = 'q:' .. ARGV[4], {1, tonumber(ARGV[5]), tonumber(ARGV[6])}, tonumber(ARGV[7])
local is_preview = ARGV[8] == '1'
local levels, unseeded = {}, {}

local function limit(level, number)
  return tonumber(ARGV[level.limits + number])
end

local function fits(level)
  local does = true
  for i = 1, 3 do
    local rate = limit(level, i)
    if rate then
      level['r' .. i] = rate -- from now on what is missing comes back at this rate
      if asked[i] > rate or (asked[i] > 0 and level['m' .. i] + (asked[i] - rate) * UNITS > 0) then
        does = false
      end
    end
  end
  local parallel, size, day, month = limit(level, 4), limit(level, 5), limit(level, 6), limit(level, 7)
  does = does and not (parallel and level.run >= parallel)
  does = does and not (size and asked[2] + asked[3] > size)
  does = does and not (day and held > 0 and level.sd + level.held + held > day)
  return does and not (month and held > 0 and level.sm + level.held + held > month)
end

local function take(level)
  for i = 1, 3 do
    if limit(level, i) then
      level['m' .. i] = level['m' .. i] + asked[i] * UNITS
    end
  end
  run(level, 1, held)
end

if not is_alive(epoch) then
  return {'lost', now}
end
for i = 3, #KEYS do
  local level = load(KEYS[i])
  level.limits = 8 + (i - 3) * 7
  levels[#levels + 1] = level
  if (limit(level, 6) or limit(level, 7)) and level.seeded == 0 then
    if level.mark == 0 or now > level.mark + SEEDING_US then
      level.mark, level.sd, level.sm = now, 0, 0
    end
    save(level)
    unseeded[#unseeded + 1] = {i - 3, level.day, level.mark}
  end
end
if #unseeded > 0 then
  return {'seed', now, unseeded}
end
if redis.call('HEXISTS', KEYS[2], id) == 1 then
  return {'twice', now}
end
local does = true
for _, level in ipairs(levels) do
  does = fits(level) and does
end
if does and not is_preview then
  redis.call('HSET', KEYS[2], id, '1')
end
local states = {}
for i, level in ipairs(levels) do
  if does and not is_preview then
    take(level)
    save(level)
  elseif not level.is_new then
    save(level)
  end
  if does and is_preview then
    take(level)
  end
  states[i] = state_of(level)
end
return {does and 'ok' or 'no', now, states}
