"""llama.cpp as a server on the loopback, in exact arithmetic; needs the Python that `make engines` installs.

    .venv-engines/bin/python benchmarks/llama_cpp_server.py PLACES TARGET.gguf [DRAFT.gguf TOKENS METHOD]

It decodes PLACES texts of up to 1,024 tokens at a time. METHOD is simple, dspark or dflash. Its first output line is
its address; it stops when its standard input ends.
"""

import os
import sys

from served_llama_cpp import parameters_of

CONTEXT = 1024


def main(places: str, target: str, *speculation: str) -> None:
    """Serve until standard input ends."""
    address = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # all other output goes to standard error
    import xllamacpp

    case = {"target": target, "speculation": None, "prompts": [], "max_new_tokens": 0}
    if speculation:
        draft, tokens, method = speculation
        case["speculation"] = {"draft": draft, "tokens": int(tokens), "method": method}
    parameters = parameters_of(case)
    parameters.n_parallel, parameters.n_ctx = int(places), int(places) * CONTEXT
    server = xllamacpp.Server(parameters)
    print(server.listening_address, file=address, flush=True)
    sys.stdin.read()
    os._exit(0)  # do not wait for its threads


if __name__ == "__main__":
    main(*sys.argv[1:])
