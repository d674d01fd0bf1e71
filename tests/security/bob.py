"""Runs one function as a second user of this machine: `bob.py UID FILE FUNCTION < arguments as JSON`.

It imports as the user who runs the tests, and then gives up that identity for good: Python and the checkout may be in
folders that bob cannot read. It exits when its standard input is closed, since alice cannot signal bob's processes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from pathlib import Path

RESULT = "result: "


def end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    uid, file, name = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    arguments = json.loads(sys.stdin.readline())
    sys.path.insert(0, str(Path(__file__).parents[2]))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.chdir("/")
    os.environ.clear()
    os.environ.update(PATH="/usr/sbin:/usr/bin:/sbin:/bin", HOME="/nonexistent", LANG="C.UTF-8")
    threading.Thread(target=end_with_input, daemon=True).start()
    result = getattr(module, name)(*arguments)
    print(RESULT + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
