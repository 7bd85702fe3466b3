"""Real llama.cpp as a server, for the duration of a test."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@contextmanager
def llama_cpp(
    target: Path, draft: Path | None = None, tokens: int = 3, places: int = 4, method: str = "simple"
) -> Iterator[str]:
    """Serve a GGUF file, with another file as its draft if there is one, ``places`` texts at a time;
    yield the address.
    """
    speculation = [] if draft is None else [draft, str(tokens), method]
    python = BENCHMARKS.parent / ".venv-engines" / "bin" / "python"
    command = [python, BENCHMARKS / "llama_cpp_server.py", str(places), target, *speculation]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        yield f"{process.stdout.readline().strip()}/v1"
        process.stdin.close()
