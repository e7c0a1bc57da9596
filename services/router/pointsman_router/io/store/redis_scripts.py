"""The Lua scripts that Redis runs. Each is atomic, uses only keys of one pool (or of the fleet), and reads Redis' own clock.

A Redis that is full (maxmemory, noeviction) refuses commands that may take memory, but not after a first write of the same
script. So each script that must succeed begins with a write that takes none: leases, heartbeats, open reservations and the
operator config, which are few, are always written. Sessions, which are many, replace older ones while Redis is full.
"""

from __future__ import annotations

# Records a replica's heartbeat.
# KEYS: live replicas, their addresses, what they report about themselves, the operator config, lost replicas, and the times when
# replicas joined that have not replaced a lost one.
# ARGV: router id, address, time to live in ms, what the replica reports about itself, and the version (0: none) and the SHA-1 of
# the operator config that the caller last knew as stored.
# Returns {live replicas, config version, config, known, lost replicas}. Each live replica is {id, address, ms since its last
# heartbeat, what it reports}; each lost one is {id, ms since its last heartbeat}. The config is empty if the caller has it, since
# it may have a megabyte. `known` is 1 if the caller was registered; 0 at its first heartbeat, after a long silence, and if Redis
# has lost its data.
# A heartbeat of the future was recorded before the clock was set back. Its replica is removed, and sends another if it lives.
# A replica that falls silent without deregistering counts as lost for a day, until it returns, or until another replica
# joins: the same process restarts under a new id, before or after its silence is noticed.
HEARTBEAT = """
local known = redis.call('HGET', KEYS[2], ARGV[1]) and 1 or 0
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[5], 0, now - 86400000)
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[4])
if known == 0 and redis.call('ZREM', KEYS[5], ARGV[1]) == 0 then
  local replaced = redis.call('ZRANGE', KEYS[5], 0, 0)[1]
  if replaced then redis.call('ZREM', KEYS[5], replaced) else redis.call('ZADD', KEYS[6], now, ARGV[1]) end
end
local function lose(id, seen)
  redis.call('ZREM', KEYS[6], id)
  local joined = redis.call('ZRANGEBYSCORE', KEYS[6], seen, '+inf')[1]
  if joined then redis.call('ZREM', KEYS[6], joined) else redis.call('ZADD', KEYS[5], seen, id) end
end
local function forget(least, most)
  for _, dead in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], least, most)) do
    lose(dead, math.min(tonumber(redis.call('ZSCORE', KEYS[1], dead)), now))
    redis.call('ZREM', KEYS[1], dead)
    redis.call('HDEL', KEYS[2], dead)
    redis.call('HDEL', KEYS[3], dead)
  end
end
forget(0, now - tonumber(ARGV[3]))
forget(now + tonumber(ARGV[3]), '+inf')
local live = {}
local beats = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
for i = 1, #beats, 2 do
  local id = beats[i]
  local silent = math.max(now - tonumber(beats[i + 1]), 0)
  table.insert(live, {id, redis.call('HGET', KEYS[2], id) or '', silent, redis.call('HGET', KEYS[3], id) or ''})
end
local version, config = tonumber(redis.call('HGET', KEYS[4], 'version') or '0'), redis.call('HGET', KEYS[4], 'config') or ''
if version == tonumber(ARGV[5]) and redis.sha1hex(config) == ARGV[6] then config = '' end
local lost = {}
beats = redis.call('ZRANGE', KEYS[5], 0, -1, 'WITHSCORES')
for i = 1, #beats, 2 do table.insert(lost, {beats[i], math.max(now - tonumber(beats[i + 1]), 0)}) end
return {live, version, config, known, lost}
"""

# Replaces the operator config if its version is the one that the caller has merged.
# KEYS: operator config. ARGV: the version that the caller has merged, and its new config.
# Returns {version, config} as stored now. They are not the caller's if the stored version was another.
SET_CONFIG = """
local version = tonumber(redis.call('HGET', KEYS[1], 'version') or '0')
if version ~= tonumber(ARGV[1]) then return {version, redis.call('HGET', KEYS[1], 'config') or ''} end
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], 'version', version + 1, 'config', ARGV[2])
return {version + 1, ARGV[2]}
"""

# Takes a free pool or renews its lease.
# KEYS: lease, and the pool's state: epoch, number of the last change, open reservations, session owners, their expiry, what
# the owner has learned.
# ARGV: router id, address, lease in ms, the caller's epoch in this pool (0: it does not own the pool), the highest epoch that it
# has seen, take.
# A free pool is taken if take is 2, or if take is 1 and Redis has not lost its data. A caller whose epoch is the newest keeps it,
# however long ago its lease ended: nobody owned the pool in between, so the caller's state is the newest. Repeating a call whose
# reply was lost changes nothing. A new epoch is the time in ms, if it grows by that: so it is also higher than the epochs that
# Redis has lost with its data.
# An owner's call also removes sessions that have expired, so that they go without traffic, too.
# Returns {owner's id, its address, epoch, number of the last change, Redis' time in ms}. The id is empty if nobody owns the pool.
ACQUIRE = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local owner = redis.call('HGET', KEYS[1], 'id')
local epoch = tonumber(redis.call('GET', KEYS[2]) or '0')
if owner and owner ~= ARGV[1] then
  -- A lease that is too long was set before the clock was set back: shorten it.
  if redis.call('PTTL', KEYS[1]) > 2 * tonumber(ARGV[3]) then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
  return {owner, redis.call('HGET', KEYS[1], 'address'), epoch, 0, now}
