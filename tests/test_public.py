"""The public names of the packages; importing a package without using a name costs nothing."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

PUBLIC = {
    "decoding": {"Conversation", "DecodingConfig", "Engine", "HeadstartModel", "SamplingConfig", "speculate"},
    "trainer": {"load_recipe", "run_recipe"},
}


@pytest.mark.parametrize("package", PUBLIC)
def test_the_public_names_are_their_modules_own_and_typed(package: str) -> None:
    module = import_module(package)
    assert set(module.__all__) == PUBLIC[package] <= set(dir(module))
    stub = ast.parse(Path(str(module.__file__)).with_suffix(".pyi").read_text())
    typed = {
        alias.name: str(node.module) for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert typed.keys() == PUBLIC[package]
    for name, home in typed.items():
        assert getattr(module, name) is getattr(import_module(home), name)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'speculator'"):
        module.speculator  # noqa: B018  # asking is the test


def test_importing_the_packages_does_not_import_torch() -> None:
    program = "import decoding, trainer, sys; print(sorted({'torch', 'transformers', 'pydantic'} & sys.modules.keys()))"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
