"""llama.cpp as a server on the loopback, in exact arithmetic: run by the Python that `make engines` installs.

    .venv-engines/bin/python benchmarks/llama_cpp_server.py PLACES TARGET.gguf [DRAFT.gguf TOKENS METHOD]

It decodes PLACES texts of up to 1,024 tokens at a time. METHOD is simple, dspark or dflash. Its first line of output is
its address; it ends with its standard input.
"""

import os
import sys

from served_llama_cpp import parameters_of

CONTEXT = 1024


def main(places: str, target: str, *speculation: str) -> None:
    """Serve until standard input ends."""
    address = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
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
    os._exit(0)  # its threads have nothing left to say


if __name__ == "__main__":
    main(*sys.argv[1:])