end
local own, seen, take = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
if not owner and (take == 0 or (take == 1 and epoch < seen)) then return {'', '', epoch, 0, now} end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
for _, session in ipairs(redis.call('ZRANGEBYSCORE', KEYS[6], 0, now, 'LIMIT', 0, 500)) do
  redis.call('ZREM', KEYS[6], session)
  redis.call('HDEL', KEYS[5], session)
end
if own > 0 and own >= seen and own >= epoch then
  epoch = own
else
  epoch = math.max(epoch, seen, now) + 1
  redis.call('DEL', KEYS[3])
  -- The previous owner may have given the pool up, so that its keys expire.
  for i = 2, #KEYS do redis.call('PERSIST', KEYS[i]) end
end
redis.call('SET', KEYS[2], string.format('%.0f', epoch))
redis.call('HSET', KEYS[1], 'id', ARGV[1], 'address', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return {ARGV[1], ARGV[2], epoch, tonumber(redis.call('GET', KEYS[3]) or '0'), now}
"""

# Writes an owner's changes of a pool.
# KEYS: epoch, number of the last change, open reservations, session owners, their expiry, what
# the owner has learned.
# ARGV: epoch, time to live of sessions in ms, changes as JSON, number of the first change, maximum number of sessions.
# Returns 1, or 0 without a change if the epoch is not the newest.
# An owner numbers its changes without gaps, and changes that were applied before are skipped. So a write that timed out may be
# sent again, and a late copy of it undoes no newer change. A rewrite begins with "clear", or with "clear_open" if the stored
# sessions have not all been read yet. It ends with "complete".
# SETRANGE changes nothing here; it fails if Redis is full.
APPLY = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local full = type(redis.pcall('SETRANGE', KEYS[1], 0, '')) == 'table'
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('HDEL', KEYS[3], '')
local function forget(sessions)
  for _, session in ipairs(sessions) do
    redis.call('ZREM', KEYS[5], session)
    redis.call('HDEL', KEYS[4], session)
  end
  return #sessions
end
forget(redis.call('ZRANGEBYSCORE', KEYS[5], 0, now, 'LIMIT', 0, 200))
local function has_room(session)
  return not full or redis.call('HEXISTS', KEYS[4], session) == 1 or forget(redis.call('ZRANGE', KEYS[5], 0, 0)) == 1
end
local applied = tonumber(redis.call('GET', KEYS[2]) or '0')
local number = tonumber(ARGV[4]) - 1
for _, change in ipairs(cjson.decode(ARGV[3])) do
  number = number + 1
  if number > applied then
    if change[1] == 'put' then redis.call('HSET', KEYS[3], change[2], change[3])
    elseif change[1] == 'del' then redis.call('HDEL', KEYS[3], change[2])
    elseif change[1] == 'own' then
      if has_room(change[2]) then
        redis.call('HSET', KEYS[4], change[2], change[3])
        redis.call('ZADD', KEYS[5], now + tonumber(ARGV[2]), change[2])
      end
    elseif change[1] == 'disown' then
      redis.call('HDEL', KEYS[4], change[2])
      redis.call('ZREM', KEYS[5], change[2])
    elseif change[1] == 'learned' then
      redis.call('HSET', KEYS[6], change[2], change[3], change[2] .. '_at', string.format('%.0f', now))
    elseif change[1] == 'complete' then redis.call('HDEL', KEYS[6], 'incomplete')
    else
      redis.call('UNLINK', KEYS[3], KEYS[6])
      if change[1] == 'clear' then redis.call('UNLINK', KEYS[4], KEYS[5]) end
      redis.call('HSET', KEYS[6], 'incomplete', 1)
    end
  end
end
if number > applied then redis.call('SET', KEYS[2], number) end
local over = redis.call('ZCARD', KEYS[5]) - tonumber(ARGV[5])
if over > 0 then forget(redis.call('ZRANGE', KEYS[5], 0, over - 1)) end
return 1
"""

# Releases a pool, if the caller owns it. KEYS: lease. ARGV: router id.
RELEASE = "if redis.call('HGET', KEYS[1], 'id') == ARGV[1] then redis.call('DEL', KEYS[1]) end return 1"

# Lets a pool's state expire after a time, unless a replica owns the pool. Returns 1, or 0 if it is owned.
# KEYS: as for ACQUIRE. ARGV: time to live in ms.
GIVE_UP = """
if redis.call('HGET', KEYS[1], 'id') then return 0 end
for i = 2, #KEYS do redis.call('PEXPIRE', KEYS[i], ARGV[1]) end
return 1
"""

# Deregisters a replica. KEYS: live replicas, their addresses, what they report about themselves, and the times when replicas
# joined. ARGV: router id.
LEAVE = """
for _, key in ipairs({KEYS[1], KEYS[4]}) do redis.call('ZREM', key, ARGV[1]) end
for i = 2, 3 do redis.call('HDEL', KEYS[i], ARGV[1]) end
return 1
"""
