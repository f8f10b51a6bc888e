-- The server's own clock, in microseconds since the epoch. The only one that counts: those of gateways may differ.
local function clock()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end
