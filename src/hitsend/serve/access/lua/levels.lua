-- What every script begins with: the moment, and levels read, advanced and written back.
-- KEYS[1] the latest moment seen, KEYS[2] the holds of the gateway that calls; then what each script says.
-- ARGV[1] prefix of all keys, ARGV[2] the gateway's epoch, ARGV[3] the moment after which the call must do nothing (0: none).
-- A level is one hash: at, day, m1-m3 (missing units), r1-r3 (rates), run, held, sd, sm (spent in day and month), seeded (when
-- the ledger was read, 0: never), mark (when reading began), and R:epoch, H:epoch (what each gateway runs and holds).
-- Lua's numbers are doubles: every integer here stays below 2^53. tests/access/test_valkey_bounds.py proves it.
local UNITS = 60000000
local MOST_UNITS = 9000000000000000
local MOST_MONEY = 4000000000000000
local DAY_US = 86400000000
local SEEDING_US = 60000000
local IDLE_MS = 86400000
local LONGEST_MS = 2592000000
local NUMBERS = {'at', 'day', 'm1', 'm2', 'm3', 'r1', 'r2', 'r3', 'run', 'held', 'sd', 'sm', 'seeded', 'mark'}

local prefix, epoch, deadline = ARGV[1], ARGV[2], tonumber(ARGV[3])
local now = clock()
if deadline > 0 and now > deadline then
  return {'late', now}
end
local seen = tonumber(redis.call('GET', KEYS[1]) or '0')
local latest = math.max(now, seen)

-- Not tostring: it keeps 14 digits.
local function text(number)
  return string.format('%.0f', number)
end

if now > seen then
  redis.call('SET', KEYS[1], text(now))
end

local function month_of(day)
  local year, left = 1970, day
  while true do
    local is_leap = year % 4 == 0 and (year % 100 ~= 0 or year % 400 == 0)
    local length = is_leap and 366 or 365
    if left < length then
      local months = {31, is_leap and 29 or 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31}
      local month = 1
      while left >= months[month] do
        left = left - months[month]
        month = month + 1
      end
      return year * 12 + month - 1
    end
    left = left - length
    year = year + 1
  end
end

local alive = {}
local function is_alive(who)
  if alive[who] == nil then
    local till = redis.call('HGET', prefix .. 'holds:' .. who, 'until')
    alive[who] = till ~= false and tonumber(till) > now
  end
  return alive[who]
end

local function advance(level)
  local elapsed = now - level.at
  if elapsed > 0 then
    level.at = now
    for i = 1, 3 do
      local missing, rate = level['m' .. i], level['r' .. i]
      if missing > 0 and rate > 0 then
        if elapsed >= MOST_UNITS / rate then -- before multiplying: the product must stay exact
          missing = 0
        else
          missing = math.max(0, missing - elapsed * rate)
        end
        level['m' .. i] = missing
      end
    end
  end
  local day = math.floor(now / DAY_US)
  if day > level.day then
    if month_of(day) ~= month_of(level.day) then
      level.sm = 0
    end
    level.sd = 0
    level.day = day
  end
end

local function save(level)
  local values = {}
  for _, name in ipairs(NUMBERS) do
    values[#values + 1] = name
    values[#values + 1] = text(level[name])
  end
  local mine = level.owners[epoch]
  if mine and mine.R > 0 then
    values[#values + 1] = 'R:' .. epoch
    values[#values + 1] = text(mine.R)
    values[#values + 1] = 'H:' .. epoch
    values[#values + 1] = text(mine.H)
  elseif mine then
    redis.call('HDEL', level.key, 'R:' .. epoch, 'H:' .. epoch)
  end
  redis.call('HSET', level.key, unpack(values))
  local keep_ms = IDLE_MS
  for i = 1, 3 do
    local missing, rate = level['m' .. i], level['r' .. i]
    if missing > 0 then
      keep_ms = math.max(keep_ms, rate > 0 and IDLE_MS + math.ceil(missing / rate / 1000) or LONGEST_MS)
    end
  end
  if level.run > 0 then
    keep_ms = LONGEST_MS
  end
  redis.call('PEXPIRE', level.key, text(math.min(keep_ms, LONGEST_MS)))
end

-- The level as it is now; what gateways held whose lease is over is released.
local function load(key)
  local level = {key = key, owners = {}}
  for _, name in ipairs(NUMBERS) do
    level[name] = 0
  end
  local raw = redis.call('HGETALL', key)
  level.is_new = #raw == 0
  if level.is_new then
    level.at = latest
    level.day = math.floor(latest / DAY_US)
  end
  for i = 1, #raw, 2 do
    local kind, who = string.match(raw[i], '^([RH]):(.+)$')
    if kind then
      level.owners[who] = level.owners[who] or {R = 0, H = 0}
      level.owners[who][kind] = tonumber(raw[i + 1])
    else
      level[raw[i]] = tonumber(raw[i + 1])
    end
  end
  advance(level)
  local dead = {}
  for who, has in pairs(level.owners) do
    if not is_alive(who) then
      level.run = level.run - has.R
      level.held = math.max(0, level.held - has.H)
      dead[#dead + 1] = who
    end
  end
  for _, who in ipairs(dead) do
    level.owners[who] = nil
    redis.call('HDEL', key, 'R:' .. who, 'H:' .. who)
  end
  if #dead > 0 then
    save(level)
  end
  return level
end

-- One more, or with count -1 one less, of what this gateway runs on the level.
local function run(level, count, held)
  local mine = level.owners[epoch]
  if count < 0 and (not mine or mine.R < 1) then
    return -- released already: its lease was over
  end
  mine = mine or {R = 0, H = 0}
  level.owners[epoch] = mine
  mine.R = mine.R + count
  mine.H = math.max(0, math.min(MOST_MONEY, mine.H + count * held))
  level.run = level.run + count
  level.held = math.max(0, math.min(MOST_MONEY, level.held + count * held))
end

local function spend(level, cost)
  level.sd = math.min(MOST_MONEY, level.sd + cost)
  level.sm = math.min(MOST_MONEY, level.sm + cost)
end

local function state_of(level)
  return {level.at, level.day, level.m1, level.m2, level.m3, level.r1, level.r2, level.r3,
    level.run, level.held, level.sd, level.sm, level.seeded}
end
