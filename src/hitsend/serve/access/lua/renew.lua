-- Go on holding, or begin to. ARGV[4] lease in microseconds, 5 '1': begin. Answers ok; lost: the lease was over.
if ARGV[5] ~= '1' and not is_alive(epoch) then
  return {'lost', now}
end
redis.call('HSET', KEYS[2], 'until', text(now + tonumber(ARGV[4])))
redis.call('PEXPIRE', KEYS[2], text(LONGEST_MS))
return {'ok', now}
