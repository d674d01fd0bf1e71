"""What Redis and Valkey give a Lua script: `redis.call`, KEYS and ARGV, their conversions, and nothing of the host.

The scripts of `store/lua` run unchanged, on Lua 5.1 as in the server (`lupa` embeds it). `COMMANDS` has the commands
that they call; one that is missing fails as an unknown one does. cjson, cmsgpack, bit and struct are missing too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha1
from typing import Any

from redis.exceptions import RedisError, ResponseError

from nvrx_slurm.errors import MissingProgramError
from nvrx_slurm.lab.simulation.valkey_keyspace import NOT_A_NUMBER, Keyspace

# `run` returns true and the script's value, or false and a table like that of an error reply. The server also appends
# the line of the script to that.
_SURROUNDINGS = b"""
local command = ...
local error, loadstring, lua_pcall = error, loadstring, pcall
local setfenv, setmetatable, tostring, type, xpcall = setfenv, setmetatable, tostring, type, xpcall

local function readonly(values)
  return setmetatable({}, {
    __index = function(_, name)
      local value = values[name]
      if value == nil and values._G then
        error("Script attempted to access nonexistent global variable '" .. tostring(name) .. "'", 2)
      end
      return value
    end,
    __newindex = function() error('Attempt to modify a readonly table', 2) end,
    __metatable = false,
  })
end

local function call(...)
  local reply = command(...)
  if type(reply) == 'table' and reply.err then error(reply, 0) end
  return reply
end

-- The server's own: a script that catches an error of redis.call gets its text.
local function pcall(...)
  local function texted(ok, first, ...)
    if not ok and type(first) == 'table' and first.err then first = first.err end
    return ok, first, ...
  end
  return texted(lua_pcall(...))
end

local function error_reply(text)
  return {err = text:find('^%-') and text:sub(2) or text:find(' ') and text or 'ERR ' .. text}
end

local api = readonly({
  call = call, pcall = function(...) return command(...) end, error_reply = error_reply,
  status_reply = function(text) return {ok = text} end,
})
local globals = {
  redis = api, server = api, string = string, table = table, math = math, assert = assert, error = error,
  ipairs = ipairs, next = next, pairs = pairs, pcall = pcall, rawequal = rawequal, rawget = rawget, rawset = rawset,
  select = select, tonumber = tonumber, tostring = tostring, type = type, unpack = unpack, xpcall = xpcall,
}
local environment = readonly(globals)
globals._G = environment

local function failed(reason)
  return type(reason) == 'table' and reason or {err = 'ERR ' .. tostring(reason)}
end

local function compile(text)
  local script, reason = loadstring(text, '@user_script')
  return script and setfenv(script, environment) or reason
end

local function run(script, keys, argv)
  globals.KEYS, globals.ARGV = keys, argv
  return xpcall(script, failed)
end

return {compile = compile, run = run}
"""


class LuaScripts:
    """Compiles and runs scripts on any keyspace. One serves all servers of a process: a script is compiled once.

    Raises MissingProgramError where lupa is not installed.
    """

    def __init__(self) -> None:
        try:
            from lupa.lua51 import LuaRuntime, lua_type
        except ImportError:
            raise MissingProgramError(
                "ci simulate needs the package lupa, which runs the store's scripts: pip install 'nvrx-slurm[ci]'"
            ) from None
        # Bytes in, bytes out. Scripts get only what `_SURROUNDINGS` hands them: no Python object is in their reach.
        runtime = LuaRuntime(encoding=None, unpack_returned_tuples=True, register_eval=False, register_builtins=False)
        self._table_from, self._type_of = runtime.table_from, lua_type
        surroundings = runtime.execute(_SURROUNDINGS, self._command)
        self._compile, self._run = surroundings[b"compile"], surroundings[b"run"]
        self._compiled: dict[bytes, Any] = {}
        self._data: Keyspace
        self._mistake: Exception | None = None

    def compile(self, text: bytes) -> tuple[str, Any]:
        """The SHA1 under which EVALSHA calls a script, and the script. Raises ResponseError where it is not Lua."""
        if (script := self._compiled.get(text)) is None:
            compiled = self._compile(text)
            if isinstance(compiled, bytes):
                raise ResponseError(f"Error compiling script (new function): {compiled.decode()}")
            script = self._compiled[text] = compiled
        return sha1(text).hexdigest(), script

    def run(self, script: Any, data: Keyspace, keys: Sequence[bytes], args: Sequence[bytes]) -> Any:
        """The reply. Raises ResponseError where the script fails; what it has written by then stays, as in the
        server."""
        self._data = data
        data.stand_still()  # as in the server: TIME and expiry do not move within a script
        try:
            done = self._run(script, self._table_from(keys), self._table_from(args))
        finally:
            data.go_on()
        if (mistake := self._mistake) is not None:
            self._mistake = None
            raise mistake
        ok, value = done if isinstance(done, tuple) else (done, None)
        if not ok:
            raise _error(value[b"err"].decode())
        return self._reply(value)

    def _command(self, *args: Any) -> Any:
        """`redis.call`, but an error is returned, as `redis.pcall` does. Called by Lua."""
        try:
            reply = _perform(self._data, args)
        except RedisError as error:
            text = str(error)
            coded = text.partition(" ")[0].isupper()  # as in WRONGTYPE; without one redis-py has dropped "ERR"
            return self._table_from({b"err": (text if coded else f"ERR {text}").encode()})
        except Exception as error:  # a mistake of this module, which no script may catch
            self._mistake = error
            return self._table_from({b"err": b"ERR the in-memory server has failed"})
        return reply if type(reply) is bytes else self._value(reply)

    def _value(self, reply: Any) -> Any:
        """A command's reply in Lua: nil is false, a status is a table."""
        if type(reply) is bytes:
            return reply
        if reply is None:
            return False
        if reply is True:
            return self._table_from({b"ok": b"OK"})
        if isinstance(reply, list | tuple):
            return self._table_from([self._value(each) for each in reply])
        return reply

    def _reply(self, value: Any) -> Any:
        """A script's value as a reply: numbers lose their fraction, an array ends before its first nil."""
        if type(value) is bytes or value is None:
            return value
        # Before the numbers, since to Python a boolean is an int: false is a nil reply, and not 0.
        if isinstance(value, bool):
            return 1 if value else None
        if isinstance(value, int | float):
            return int(value)
        if self._type_of(value) != "table":
            return None
        if isinstance(reason := value[b"err"], bytes):
            raise _error(reason.decode())
        if isinstance(status := value[b"ok"], bytes):
            return status
        return [self._reply(each) for each in iter(map(value.__getitem__, itertools.count(1)).__next__, None)]


