"""Real llama.cpp as a server for as long as a test needs it, in the engines' own environment."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_PROGRAM = """
import json, os, sys, xllamacpp
from served_llama_cpp import _parameters
case = json.loads(sys.argv[1])
parameters = _parameters(case)
parameters.n_parallel, parameters.n_ctx = case["places"], case["places"] * 256
address = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
server = xllamacpp.Server(parameters)
print(server.listening_address, file=address, flush=True)
sys.stdin.read()
os._exit(0)
"""


@contextmanager
def llama_cpp(target: Path, draft: Path | None = None, tokens: int = 3, places: int = 4) -> Iterator[str]:
    """Serve a GGUF file, with another as its draft if given, ``places`` texts at a time; yields the address."""
    speculation = None if draft is None else {"draft": str(draft), "tokens": tokens, "method": "simple"}
    case = {"target": str(target), "speculation": speculation, "prompts": [], "max_new_tokens": 0, "places": places}
    command = [ROOT / ".venv-engines" / "bin" / "python", "-c", _PROGRAM, json.dumps(case)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT / "benchmarks", text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        yield f"{process.stdout.readline().strip()}/v1"
        process.stdin.close()
