"""Runs code with vLLM's own modules, past any engine. By the engine's Python: each line of stdin has a `code` and what is
`asked`, each line of stdout the `answer` that the code left, or its `error`. One process serves all who ask: to import vLLM takes
10 s of CPU."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from typing import Any


def main() -> None:
    """Answer until stdin ends."""
    for line in sys.stdin:
        question = json.loads(line)
        names: dict[str, Any] = {"asked": question["asked"]}
        try:
            with contextlib.redirect_stdout(sys.stderr):
                exec(question["code"], names)
            reply = {"answer": names["answer"]}
        except (Exception, SystemExit):
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