@cache
def lua_scripts() -> LuaScripts:
    """This process's."""
    return LuaScripts()


def _error(text: str) -> ResponseError:
    """As redis-py raises it."""
    return ResponseError(text.removeprefix("ERR "))


# ---- the commands


def _perform(data: Keyspace, args: Sequence[Any]) -> Any:
    if not args:
        raise ResponseError("Please specify at least one argument for this call")
    name, *words = [each if type(each) is bytes else _word(each) for each in args]
    if (command := COMMANDS.get(name.upper())) is None:
        raise ResponseError("Unknown command called from script")
    least, most, do = command
    if not least <= len(words) <= most:
        raise ResponseError("Wrong number of args calling command from script")
    return do(data, *words)


def _word(value: Any) -> bytes:
    """An argument as it is sent: whole numbers below 2^63 have no exponent, and no fraction."""
    if type(value) is bytes:
        return value
    if type(value) is int or (type(value) is float and value.is_integer() and abs(value) < 1 << 63):
        return b"%d" % value
    if type(value) is float:
        return repr(value).replace("e-0", "e-").encode()
    raise ResponseError("Command arguments must be strings or integers")


def _number(word: bytes) -> int:
    try:
        return int(word)
    except ValueError:
        raise ResponseError(NOT_A_NUMBER) from None


def _set(data: Keyspace, key: bytes, value: bytes, *options: bytes) -> bool | None:
    px, nx, words = None, False, iter(options)
    for option in words:
        match option.upper():
            case b"NX":
                nx = True
            case b"PX" if (px := _number(next(words, b""))) <= 0:
                raise ResponseError("invalid expire time in 'set' command")
            case b"PX":
                pass
            case _:
                raise ResponseError("syntax error")
    return data.set(key, value, px=px, nx=nx)


def _hset(data: Keyspace, key: bytes, *pairs: bytes) -> int:
    if len(pairs) % 2:
        raise ResponseError("Wrong number of args calling command from script")
    return data.hset(key, mapping=dict(zip(pairs[::2], pairs[1::2], strict=True)))


def _hsetnx(data: Keyspace, key: bytes, field: bytes, value: bytes) -> int:
    return data.hset(key, field, value) if data.hget(key, field) is None else 0


def _xadd(data: Keyspace, key: bytes, *words: bytes) -> bytes:
    maxlen, approximate = None, False
    if words[0].upper() == b"MAXLEN":
        approximate = words[1] == b"~"
        words = words[1 + (words[1] in (b"~", b"=")) :]
        maxlen, words = _number(words[0]), words[1:]
    identity, *fields = words
    if len(fields) % 2 or not fields:
        raise ResponseError("wrong number of arguments for 'xadd' command")
    pairs = dict(zip(fields[::2], fields[1::2], strict=True))
    return data.xadd(key, pairs, id=identity.decode(), maxlen=maxlen, approximate=approximate)


def _xtrim(data: Keyspace, key: bytes, strategy: bytes, *words: bytes) -> int:
    if strategy.upper() != b"MINID":
        raise ResponseError("syntax error")  # MAXLEN too: no script uses it
    return data.xtrim(key, words[-1], approximate=words[0] == b"~")


def _xrevrange(data: Keyspace, key: bytes, last: bytes, first: bytes, *count: bytes) -> list[Any]:
    return data.xrevrange(key, last, first, _number(count[1]) if count else None)


def _time(data: Keyspace) -> list[bytes]:
    return [b"%d" % part for part in data.time()]


MANY = 1 << 20
COMMANDS: dict[bytes, tuple[int, int, Callable[..., Any]]] = {
    # name: least and most arguments, what it does
    b"TIME": (0, 0, _time),
    b"GET": (1, 1, Keyspace.get),
    b"SET": (2, MANY, _set),
    b"EXPIRE": (2, 2, lambda data, key, time_s: int(data.expire(key, _number(time_s)))),
    b"PERSIST": (1, 1, lambda data, key: int(data.persist(key))),
    b"HGET": (2, 2, Keyspace.hget),
    b"HSET": (3, MANY, _hset),
    b"HSETNX": (3, 3, _hsetnx),
    b"XADD": (4, MANY, _xadd),
    b"XTRIM": (3, 4, _xtrim),
    b"XREVRANGE": (3, 5, _xrevrange),
}
